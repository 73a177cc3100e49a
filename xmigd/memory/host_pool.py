"""Host memory for suspended processes that has its pages already: a suspension need not wait for them.

Each piece is made for one process and never used by another: what a user's server has held may be read by that user's
processes for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

from xmigd import log
from xmigd.host_memory import RESERVE, available_memory
from xmigd.ipc.fds import LIBC, Fd
from xmigd.memory.handles import Handle

logger = log.get("host-pool")

LIBC.mmap.restype = ctypes.c_void_p
MAP_FIXED, MADV_COLLAPSE = 0x10, 25  # Python's mmap has neither

PERIOD = 1.0  # seconds between two looks at what is missing
STEP = 2 << 20  # a huge page of x86-64
MOST_AT_ONCE = 4  # threads, and no more than a quarter of the processors
PLAIN = "memfd"  # what servers call it (shim/server/channel/hosted.h)


class HostPool:
    """`size` bytes in pieces of `piece` bytes, less what suspended processes have. `taken`: the bytes that they have;
    None while one is about to take some."""

    def __init__(self, size: int, piece: int, taken: Callable[[], int | None]) -> None:
        self._size = size
        self.piece = piece  # bytes of each
        self._taken = taken
        self._ready: deque[Fd] = deque()
        self._making = 0
        self._why = ""
        self._small = ""  # why a piece has small pages
        self._folder: Path | None = None
        self._spare: Callable[[], int] = lambda: 0
        self._give_up: Callable[[int], None] = lambda wanted: None

    @property
    def ready(self) -> int:
        """Bytes that can be had at once."""
        return len(self._ready) * self.piece

    def share(self, folder: Path, spare: Callable[[], int], give_up: Callable[[int], None]) -> None:
        """With checkpoints (xmigd/checkpoints/memory.py). From now on pieces are files without a name in this folder of
        a tmpfs, where they can get one: then a checkpoint that was copied into them stays there. `spare`: the bytes
        that checkpoints can `give_up`."""
        self._folder, self._spare, self._give_up = folder, spare, give_up

    def room(self) -> int:
        """Bytes of host memory that can be had, here or from others."""
        return available_memory() + self.ready + self._spare()

    def make_room(self, wanted: int) -> None:
        """So many bytes are about to be filled. Blocks, while checkpoints give theirs up for it."""
        missing = wanted + RESERVE - available_memory() - self.ready
        if missing > 0:
            self._give_up(missing)

    def take(self, wanted: int) -> list[Fd]:
        """Pieces for so many bytes, as far as there are."""
        count = min(-(-wanted // self.piece), len(self._ready))
        return [self._ready.pop() for _ in range(count)]

    def make(self, wanted: int, beside: int = 0) -> list[Fd]:
        """Pieces for so many bytes, without pages, if they are files that can get a name. `beside`: bytes for which
        there has to be room in their folder, too."""
        made: list[Fd] = []
        with contextlib.suppress(OSError):  # a server makes its own
            if (folder := self._folder_for(wanted + beside)) is not None:
                while len(made) * self.piece < wanted:
                    made.append(make_file(folder))
        return made

    def _folder_for(self, wanted: int) -> Path | None:
        """None: they are in no folder, it is gone, or its file system has no room for so many bytes more."""
        if self._folder is None:
            return None
        try:
            about = os.statvfs(self._folder)
        except OSError:
            return None
        return self._folder if about.f_bavail * about.f_frsize - RESERVE >= wanted else None

    async def keep(self) -> None:
        """Make what is missing, for ever."""
        if self._size < self.piece:
            return
        at_once = max(1, (os.cpu_count() or 1) // 4)
        await asyncio.gather(*(self._keep() for _ in range(min(at_once, MOST_AT_ONCE))))

    async def _keep(self) -> None:
        while True:
            if not self._is_short() or not self._has_room() or not await self._add():
                await asyncio.sleep(PERIOD)

    def _is_short(self) -> bool:
        missing = self._size - self.ready - (self._making + 1) * self.piece
        if missing < 0:
            return False
        taken = self._taken()
        return taken is not None and taken <= missing

    def _has_room(self) -> bool:
        if available_memory() - RESERVE >= self.piece * (self._making + 1):
            return True
        self._say("the host has no more memory available")
        return False

    async def _add(self) -> bool:
        self._making += 1
        try:
            folder = self._folder_for(self._making * self.piece)
            piece, small = await asyncio.to_thread(make_piece, self.piece, folder)
        except OSError as error:
            self._say(error.strerror or type(error).__name__)
            return False
        finally:
            self._making -= 1
        self._ready.append(piece)
        self._why = ""
        if small and small != self._small:
            logger.warning("the host pool gets no huge pages: a suspension takes longer", why=small)
        self._small = small
        if not self._is_short() and self._making == 0:
            logger.info("host memory for suspensions is ready", mib=self.ready >> 20)
        return True

    def _say(self, why: str) -> None:
        if why != self._why:
            logger.warning("the host pool is smaller than it is to be", mib=self.ready >> 20, why=why)
        self._why = why


def make_file(folder: Path | None) -> Fd:
    """Empty, without pages: in this folder of a tmpfs, or in none. Raises OSError."""
    if folder is None:
        return Fd(os.memfd_create("xmig-room", os.MFD_CLOEXEC))
    return Fd(os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600))


def make_piece(size: int, folder: Path | None = None) -> tuple[Fd, str]:
    """Empty host memory that has its pages: huge ones, or small ones and why. Raises OSError."""
    piece = make_file(folder)
    os.ftruncate(piece.fileno(), size)
    try:
        make_huge(piece.fileno(), size)
    except OSError as error:
        nothing = bytes(min(STEP, size))
        for at in range(0, size, len(nothing)):
            if os.pwrite(piece.fileno(), nothing, at) != len(nothing):
                raise OSError(errno.EIO, "it was written in part") from error
        return piece, str(error.strerror)
    return piece, ""


def make_huge(fd: int, size: int) -> None:
    """Give a new file in memory huge pages, whatever the machine's setting (`shmem_enabled`) is for everybody's:
    MADV_COLLAPSE does not ask it, unless it is `deny`. It wants at least one page in each, and addresses as the huge
    pages will lie. Raises OSError."""
    for at in range(0, size, STEP):
        os.pwrite(fd, b"\0", at)
    reserved = map_memory(None, size + STEP, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    try:
        start = -(-reserved // STEP) * STEP
        map_memory(start, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | MAP_FIXED, fd)
        if LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), MADV_COLLAPSE) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    finally:
        LIBC.munmap(ctypes.c_void_p(reserved), ctypes.c_size_t(size + STEP))


def map_memory(address: int | None, size: int, protection: int, flags: int, fd: int) -> int:
    found = LIBC.mmap(ctypes.c_void_p(address), ctypes.c_size_t(size), protection, flags, fd, ctypes.c_long(0))
    if found == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(found)


def in_host_memory(handles: Iterable[Handle]) -> int:
    """Bytes of host memory that the shadow of a process takes while it needs no device."""
    return sum(handle.size for handle in handles if handle.kind == "shadow" and handle.name == PLAIN)
