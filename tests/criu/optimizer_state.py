"""Numbers on a device, for tests of lossy checkpoints: `optimizer_state.py FOLDER`.

It has a buffer of each type of numbers, with `FOLDER/TYPE` as its content, of which it names the second third, if
there is a file `named`; and one that nobody names. `ready` appears then. For each file `read.N` it writes what the
buffers have to `TYPE.N`, and then `done.N`; after a file `write` it writes the content again."""

import ctypes
import sys
import time
from ctypes import byref, c_uint64, c_void_p
from pathlib import Path

CUDA = ctypes.CDLL("libcuda.so.1")
TYPES = ("float16", "bfloat16", "float32", "float64", "weights")


def call(name: str, *arguments: object) -> None:
    if code := getattr(CUDA, name)(*(c_uint64(a) if isinstance(a, int) else a for a in arguments)):
        raise SystemExit(f"{name} returned {code}")


folder = Path(sys.argv[1])
context = c_void_p()
call("cuInit", 0)
call("cuDevicePrimaryCtxRetain", byref(context), 0)
call("cuCtxSetCurrent", context)
buffers: dict[str, tuple[int, bytes]] = {}
for name in TYPES:
    address, content = c_uint64(), (folder / name).read_bytes()
    call("cuMemAlloc_v2", byref(address), len(content))
    call("cuMemcpyHtoD_v2", address.value, content, len(content))
    buffers[name] = address.value, content
if (folder / "named").exists():
    count = len(TYPES) - 1
    addresses = (c_uint64 * count)(*(buffers[name][0] + len(buffers[name][1]) // 3 for name in TYPES[:count]))
    sizes = (c_uint64 * count)(*(len(buffers[name][1]) // 3 for name in TYPES[:count]))
    types = (ctypes.c_uint32 * count)(*range(count))
    if (named := CUDA.xmigNameNumbers(addresses, sizes, types, c_uint64(count), 0)) != count:
        raise SystemExit(f"{named} ranges are named")
(folder / "ready").touch()
number = 0
while not (folder / "enough").exists():
    if (folder / "write").exists():
        for at, content in buffers.values():
            call("cuMemcpyHtoD_v2", at, content, len(content))
        (folder / "write").unlink()
    if (folder / f"read.{number}").exists():
        for name, (at, content) in buffers.items():
            found = ctypes.create_string_buffer(len(content))
            call("cuMemcpyDtoH_v2", ctypes.cast(found, c_void_p), at, len(content))
            (folder / f"{name}.{number}").write_bytes(found.raw)
        (folder / f"done.{number}").touch()
        number += 1
    time.sleep(0.01)
