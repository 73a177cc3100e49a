"""Collectives and DDP on GPUs, as one rank of torchrun: results as digests, and times, in one line of JSON.

--shared: two ranks on one GPU. --steps: of the training. --large: bytes of the all-reduce that is timed."""

import argparse
import hashlib
import json
import os
import time

parser = argparse.ArgumentParser()
parser.add_argument("--shared", action="store_true")
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--large", type=int, default=1 << 30)
options = parser.parse_args()
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
os.environ["NCCL_NVLS_ENABLE"] = "0"
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
if options.shared:  # NCCL takes each rank for another machine's
    os.environ |= {"NCCL_HOSTID": f"rank-{rank}", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

torch.use_deterministic_algorithms(True)
device = torch.device("cuda", 0 if options.shared else rank % torch.cuda.device_count())
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
store.set(f"there {rank}", "")
store.wait([f"there {each}" for each in range(ranks)])  # what one takes longer to start is not the communicator's time
began = time.monotonic()
torch.cuda.set_device(device)
torch.zeros(1, device=device).cpu()  # natively the context is there before
opened = time.monotonic() - began
dist.init_process_group("nccl", store=dist.PrefixStore("", store), rank=rank, world_size=ranks, device_id=device)
dist.all_reduce(torch.ones(1, device=device))
torch.cuda.synchronize()
ready = time.monotonic() - began
digests: dict[str, str] = {}
wrong: list[str] = []


def keep(name: str, tensor: torch.Tensor) -> None:
    digests[name] = hashlib.sha256(tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes()).hexdigest()[:16]


def some(seed: int, dtype: torch.dtype = torch.float32, count: int = 100_003) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(count, generator=generator) * 4 - 2).to(dtype).to(device)


def expect(name: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    if not torch.equal(got, expected):
        wrong.append(name)


for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.int64, torch.uint8):
    for name in ("SUM", "PRODUCT", "MAX", "MIN", "AVG"):
        mine = some(rank, dtype)
        dist.all_reduce(mine, op=getattr(dist.ReduceOp, name))
        keep(f"all-reduce {dtype} {name}", mine)
        if name == "MAX":
            expect(f"maximum {dtype}", mine, torch.stack([some(each, dtype) for each in range(ranks)]).amax(0))
whole = torch.empty(100_003 * ranks, device=device)
dist.all_gather_into_tensor(whole, some(rank))
expect("all-gather", whole, torch.cat([some(each) for each in range(ranks)]))
part = torch.empty(100_003, device=device)
dist.reduce_scatter_tensor(part, whole)
keep("reduce-scatter", part)
scaled = some(rank)
dist.all_reduce(scaled, op=dist._make_nccl_premul_sum(0.5))
keep("scaled sum", scaled)
got = torch.empty_like(part)
for work in dist.batch_isend_irecv(
    [dist.P2POp(dist.isend, some(rank), (rank + 1) % ranks), dist.P2POp(dist.irecv, got, (rank - 1) % ranks)]
):
    work.wait()
expect("ring", got, some((rank - 1) % ranks))
alone = some(rank)
dist.all_reduce(alone, group=dist.new_subgroups(1)[0])
expect("a group of one", alone, some(rank))


def timed(tensor: torch.Tensor, times: int) -> float:
    """Seconds for one all-reduce."""
    for _ in range(5):
        dist.all_reduce(tensor)
    torch.cuda.synchronize()
    start = time.monotonic()
    for _ in range(times):
        dist.all_reduce(tensor)
    torch.cuda.synchronize()
    return (time.monotonic() - start) / times


large = timed(torch.ones(options.large // 4, device=device), 10)
small = timed(torch.ones(2, device=device), 500)
torch.manual_seed(1)
layers = [layer for _ in range(4) for layer in (torch.nn.Linear(1024, 1024), torch.nn.GELU())]
model = torch.nn.Sequential(*layers).to(device)
ddp = torch.nn.parallel.DistributedDataParallel(model, init_sync=options.steps > 1)
optimizer = torch.optim.AdamW(ddp.parameters())
losses, times = [], []
for step in range(options.steps):
    start = time.monotonic()
    inputs = some(1000 * step + rank, count=64 * 1024).view(64, 1024)
    optimizer.zero_grad()
    loss = ddp(inputs).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(float(loss.detach()).hex())
    times.append(time.monotonic() - start)
keep("weights", torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
dist.barrier()
dist.destroy_process_group()
result = {
    "rank": rank, "digests": digests, "wrong": wrong, "losses": losses, "large_s": large,
    "context_s": opened, "init_s": ready,
    "small_s": small, "step_s": sorted(times)[len(times) // 2],
}  # fmt: skip
os.write(1, f"{json.dumps(result)}\n".encode())  # at once: all ranks write into the same file
