"""The memory of a process that the daemon makes and holds."""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass

from xmigd.ipc import messages as m
from xmigd.ipc.fds import F_ADD_SEALS, F_SEAL_GROW, F_SEAL_SEAL, F_SEAL_SHRINK, Fd, close_all
from xmigd.native import Layout

MAX_HANDLES = 1 << 16  # of one process: a server must not take all of the daemon's descriptors


@dataclass(frozen=True, slots=True)
class JobMemory:
    """The five memfds of a process. The first three are shared with the program, which is hostile: their size is
    sealed, so that nobody's access to them can be made to fail. `quota`: the page of its job's memory quota
    (quota.py), which several processes have; None: it has none, or is suspended."""

    journal: Fd
    staging: Fd
    pinned: Fd
    snapshot0: Fd
    snapshot1: Fd
    quota: Fd | None = None

    @classmethod
    def create(cls, layout: Layout, journal_bytes: int) -> JobMemory:
        """Raises OSError: no descriptors, no memory."""
        made: list[Fd] = []
        try:
            for name, size in (
                ("journal", layout.header_bytes + journal_bytes),
                ("staging", layout.staging_bytes),
                ("pinned", layout.pinned_bytes),
            ):
                made.append(Fd(os.memfd_create(f"xmig-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)))
                os.ftruncate(made[-1].fileno(), size)
                fcntl.fcntl(made[-1].fileno(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)
            for name in ("snapshot0", "snapshot1"):
                made.append(Fd(os.memfd_create(f"xmig-{name}", os.MFD_CLOEXEC)))
        except OSError:
            close_all(made)
            raise
        return cls(*made)

    @property
    def own(self) -> tuple[Fd, Fd, Fd, Fd, Fd]:
        return (self.journal, self.staging, self.pinned, self.snapshot0, self.snapshot1)

    @property
    def all(self) -> tuple[Fd, ...]:
        return self.own if self.quota is None else (*self.own, self.quota)

    @property
    def shared(self) -> tuple[Fd, Fd, Fd]:
        """What the program gets."""
        return (self.journal, self.staging, self.pinned)

    def close(self) -> None:
        close_all(self.all)


@dataclass(frozen=True, slots=True)
class Handle:
    """A piece of device memory, a shadow or an image that a server has handed over, and the message that hands it to
    the next one."""

    id: int
    kind: str
    size: int
    fd: Fd
    message: bytes
    name: str = ""
    ordinal: int = 0  # of the job's devices

    @property
    def on_host(self) -> bool:
        """Of a shadow: is it in host memory, or in a file?"""
        return self.name != ""


def make_handle(message: m.MemoryAdd, fd: Fd) -> Handle:
    return Handle(message.id, message.kind, message.bytes, fd, m.pack_memory(message), message.name, message.ordinal)
