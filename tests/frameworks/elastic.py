"""A rank of torchrun: `elastic.py FOLDER STEPS`. Sums over all ranks by gloo, memory on the device, and batches of a
DataLoader with a worker process. After two thirds of the steps it waits for FOLDER/go."""

import ctypes
import os
import sys
import time
from ctypes import byref, c_uint64, c_void_p
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

CUDA = ctypes.CDLL("libcuda.so.1")
folder, steps = Path(sys.argv[1]), int(sys.argv[2])
rank = int(os.environ["RANK"])
N = 1024


def call(name: str, *arguments: object) -> None:
    if code := getattr(CUDA, name)(*(c_uint64(a) if isinstance(a, int) else a for a in arguments)):
        raise SystemExit(f"{name} returned {code}")


class Numbers(torch.utils.data.Dataset[torch.Tensor]):  # type: ignore[misc]
    def __len__(self) -> int:
        return steps * 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((N // 4,), float(index % 13 + rank))


torch.set_num_threads(1)
dist.init_process_group("gloo")
context, memory = c_void_p(), c_uint64()
call("cuInit", 0)
call("cuDevicePrimaryCtxRetain", byref(context), 0)
call("cuCtxSetCurrent", context)
call("cuMemAlloc_v2", byref(memory), 4 * N)
call("cuMemsetD32_v2", memory.value, 0, N)
content = torch.zeros(N)
with (folder / f"rank{rank}").open("w") as output:
    for step, batch in enumerate(DataLoader(Numbers(), batch_size=4, num_workers=1)):
        call("cuMemcpyDtoH_v2", c_void_p(content.data_ptr()), memory.value, 4 * N)
        mine = batch.flatten() * (step + 1) + content * 0.5
        dist.all_reduce(mine)
        call("cuMemcpyHtoD_v2", memory.value, c_void_p(mine.data_ptr()), 4 * N)
        print(step, float(mine[0]).hex(), float(mine[-1]).hex(), file=output, flush=True)
        while step == steps * 2 // 3 and not (folder / "go").exists():
            time.sleep(0.01)
dist.barrier()
dist.destroy_process_group()
