"""GPT-2-small trained data-parallel, as a rank of torchrun: bf16 autocast, fused AdamW. Each step's loss and
time, and a digest of the weights, in one line of JSON.

--shared: the ranks are on one GPU. Each rank's status is in a file of its own."""

from __future__ import annotations

import json
import os
import time

import workload

parser = workload.arguments(__doc__, steps=60)
parser.add_argument("--shared", action="store_true")
RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
os.environ["NCCL_NVLS_ENABLE"] = "0"

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch_workload import Tokens, digest, gpt_arguments, make_gpt, prepare  # noqa: E402

gpt_arguments(parser)
options = parser.parse_args()
if options.shared:  # NCCL takes each rank for another machine's
    os.environ |= {"NCCL_HOSTID": f"rank-{RANK}", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
device = torch.device("cuda", 0 if options.shared else RANK % torch.cuda.device_count())
torch.cuda.set_device(device)
prepare(options)
began = time.monotonic()
dist.init_process_group("nccl", device_id=device)
dist.all_reduce(torch.ones(1, device=device))
torch.cuda.synchronize()
ready = time.monotonic() - began
model = make_gpt(options)
ddp = torch.nn.parallel.DistributedDataParallel(model, device_ids=[device.index], init_sync=options.steps > 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
options.seed += RANK
tokens = Tokens(options)
losses: list[torch.Tensor] = []
times: list[float] = []
status = workload.Status(options.status.with_suffix(f".{RANK}") if options.status else None)


def loss_of(batch: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cuda", torch.bfloat16):
        logits = ddp(batch[:, :-1])
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


last = time.monotonic()
for step in range(options.warmup + options.steps):
    status.step(step)
    status.phase("forward")
    loss = loss_of(tokens())
    status.phase("backward")
    loss.backward()
    status.phase("optimizer")
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.detach())
    torch.cuda.synchronize()
    now = time.monotonic()
    times.append(now - last)
    last = now
status.phase("end")
dist.barrier()
result = {
    "rank": RANK, "init_s": ready, "losses": torch.stack(losses).float().tolist(), "times_s": times,
    "sha256": digest(model.state_dict().values()),
}  # fmt: skip
dist.destroy_process_group()
print(json.dumps(result), flush=True)
