"""GPT-2-small trained data-parallel, as a rank of torchrun: bf16 autocast, fused AdamW. Each step's loss and
time, and a digest of the weights, in one line of JSON.

--until: ends before --steps. --rest: seconds of nothing behind every sixteenth step. --sums: behind all steps go on
with all-reduces until --until is there; a null device computes no second step. --shared, --own, --backend:
torch_ranks.py. Each rank's status is in a file of its own."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
import torch_ranks
import torch_workload
import workload
from torch_ranks import RANK
from torch_workload import Tokens, digest, gpt_arguments, make_gpt, prepare

parser = workload.arguments(__doc__, steps=60)
gpt_arguments(parser)
torch_ranks.arguments(parser)
parser.add_argument("--rest", type=float, default=0.0)
parser.add_argument("--sums", action="store_true")
options = parser.parse_args()
device = torch_ranks.use_device(options)
prepare(options)
began = time.monotonic()
torch_ranks.join(options, device)
ready = time.monotonic() - began
model = make_gpt(options)
ddp = torch.nn.parallel.DistributedDataParallel(model, init_sync=options.steps > 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
options.seed += RANK
tokens = Tokens(options)
losses: list[torch.Tensor] = []
times: list[float] = []
ends: list[float] = []  # when each step ended
status = torch_ranks.status(options)


def loss_of(batch: torch.Tensor) -> torch.Tensor:
    with torch.autocast(torch_workload.DEVICE, torch.bfloat16):
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
    over = torch_ranks.over(step, options.until, device)
    torch_ranks.synchronize()
    now = time.monotonic()
    times.append(now - last)
    ends.append(now)
    last = now
    if over:
        break
    if options.rest and step % 16 == 15:
        time.sleep(options.rest)
        last = time.monotonic()
number = len(times)
while options.sums and not torch_ranks.agreed(number, options.until):
    status.step(number)
    status.phase("forward")
    dist.all_reduce(torch.ones(1000, device=device))
    torch_ranks.synchronize()
    time.sleep(0.01)
    now = time.monotonic()
    times.append(now - last)
    ends.append(now)
    last = now
    number += 1
status.phase("end")
dist.barrier()
result = {
    "init_s": ready, "losses": torch.stack(losses).float().tolist(), "ends": ends, "times_s": times,
    "sha256": digest(model.state_dict().values()),
}  # fmt: skip
dist.destroy_process_group()
torch_ranks.report(**result)
