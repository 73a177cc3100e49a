"""A program that asks which devices there are; then it makes a context, and that is all.

It prints what it found and how long it took, and waits for a line after both.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time

DRIVER = ctypes.CDLL("libcuda.so.1")
found: dict[str, object] = {}


def timed(name: str, call: str, *arguments: object) -> None:
    began = time.monotonic()
    if error := DRIVER[call](*arguments):
        sys.exit(f"{call} returned {error}")
    found[f"{name}_s"] = time.monotonic() - began


def take_turn(word: str) -> None:
    print(json.dumps(found))
    print(word, flush=True)
    sys.stdin.readline()


timed("init", "cuInit", 0)
count, total, value = ctypes.c_int(), ctypes.c_size_t(), ctypes.c_int()
name, uuid, bus = (ctypes.create_string_buffer(bytes) for bytes in (128, 16, 32))
errors = [
    DRIVER.cuDeviceGetCount(ctypes.byref(count)),
    DRIVER.cuDeviceGetName(name, 128, 0),
    DRIVER.cuDeviceGetUuid_v2(uuid, 0),
    DRIVER.cuDeviceGetPCIBusId(bus, 32, 0),
    DRIVER.cuDeviceTotalMem_v2(ctypes.byref(total), 0),
    *(DRIVER.cuDeviceGetAttribute(ctypes.byref(value), which, 0) for which in (16, 75, 76)),
]
found |= {"errors": [error for error in errors if error], "name": name.value.decode(), "uuid": uuid.raw.hex(),
          "bus": bus.value.decode(), "total_bytes": total.value, "capability": value.value}  # fmt: skip
take_turn("holding")
context = ctypes.c_void_p()
timed("context", "cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
take_turn("turn")
print(json.dumps(found))
