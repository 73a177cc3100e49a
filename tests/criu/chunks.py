"""Device memory of which a test has parts written: `chunks.py FOLDER`. It knows what it wrote, and compares.

The file `order` has a number: what to write is random, with that as its seed; 0 writes nothing. `done.NUMBER` appears
when it is written and all memory was compared: address, size and SHA-256 of each buffer, as the program knows it. The
file `compare` has a number, too, for one that was restored: then `compared.NUMBER` says what of."""

import ctypes
import hashlib
import json
import random
import sys
import time
from ctypes import byref, c_char_p, c_uint64, c_void_p
from pathlib import Path

CUDA = ctypes.CDLL("libcuda.so.1")
MIB = 1 << 20
SIZES = [4 * MIB] * 6 + [MIB, 2 * MIB, 3 * MIB]


def call(name: str, *arguments: object) -> None:
    if code := getattr(CUDA, name)(*(c_uint64(a) if isinstance(a, int) else a for a in arguments)):
        raise SystemExit(f"{name} returned {code}")


class Buffer:
    def __init__(self, size: int) -> None:
        self.address, self.size = c_uint64(), size
        call("cuMemAlloc_v2", byref(self.address), size)
        self.fill(0)

    def fill(self, value: int) -> None:
        call("cuMemsetD8_v2", self.address.value, value, self.size)
        self.model = bytearray([value]) * self.size

    def write(self, at: int, content: bytes) -> None:
        call("cuMemcpyHtoD_v2", self.address.value + at, c_char_p(content), len(content))
        self.model[at : at + len(content)] = content

    def compare(self) -> None:
        found = ctypes.create_string_buffer(self.size)
        call("cuMemcpyDtoH_v2", ctypes.cast(found, c_void_p), self.address.value, self.size)
        if found.raw != self.model:
            raise SystemExit(f"{self.size} bytes at {self.address.value:#x} are not what was written")


def change(buffers: list[Buffer], seed: int) -> None:
    chosen = random.Random(seed)
    for _ in range(chosen.randrange(1, 5)):
        buffer = chosen.choice(buffers)
        match chosen.randrange(6):
            case 0:
                buffer.fill(chosen.choice([0, seed % 256]))
            case 1:
                call("cuMemFree_v2", buffer.address.value)
                buffers[buffers.index(buffer)] = Buffer(buffer.size)
            case 2:  # what it has already
                buffer.write(0, bytes(buffer.model[:4096]))
            case _:
                at = chosen.randrange(buffer.size)
                buffer.write(at, chosen.randbytes(min(buffer.size - at, chosen.choice([1, 4096, MIB]))))


def put(path: Path, content: str) -> None:
    path.with_name(f"{path.name}.new").write_text(content)
    path.with_name(f"{path.name}.new").rename(path)


def number_in(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except FileNotFoundError:
        return None


folder = Path(sys.argv[1])
context = c_void_p()
call("cuInit", 0)
call("cuDevicePrimaryCtxRetain", byref(context), 0)
call("cuCtxSetCurrent", context)
buffers = [Buffer(size) for size in SIZES]
for number, buffer in enumerate(buffers):
    buffer.write(0, random.Random(number).randbytes(MIB) * (buffer.size // MIB))
last: int | None = None
while True:
    order, compare = number_in(folder / "order"), number_in(folder / "compare")
    if order is not None and order != last:
        if order:
            change(buffers, order)
        last = order
        for buffer in buffers:
            buffer.compare()
        known = [(each.address.value, each.size, hashlib.sha256(each.model).hexdigest()) for each in buffers]
        put(folder / f"done.{order}", json.dumps(known))
    if compare is not None and not (folder / f"compared.{compare}").exists():
        for buffer in buffers:
            buffer.compare()
        put(folder / f"compared.{compare}", str(last))
        raise SystemExit(0)
    time.sleep(0.01)
