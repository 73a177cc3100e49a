"""A rank of `torchrun --nnodes 2`: `nodes.py FOLDER STEPS`. A small training whose gradients are averaged by gloo, and
whose weights go through device memory at each step. After two thirds of the steps it waits for FOLDER/go."""

import ctypes
import hashlib
import sys
import time
from ctypes import byref, c_uint64, c_void_p
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

CUDA = ctypes.CDLL("libcuda.so.1")
folder, steps = Path(sys.argv[1]), int(sys.argv[2])


def call(name: str, *arguments: object) -> None:
    if code := getattr(CUDA, name)(*(c_uint64(a) if isinstance(a, int) else a for a in arguments)):
        raise SystemExit(f"{name} returned {code}")


torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)
torch.manual_seed(0)
dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 8))
trained = DistributedDataParallel(model)
optimizer = torch.optim.SGD(trained.parameters(), lr=0.05, momentum=0.9)
inputs = torch.Generator().manual_seed(1 + rank)
context, memory = c_void_p(), c_uint64()
count = sum(each.numel() for each in model.parameters())
call("cuInit", 0)
call("cuDevicePrimaryCtxRetain", byref(context), 0)
call("cuCtxSetCurrent", context)
call("cuMemAlloc_v2", byref(memory), 4 * count)
with (folder / f"rank{rank}").open("w") as output:
    for step in range(steps):
        batch = torch.randn(16, 64, generator=inputs)
        loss = (trained(batch) - batch[:, :8].roll(1, 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        call("cuMemcpyHtoD_v2", memory.value, c_void_p(weights.data_ptr()), 4 * count)
        back = torch.zeros(count)
        call("cuMemcpyDtoH_v2", c_void_p(back.data_ptr()), memory.value, 4 * count)
        torch.nn.utils.vector_to_parameters(back, model.parameters())
        hashed = hashlib.sha256(back.numpy().tobytes()).hexdigest()[:16]
        print(step, loss.item().hex(), hashed, file=output, flush=True)
        while step == steps * 2 // 3 and not (folder / "go").exists():
            time.sleep(0.01)
dist.barrier()
dist.destroy_process_group()
