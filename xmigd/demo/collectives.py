"""What the demo's training uses of NCCL, through ctypes. Nothing in it knows of xMIG."""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FLOAT32, AVERAGE = 7, 4
PATIENCE = 60.0  # seconds for rank 0 to leave the id


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * 128)]


class Communicator:
    """Of all ranks. Rank 0 leaves its unique id in `folder` for the others. All is put into the legacy stream."""

    def __init__(self, rank: int, ranks: int, folder: Path) -> None:
        self._nccl = ctypes.CDLL("libnccl.so.2")
        self._nccl.ncclGetLastError.restype = ctypes.c_char_p
        self._handle = ctypes.c_void_p()
        unique = self._unique(rank, folder / "id")
        self._call("ncclCommInitRank", ctypes.byref(self._handle), ctypes.c_int(ranks), unique, ctypes.c_int(rank))

    def average(self, address: int, count: int) -> None:
        """These float32 values over all ranks, in place."""
        at = ctypes.c_void_p(address)
        self._call("ncclAllReduce", at, at, ctypes.c_size_t(count), FLOAT32, AVERAGE, self._handle, None)

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """What is called in it is done together."""
        self._call("ncclGroupStart")
        yield
        self._call("ncclGroupEnd")

    def end(self) -> None:
        self._call("ncclCommDestroy", self._handle)

    def _unique(self, rank: int, path: Path) -> UniqueId:
        made = UniqueId()
        if rank == 0:
            self._call("ncclGetUniqueId", ctypes.byref(made))
            path.with_suffix(".new").write_bytes(bytes(made))
            path.with_suffix(".new").rename(path)
            return made
        end = time.monotonic() + PATIENCE
        while not path.exists():
            if time.monotonic() > end:
                raise SystemExit("rank 0 has left no id")
            time.sleep(0.005)
        ctypes.memmove(ctypes.byref(made), path.read_bytes(), 128)
        return made

    def _call(self, name: str, *arguments: Any) -> None:
        if getattr(self._nccl, name)(*arguments):
            raise SystemExit(f"{name}: {(self._nccl.ncclGetLastError(None) or b'').decode()}")
