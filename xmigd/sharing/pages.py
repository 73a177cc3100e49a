"""The memory in which servers of one device show each other their work (shim/server/sharing/page.h).

Two files for each device, of a fixed size. One belongs to critical jobs: their servers write it, and those of
best-effort jobs get it for reading. The other belongs to best-effort jobs. Servers are hostile: what is read here is
bounded, and nothing is decided by it but how long a best-effort job's kernel waits.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from dataclasses import dataclass

from xmigd.ipc.fds import F_ADD_SEALS, F_SEAL_GROW, F_SEAL_SEAL, F_SEAL_SHRINK, Fd

MAGIC = 0x31726168736D6978
SLOTS, SLOT_BYTES, HEADER_BYTES = 255, 64, 64
BYTES = HEADER_BYTES + SLOTS * SLOT_BYTES
HEADER = struct.Struct("<QI")
SLOT = struct.Struct("<IIQQQQ")
EXACT = (1 << 53) - 1


@dataclass(frozen=True, slots=True)
class Shown:
    """What a server has written down of its waiting."""

    held: int  # kernels that waited
    held_ns: int
    overdue: int  # of these, kernels that waited as long as they may


class Page:
    def __init__(self, name: str) -> None:
        """Raises OSError."""
        self.fd = Fd(os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        os.ftruncate(self.fd.fileno(), BYTES)
        os.fchmod(self.fd.fileno(), 0o600)  # who has it for reading must not open it again for writing
        self.reading = Fd(os.open(f"/proc/self/fd/{self.fd.fileno()}", os.O_RDONLY | os.O_CLOEXEC))
        fcntl.fcntl(self.fd.fileno(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)
        self._map = mmap.mmap(self.fd.fileno(), BYTES)
        self._used: set[int] = set()
        HEADER.pack_into(self._map, 0, MAGIC, 0)

    def take(self) -> int | None:
        """A slot, empty; None: there is none left."""
        slot = next((number for number in range(SLOTS) if number not in self._used), None)
        if slot is not None:
            self._used.add(slot)
            self._empty(slot)
            self._count()
        return slot

    def give_back(self, slot: int) -> None:
        self._used.discard(slot)
        self._empty(slot)
        self._count()

    def set_present(self, slot: int, present: bool) -> None:
        """Does a server that executes have it? Others wait for no other one."""
        struct.pack_into("<I", self._map, HEADER_BYTES + slot * SLOT_BYTES, int(present))

    def read(self, slot: int) -> Shown:
        _, _, _, held, held_ns, overdue = SLOT.unpack_from(self._map, HEADER_BYTES + slot * SLOT_BYTES)
        return Shown(min(held, EXACT), min(held_ns, EXACT), min(overdue, EXACT))

    def close(self) -> None:
        self._map.close()
        self.fd.close()
        self.reading.close()

    def _empty(self, slot: int) -> None:
        SLOT.pack_into(self._map, HEADER_BYTES + slot * SLOT_BYTES, 0, 0, 0, 0, 0, 0)

    def _count(self) -> None:
        struct.pack_into("<I", self._map, 8, max(self._used, default=-1) + 1)
