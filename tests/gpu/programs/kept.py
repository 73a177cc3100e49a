"""A program to be written down and restored: what it has computed is in a file, a line for each step.

It has no terminal, no pipe to others and no connection. `--what memory` works at one place until there is a file
`OUTPUT.go`. At the end comes a digest of its memory. `--ranks N` starts N of it, which train data-parallel on one
device, meet in a file, and write `OUTPUT.RANK` each.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

RANK = int(os.environ.get("RANK", "0"))
if "--ranks" in sys.argv and "RANK" not in os.environ:  # the launcher: no framework, no device
    count = int(sys.argv[sys.argv.index("--ranks") + 1])
    environment = {
        "NCCL_NVLS_ENABLE": "0", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "TORCH_NCCL_ENABLE_MONITORING": "0",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    ranks = [
        subprocess.Popen([sys.executable, *sys.argv], env=os.environ | environment | {
            "RANK": str(rank), "WORLD_SIZE": str(count), "NCCL_HOSTID": f"rank-{rank}"})
        for rank in range(count)
    ]  # fmt: skip
    sys.exit(max(abs(rank.wait()) for rank in ranks))

import torch  # noqa: E402
import workload  # noqa: E402
from torch_workload import Tokens, digest, gpt_arguments, make_gpt, prepare  # noqa: E402

PIECE = 64 << 20

parser = workload.arguments(__doc__, steps=400)
gpt_arguments(parser)
parser.add_argument("--output", type=Path, required=True)
parser.add_argument("--ranks", type=int, default=0)
parser.add_argument("--what", choices=["memory", "training"], default="memory")
parser.add_argument("--mib", type=int, default=4096, help="random content that stays as it is")
parser.add_argument("--dirty-mib", type=int, default=64, help="memory that each step changes")
parser.add_argument("--pause", type=float, default=0.0, help="seconds between two steps")
parser.add_argument("--save", type=Path, help="write the state with torch.save into this file at the end, and time it")
options = parser.parse_args()
prepare(options)
if options.ranks:
    import torch.distributed as dist

    meeting = f"file://{options.output}.meeting"
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=meeting, rank=RANK, world_size=options.ranks, device_id=device)
    options.output = Path(f"{options.output}.{RANK}")
go = options.output.with_suffix(".go")

if options.what == "training":
    model = make_gpt(options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    options.seed += RANK
    tokens = Tokens(options)
    parallel = torch.nn.parallel.DistributedDataParallel(model, init_sync=False) if options.ranks else None

    def loss_now() -> torch.Tensor:
        if parallel is None:
            return model.loss(tokens())
        batch = tokens()
        with torch.autocast("cuda", torch.bfloat16):
            logits = parallel(batch[:, :-1])
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())

    def step() -> float:
        loss = loss_now()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    def state() -> list[torch.Tensor]:
        moments = [value for values in optimizer.state.values() for value in values.values()]
        return [*model.state_dict().values(), *moments]
else:
    still = [
        torch.randint(-(2**63), 2**63 - 1, (min(PIECE, left) // 8,), device="cuda")
        for left in range(options.mib << 20, 0, -PIECE)
    ]
    dirty = torch.zeros(options.dirty_mib << 18, dtype=torch.int32, device="cuda")

    def step() -> float:
        dirty.add_(1)
        return float(dirty[-1].item())

    def state() -> list[torch.Tensor]:
        return [*still, dirty]


times = []
with options.output.open("w") as output:
    for number in range(options.steps):
        began = time.monotonic()
        print(number, step().hex(), file=output, flush=True)
        times.append(time.monotonic() - began)
        if number == 3:
            print("holding", flush=True)
        while number >= options.steps // 4 and not go.exists() and options.what == "memory":
            dirty.add_(1)  # it works, and is at the same place afterwards
            dirty.sub_(1)
            torch.cuda.synchronize()
            time.sleep(options.pause)
    torch.cuda.synchronize()
    print("digest", digest(state() if options.what == "training" else [dirty, *still[:4]]), file=output, flush=True)
saved = 0.0
if options.save is not None:
    began = time.monotonic()
    with options.save.open("wb") as file:
        torch.save(state(), file)
        file.flush()
        os.fsync(file.fileno())
    saved = time.monotonic() - began
Path(f"{options.output}.done").write_text(f"{sum(t.nbytes for t in state())} {saved} {max(times)}\n")
if options.ranks:
    dist.destroy_process_group()
