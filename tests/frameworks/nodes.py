"""A rank of `torchrun --nnodes 2`: `nodes.py FOLDER STEPS`. A small training whose gradients are averaged by gloo, and
whose weights go through device memory at each step. After two thirds of the steps it waits for FOLDER/go. Without
torchrun it does what both ranks do, alone and on no device."""

import ctypes
import hashlib
import os
import sys
import time
from ctypes import byref, c_uint64, c_void_p
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

RANKS = 2
folder, steps = Path(sys.argv[1]), int(sys.argv[2])


class Device:
    """Memory for the weights."""

    def __init__(self, count: int) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._bytes = 4 * count
        self._memory = c_uint64()
        context = c_void_p()
        self._call("cuInit", 0)
        self._call("cuDevicePrimaryCtxRetain", byref(context), 0)
        self._call("cuCtxSetCurrent", context)
        self._call("cuMemAlloc_v2", byref(self._memory), self._bytes)

    def through(self, weights: torch.Tensor) -> torch.Tensor:
        self._call("cuMemcpyHtoD_v2", self._memory.value, c_void_p(weights.data_ptr()), self._bytes)
        back = torch.zeros_like(weights)
        self._call("cuMemcpyDtoH_v2", c_void_p(back.data_ptr()), self._memory.value, self._bytes)
        return back

    def _call(self, name: str, *arguments: object) -> None:
        if code := getattr(self._cuda, name)(*(c_uint64(a) if isinstance(a, int) else a for a in arguments)):
            raise SystemExit(f"{name} returned {code}")


torch.set_num_threads(1)
torch.manual_seed(0)
model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 8))
parameters = list(model.parameters())
optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
ranks, device = list(range(RANKS)), None
if "RANK" in os.environ:
    dist.init_process_group("gloo")
    ranks, device = [dist.get_rank()], Device(sum(each.numel() for each in parameters))
    model = DistributedDataParallel(model)
inputs = {rank: torch.Generator().manual_seed(1 + rank) for rank in ranks}
outputs = {rank: (folder / f"rank{rank}").open("w") for rank in ranks}
for step in range(steps):
    optimizer.zero_grad()
    losses = {}
    for rank in ranks:
        batch = torch.randn(16, 64, generator=inputs[rank])
        losses[rank] = (model(batch) - batch[:, :8].roll(1, 1)).square().mean()
        (losses[rank] / len(ranks)).backward()
    optimizer.step()
    weights = torch.nn.utils.parameters_to_vector(parameters).detach()
    if device is not None:
        weights = device.through(weights)
        torch.nn.utils.vector_to_parameters(weights, parameters)
    hashed = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]
    for rank in ranks:
        print(step, losses[rank].item().hex(), hashed, file=outputs[rank], flush=True)
    while device is not None and step == steps * 2 // 3 and not (folder / "go").exists():
        time.sleep(0.01)
if device is not None:
    dist.barrier()
    dist.destroy_process_group()
