"""A data-parallel step in a graph, as a rank of torchrun: forward, backward, the all-reduce of a flat gradient, SGD.
Each replay's loss and time, and a digest of the weights, in one line of JSON.

--until: goes on after --steps until it is there. --shared, --own, --backend: torch_ranks.py. Each rank's status is in a
file of its own."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
import torch_ranks
import workload
from torch_ranks import RANK
from torch_workload import digest, prepare

WARMUP = 11  # steps on a stream beside, as PyTorch's documentation has it
BATCHES = 16
parser = workload.arguments(__doc__, steps=200)
torch_ranks.arguments(parser)
parser.add_argument("--batch", type=int, default=512)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--width", type=int, default=2048)
options = parser.parse_args()
device = torch_ranks.use_device(options)
prepare(options)
torch_ranks.join(options, device)
layers = [
    layer for _ in range(options.layers) for layer in (torch.nn.Linear(options.width, options.width), torch.nn.GELU())
]
model = torch.nn.Sequential(*layers).to(device)
parameters = list(model.parameters())
flat = torch.zeros(sum(one.numel() for one in parameters), device=device)
for parameter, part in zip(parameters, flat.split([one.numel() for one in parameters]), strict=True):
    parameter.grad = part.view_as(parameter)
gradients = [one.grad for one in parameters]
chance = torch.Generator().manual_seed(options.seed + 1 + RANK)
batches = [torch.randn(options.batch, options.width, generator=chance).pin_memory() for _ in range(BATCHES)]
batch = torch.empty(options.batch, options.width, device=device)
status = torch_ranks.status(options)


def train() -> torch.Tensor:
    flat.zero_()
    loss = (model(batch) - batch.flip(1)).square().mean()
    loss.backward()
    dist.all_reduce(flat, op=dist.ReduceOp.AVG)
    with torch.no_grad():
        torch._foreach_add_(parameters, gradients, alpha=-0.5)
    return loss.detach()


side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for number in range(WARMUP):
        batch.copy_(batches[number % BATCHES], non_blocking=True)
        train()
torch.cuda.current_stream().wait_stream(side)
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, stream=side):
    captured = train()
losses: list[torch.Tensor] = []
times: list[float] = []
ends: list[float] = []  # when each replay ended
step = 0
torch.cuda.synchronize()
last = time.monotonic()
while step < options.steps or not (options.until is None or torch_ranks.agreed(step, options.until)):
    status.step(step)
    status.phase("copy")
    batch.copy_(batches[step % BATCHES], non_blocking=True)
    status.phase("replay")
    graph.replay()
    losses.append(captured.clone())
    torch.cuda.synchronize()
    now = time.monotonic()
    times.append(now - last)
    ends.append(now)
    last = now
    step += 1
status.phase("end")
dist.barrier()
result = {
    "losses": torch.stack(losses).float().tolist(), "ends": ends, "times_s": times, "sha256": digest(parameters),
}  # fmt: skip
torch.cuda.synchronize()
del graph  # NCCL waits for it when the group is destroyed
dist.destroy_process_group()
torch_ranks.report(**result)
