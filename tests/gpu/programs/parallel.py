"""Ways to train with several ranks, one after the other in one process: FSDP2, tensor parallel, a pipeline, a sharded
optimizer, a compiled step, groups and splits. Losses, a digest and step times of each, in one line of JSON.

--shared, --backend: torch_ranks.py. --only: some of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch_ranks
import torch_workload
import workload
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch_ranks import RANK, RANKS
from torch_workload import Tokens, digest, gpt_arguments, make_gpt, prepare

parser = workload.arguments(__doc__, steps=20)
gpt_arguments(parser)
torch_ranks.arguments(parser)
parser.add_argument("--only", default="")
parser.add_argument("--compiler", default="inductor")
parser.add_argument("--kernels", type=int, default=0, help="of so many last steps, by PyTorch's profiler")
options = parser.parse_args()
device = torch_ranks.use_device(options)
prepare(options)
torch_ranks.join(options, device)
status = torch_ranks.status(options)
done = 0  # steps of all
Losses = Iterator[torch.Tensor]


def cross_entropy(logits: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def batches(*, same: bool = False) -> Iterator[torch.Tensor]:
    """The rank's own, or the same on all."""
    seed, options.seed = options.seed, 1000 + (0 if same else RANK)
    tokens = Tokens(options)
    options.seed = seed
    for _ in range(options.steps):
        yield tokens()


def smaller() -> nn.Module:
    """A model for what is not timed."""
    torch.manual_seed(options.seed)
    return torch_workload.GPT(2, 64 * options.heads, options.heads, options.context, 512).to(device)


def small_batches(*, same: bool = False) -> Iterator[torch.Tensor]:
    for batch in batches(same=same):
        yield batch % 512


def fsdp() -> tuple[Losses, nn.Module]:
    model = make_gpt(options)
    half = torch.bfloat16 if device.type == "cuda" else None
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def run() -> Losses:
        for batch in batches():
            loss = cross_entropy(model(batch[:, :-1]), batch)
            yield from trained(loss, optimizer)

    return run(), model


def tensor() -> tuple[Losses, nn.Module]:
    model = smaller()
    mesh = init_device_mesh(device.type, (RANKS,))
    for block in model.blocks:
        parallelize_module(block.mlp, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)

    def run() -> Losses:
        for batch in small_batches(same=True):
            yield from trained(cross_entropy(model(batch[:, :-1]), batch), optimizer)

    return run(), model


def pipeline() -> tuple[Losses, nn.Module]:
    """Each rank has its part of the blocks; activations go on, gradients come back, two micro-batches in a step."""
    torch.manual_seed(options.seed)
    width = 64 * options.heads
    stage = nn.Sequential(*(torch_workload.Block(width, options.heads) for _ in range(2))).to(device)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)

    def micro_step(inputs: torch.Tensor) -> torch.Tensor:
        if RANK > 0:
            inputs = torch.empty_like(inputs)
            dist.recv(inputs, RANK - 1)
        inputs.requires_grad_(RANK > 0)
        outputs = stage(inputs)
        if RANK == RANKS - 1:
            loss = outputs.square().mean()
            loss.backward()
        else:
            dist.send(outputs.detach(), RANK + 1)
            gradient = torch.empty_like(outputs)
            dist.recv(gradient, RANK + 1)
            outputs.backward(gradient)
            loss = outputs.detach().mean()
        if RANK > 0:
            dist.send(inputs.grad, RANK - 1)
        return loss.detach()

    def run() -> Losses:
        for _ in range(options.steps):
            made = torch.randn(options.batch, options.context, width, generator=generator).to(device)
            losses = [micro_step(part.clone()) for part in (made, made * 0.5)]
            optimizer.step()
            optimizer.zero_grad()
            yield torch.stack(losses).sum()

    return run(), stage


def zero() -> tuple[Losses, nn.Module]:
    model = smaller()
    ddp = nn.parallel.DistributedDataParallel(model, init_sync=options.steps > 1)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-3)

    def run() -> Losses:
        for batch in small_batches():
            yield from trained(cross_entropy(ddp(batch[:, :-1]), batch), optimizer)

    return run(), model


def compiled() -> tuple[Losses, nn.Module]:
    model = smaller()
    ddp = nn.parallel.DistributedDataParallel(model, init_sync=options.steps > 1)
    call = torch.compile(ddp, backend=options.compiler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def run() -> Losses:
        for batch in small_batches():
            yield from trained(cross_entropy(call(batch[:, :-1]), batch), optimizer)

    return run(), model


def groups() -> tuple[Losses, nn.Module]:
    """Sums in groups of one, of half of the ranks, of all in the other order, and of a split."""
    own = nn.Linear(64, 64, bias=False).to(device)
    made = [dist.new_group([rank]) for rank in range(RANKS)]
    halves = [dist.new_group(list(range(color, RANKS, 2))) for color in range(2)]
    every = dist.new_group(list(range(RANKS)), use_local_synchronization=False)
    split = every
    if device.type == "cuda":
        split = dist.split_group(split_ranks=[list(range(RANKS))]) or every

    def run() -> Losses:
        with torch.no_grad():
            for step in range(options.steps):
                own.weight.add_(step + RANK)
                for group in (made[RANK], halves[RANK % 2], every, split):
                    dist.all_reduce(own.weight, group=group)
                own.weight.mul_(1 / RANKS**3)
                yield own.weight.sum()
                if step % 4 == 3:  # one comes, and goes
                    passing = dist.new_group(list(range(RANKS)))
                    dist.all_reduce(own.weight, group=passing, op=dist.ReduceOp.MAX)
                    dist.destroy_process_group(passing)

    return run(), own


def trained(loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> Losses:
    status.phase("backward")
    loss.backward()
    status.phase("optimizer")
    optimizer.step()
    optimizer.zero_grad()
    yield loss.detach()


def local(value: torch.Tensor) -> torch.Tensor:
    """The rank's part of it."""
    return value.to_local() if isinstance(value, DTensor) else value


def measured(make: Callable[[], tuple[Losses, nn.Module]]) -> dict[str, Any]:
    global done
    steps, model = make()
    losses, times = list[torch.Tensor](), list[float]()
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) if options.kernels else None
    last = time.monotonic()
    while True:
        if profiler is not None and len(losses) == options.steps - options.kernels:
            profiler.start()
            last = time.monotonic()
        status.step(done)
        status.phase("forward")
        loss = next(steps, None)
        if loss is None:
            break
        losses.append(local(loss))
        torch_ranks.synchronize()
        now = time.monotonic()
        times.append(now - last)
        last = now
        done += 1
    kernels = {}
    if profiler is not None:
        profiler.stop()
        done_there = [one for one in profiler.key_averages() if one.device_type == torch.autograd.DeviceType.CUDA]
        kernels = {one.key: [one.count, one.self_device_time_total] for one in done_there}
    found = {"kernels": kernels, "losses": torch.stack(losses).float().tolist(), "times_s": times,
             "sha256": digest(local(each) for each in model.state_dict().values())}  # fmt: skip
    return found


WAYS = [fsdp, tensor, pipeline, zero, compiled, groups]
wanted = options.only.split(",") if options.only else [way.__name__ for way in WAYS]
results = {way.__name__: measured(way) for way in WAYS if way.__name__ in wanted}
status.phase("end")
dist.barrier()
dist.destroy_process_group()
torch_ranks.report(ways=results)
