"""Jupyter's kernel and who asks it, connected by ZeroMQ: `notebook.py FOLDER STEPS`. The number that the kernel counts
on is on the device. After two thirds of the steps it waits for FOLDER/go."""

import sys
import time
from pathlib import Path

from jupyter_client.manager import start_new_kernel  # type: ignore[import-not-found]

SETUP = """
import ctypes
from ctypes import byref, c_uint64, c_void_p

cuda, context, memory = ctypes.CDLL("libcuda.so.1"), c_void_p(), c_uint64()
assert (cuda.cuInit(0), cuda.cuDevicePrimaryCtxRetain(byref(context), 0), cuda.cuCtxSetCurrent(context)) == (0, 0, 0)
assert cuda.cuMemAlloc_v2(byref(memory), c_uint64(4096)) == 0
assert cuda.cuMemsetD32_v2(memory, 1, c_uint64(1024)) == 0
content = (ctypes.c_uint32 * 1024)()
"""
CELL = """
cuda.cuCtxSetCurrent(context)
assert cuda.cuMemcpyDtoH_v2(content, memory, c_uint64(4096)) == 0
assert cuda.cuMemsetD32_v2(memory, content[9] * 3 % 1000003, c_uint64(1024)) == 0
print(content[9])
"""
folder, steps = Path(sys.argv[1]), int(sys.argv[2])
manager, client = start_new_kernel(kernel_name="python3")


def run(cell: str) -> str:
    found: list[str] = []
    reply = client.execute_interactive(
        cell, timeout=120, output_hook=lambda message: found.append(message["content"].get("text", ""))
    )
    assert reply["content"]["status"] == "ok", reply
    return "".join(found).strip()


run(SETUP)
with (folder / "rank0").open("w") as output:
    for step in range(steps):
        print(step, run(CELL), file=output, flush=True)
        while step == steps * 2 // 3 and not (folder / "go").exists():
            time.sleep(0.01)
manager.shutdown_kernel()
