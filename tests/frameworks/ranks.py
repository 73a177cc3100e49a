"""What PyTorch does with NCCL, as one rank: collectives of each kind, parts, batches, DDP and FSDP2. On the null device
all content is zero, so that only the calls are tried. `eager`: communicators are made at once, and the others are split
from the first."""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.fsdp import fully_shard

rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
device = torch.device("cuda:0")
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device if "eager" in sys.argv else None)

one, all_of_it = torch.ones(1000, device=device), torch.empty(1000 * ranks, device=device)
for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist._make_nccl_premul_sum(0.5)):
    dist.all_reduce(one, op=op)
dist.broadcast(one, 0)
dist.reduce(one, 1)
dist.all_gather_into_tensor(all_of_it, one)
dist.reduce_scatter_tensor(one, all_of_it)
dist.all_to_all_single(all_of_it, all_of_it.clone())
dist.gather(one, [torch.empty_like(one) for _ in range(ranks)] if rank == 0 else None, 0)
dist.scatter(one, [torch.empty_like(one) for _ in range(ranks)] if rank == 0 else None, 0)
dist.all_reduce(one, group=dist.new_subgroups(1)[0])
ring = [dist.P2POp(dist.isend, one, (rank + 1) % ranks), dist.P2POp(dist.irecv, all_of_it[:1000], (rank - 1) % ranks)]
for work in dist.batch_isend_irecv(ring):
    work.wait()
with dist._coalescing_manager(device=device):
    for _ in range(3):
        dist.all_reduce(one)
dist.barrier()

# In a graph: the stream of the process group joins the capture, and work goes on beside what it does.
graph = torch.cuda.CUDAGraph()
dist.all_reduce(one)
torch.cuda.synchronize()
with torch.cuda.graph(graph):
    dist.all_reduce(one)
    first = dist.all_gather_into_tensor(all_of_it, one * 2, async_op=True)
    beside = torch.nn.functional.relu(one - 1)
    first.wait()
    dist.reduce_scatter_tensor(one, all_of_it + beside.sum())
    for work in dist.batch_isend_irecv(ring):
        work.wait()
    with dist._coalescing_manager(device=device):
        for _ in range(3):
            dist.all_reduce(one)
for _ in range(3):
    graph.replay()
torch.cuda.synchronize()

# Gradients are summed while others are computed, in a graph.
layers = torch.nn.Sequential(*[torch.nn.Linear(64, 64, device=device) for _ in range(3)])
sums: list[dist.Work] = []
for parameter in layers.parameters():
    parameter.grad = torch.zeros_like(parameter)
    parameter.register_post_accumulate_grad_hook(lambda one: sums.append(dist.all_reduce(one.grad, async_op=True)))
optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
batch = torch.ones(4, 64, device=device)


def train() -> None:
    sums.clear()
    optimizer.zero_grad(set_to_none=False)
    layers(batch).sum().backward()
    for one in sums:
        one.wait()
    optimizer.step()


beside_all = torch.cuda.Stream()
beside_all.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(beside_all):
    train()
torch.cuda.current_stream().wait_stream(beside_all)
step = torch.cuda.CUDAGraph()
with torch.cuda.graph(step, stream=beside_all):
    train()
for _ in range(3):
    step.replay()
torch.cuda.synchronize()
del graph, step


# As inference does it: graphs that the compiler makes.
def layer(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(all_reduce(x * 2, "sum", dist.group.WORLD)) + 1


compiled = torch.compile(layer, mode="reduce-overhead")
for _ in range(4):
    torch.compiler.cudagraph_mark_step_begin()
    compiled(one)
torch.cuda.synchronize()

# One step: after the first DDP reads from the device in which order it has seen gradients.
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64, device=device), init_sync=False)
ddp(torch.ones(4, 64, device=device)).sum().backward()
torch.cuda.synchronize()
sharded = torch.nn.Sequential(*[torch.nn.Linear(64, 64, device=device) for _ in range(2)])
for layer in sharded:
    fully_shard(layer)
fully_shard(sharded)
for _ in range(2):
    sharded(torch.ones(4, 64, device=device)).sum().backward()
torch.cuda.synchronize()
dist.destroy_process_group()
print("done", rank, flush=True)
