"""A program to be moved: much memory, some of it rewritten at each step. No framework: the driver interface itself.

Runs until a line comes in; then every piece of memory is looked at. Of each step it says when it ended and how long it
took.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time

import workload

PIECE = 64 << 20

parser = workload.arguments(__doc__, steps=0)
parser.add_argument("--mib", type=int, default=4096, help="memory that stays as it is")
parser.add_argument("--dirty-mib", type=int, default=64, help="memory that each step writes")
parser.add_argument("--repeat", type=int, default=1, help="how often a step writes it")
parser.add_argument("--pause", type=float, default=0.002, help="seconds between two steps")
options = parser.parse_args()

driver = ctypes.CDLL("libcuda.so.1")
context = ctypes.c_void_p()
assert driver.cuInit(0) == 0
assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == driver.cuCtxSetCurrent(context) == 0


def allocate(mib: int) -> list[tuple[int, int]]:
    """Pieces of memory: address and bytes."""
    pieces = []
    for offset in range(0, mib << 20, PIECE):
        address, size = ctypes.c_uint64(), min(PIECE, (mib << 20) - offset)
        assert driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)) == 0
        pieces.append((address.value, size))
    return pieces


def fill(piece: tuple[int, int], value: int) -> None:
    address, size = piece
    code = driver.cuMemsetD32Async(ctypes.c_uint64(address), ctypes.c_uint(value), ctypes.c_size_t(size // 4), None)
    assert code == 0, code


def holds(piece: tuple[int, int], value: int) -> bool:
    """The first and the last word of every 2 MiB."""
    address, size = piece
    word = ctypes.c_uint32()
    for at in range(0, size, 2 << 20):
        for where in (at, min(at + (2 << 20), size) - 4):
            assert driver.cuMemcpyDtoH_v2(ctypes.byref(word), ctypes.c_uint64(address + where), ctypes.c_size_t(4)) == 0
            if word.value != value:
                return False
    return True


def wait_for_line() -> None:
    sys.stdin.readline()
    over.set()


over = threading.Event()
threading.Thread(target=wait_for_line, daemon=True).start()
still, dirty = allocate(options.mib), allocate(options.dirty_mib)
for number, piece in enumerate(still):
    fill(piece, number + 1)
assert driver.cuCtxSynchronize() == 0

ends: list[float] = []
lengths: list[float] = []
step = 0
while not over.is_set():
    began = time.monotonic()
    step += 1
    for _ in range(options.repeat):
        for piece in dirty:
            fill(piece, step)
    assert driver.cuCtxSynchronize() == 0
    ends.append(round(time.monotonic(), 6))
    lengths.append(round(ends[-1] - began, 6))
    if step == 20:
        print('{"program": "moved"}\nholding', flush=True)
    time.sleep(options.pause)

corrupted = sum(not holds(piece, number + 1) for number, piece in enumerate(still))
corrupted += sum(not holds(piece, step) for piece in dirty)
options.hold = False
workload.report(options, corrupted=corrupted, ends=ends, lengths=lengths)
