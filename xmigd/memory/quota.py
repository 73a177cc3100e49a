"""The memory quota that all processes of a job share on a device (shim/server/sharing/quota.h).

One page for each job with a quota: a sealed file, with a slot for each device of each process. The servers of the job's
processes write into it how much device memory their programs have, and claim more under the file's lock. The daemon
gives out the slots; it never changes a claim.

A page lives as long as somebody has it. Each process's server has it, announces it to the next daemon, and the
descriptor store keeps it with the process's memory. A suspended process has no slots, and claims anew.

Servers are hostile: what is read here is bounded. A page is shared by servers of one job, and decides only how much of
that job's quota is left.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from weakref import WeakValueDictionary

from xmigd.errors import ProtocolError, Unavailable
from xmigd.ipc.fds import F_ADD_SEALS, F_SEAL_GROW, F_SEAL_SEAL, F_SEAL_SHRINK, Fd

MAGIC = 0x31746F7571676D78
SLOTS, SLOT_BYTES, HEADER_BYTES = 1023, 64, 64
BYTES = HEADER_BYTES + SLOTS * SLOT_BYTES
# In the machine's own order and sizes.
HEADER = struct.Struct("QI")
WORD, LONG = 4, 8  # bytes
SLOT = struct.Struct("IIQQ16s")  # state, ordinal, device, claim, process
DEVICE_AT, CLAIM_AT = 8, 16
SEQUENCE_BITS = 40
GRANULE = 2 << 20
F_GET_SEALS = 1034
FREE, PASSES, HAS = 0, 1, 2  # states of a slot: its process comes or has left, or is there. Both count
PATIENCE = 0.05  # seconds: a server has the lock for less than a microsecond

Slots = tuple[int, ...]  # of a process, by ordinal of its devices


class QuotaPage:
    def __init__(self, fd: Fd) -> None:
        """Of a file that `make` has made. Raises ProtocolError: it is none."""
        sealed = F_SEAL_SHRINK | F_SEAL_GROW
        try:
            seals = fcntl.fcntl(fd.fileno(), F_GET_SEALS)
            if seals & sealed != sealed or os.fstat(fd.fileno()).st_size != BYTES:
                raise ProtocolError("a quota's page that is not sealed, or has another size")
            self._map = mmap.mmap(fd.fileno(), BYTES)
        except OSError as error:
            raise ProtocolError(f"a quota's page that cannot be mapped: {error.strerror}") from None
        if HEADER.unpack_from(self._map, 0)[0] != MAGIC:
            raise ProtocolError("a quota's page with another layout")
        self._fd = fd
        # What a server may read meanwhile is written at once; struct would write zeros first.
        self._words, self._longs = memoryview(self._map).cast("I"), memoryview(self._map).cast("Q")

    @classmethod
    def make(cls) -> QuotaPage:
        """An empty one. Raises OSError."""
        fd = Fd(os.memfd_create("xmig-quota", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        os.ftruncate(fd.fileno(), BYTES)
        os.fchmod(fd.fileno(), 0o600)
        fcntl.fcntl(fd.fileno(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)
        os.pwrite(fd.fileno(), HEADER.pack(MAGIC, 0), 0)
        return cls(fd)

    def again(self) -> Fd:
        """Another open file of the same page: a descriptor store has each only once. Raises OSError."""
        return Fd(os.open(f"/proc/self/fd/{self._fd.fileno()}", os.O_RDWR | os.O_CLOEXEC))

    def is_of(self, fd: Fd) -> bool:
        return os.path.samestat(os.fstat(self._fd.fileno()), os.fstat(fd.fileno()))

    # --- slots --------------------------------------------------------------------------------------------------------

    def take(self, process: str, devices: Sequence[str]) -> Slots:
        """Slots for a process that is to come to these devices, without a claim. Raises Unavailable: there are none."""
        free = [number for number in range(SLOTS) if self._read(number)[0] == FREE][: len(devices)]
        if len(free) < len(devices):
            raise Unavailable("the job has more processes than its memory quota can count", code="no_room")
        for ordinal, (number, device) in enumerate(zip(free, devices, strict=True)):
            at = HEADER_BYTES + number * SLOT_BYTES
            SLOT.pack_into(self._map, at, FREE, ordinal, key_of(device), 0, bytes.fromhex(process))
            self._words[at // WORD] = PASSES
        used = HEADER.unpack_from(self._map, 0)[1]
        self._words[LONG // WORD] = max(used, *(number + 1 for number in free))
        return tuple(free)

    def arrived(self, slots: Slots) -> None:
        """The process is there, by the account of the next daemon, too."""
        self._set(slots, HAS)

    def left(self, slots: Slots) -> None:
        """It is not there any more; its server may still be."""
        self._set(slots, PASSES)

    def free(self, slots: Slots) -> None:
        """No server writes them any more: what they claim is given back."""
        self._set(slots, FREE)

    def move(self, slot: int, device: str, quota: int) -> bool:
        """What the slot claims is of this device from now on. False: that is more than the quota of so many bytes has
        there."""
        with self._locked() as locked:
            if not locked or self.claimed((slot,)) > quota - self.used(device):
                return False
            self._longs[(HEADER_BYTES + slot * SLOT_BYTES + DEVICE_AT) // LONG] = key_of(device)
            return True

    def has(self, process: str, slots: Sequence[int], count: int) -> bool:
        """Are these the process's, one for each of so many devices?"""
        if len(slots) != count or not all(0 <= number < SLOTS for number in slots):
            return False
        found = [self._read(number) for number in slots]
        return all(
            state != FREE and ordinal == place and owner == bytes.fromhex(process)
            for place, (state, ordinal, _, _, owner) in enumerate(found)
        )

    def slots_of(self, process: str, devices: Sequence[str]) -> Slots | None:
        """Those of a process that is on these devices; None: it has not one for each. As a move ends it has two: then
        that of the device."""
        found: dict[int, int] = {}
        for number, (state, ordinal, device, _, owner) in self._all():
            its = state == HAS and owner == bytes.fromhex(process) and ordinal < len(devices)
            if its and (ordinal not in found or device == key_of(devices[ordinal])):
                found[ordinal] = number
        return tuple(found[ordinal] for ordinal in range(len(devices))) if len(found) == len(devices) else None

    def free_others(self, kept: set[int]) -> None:
        """All slots but these."""
        for number, _ in self._all():
            if number not in kept:
                self.free((number,))

    # --- claims -------------------------------------------------------------------------------------------------------

    def claimed(self, slots: Slots) -> int:
        """Bytes."""
        return sum(self._read(number)[3] >> SEQUENCE_BITS for number in slots) * GRANULE

    def used(self, device: str) -> int:
        """Bytes that all of the job's processes have there."""
        key = key_of(device)
        return sum(
            claim >> SEQUENCE_BITS for _, (state, _, on, claim, _) in self._all() if state != FREE and on == key
        ) * GRANULE  # fmt: skip

    def _set(self, slots: Slots, state: int) -> None:
        for number in slots:
            self._words[(HEADER_BYTES + number * SLOT_BYTES) // WORD] = state

    def _all(self) -> Iterator[tuple[int, tuple[int, int, int, int, bytes]]]:
        for number in range(min(HEADER.unpack_from(self._map, 0)[1], SLOTS)):
            yield number, self._read(number)

    def _read(self, number: int) -> tuple[int, int, int, int, bytes]:
        state, ordinal, device, claim, owner = SLOT.unpack_from(self._map, HEADER_BYTES + number * SLOT_BYTES)
        return state, ordinal, device, claim, owner

    @contextlib.contextmanager
    def _locked(self) -> Iterator[bool]:
        """Nobody claims meanwhile. False: a server has stopped with the lock. The lock is of processes: nothing in it
        closes a descriptor of the page."""
        end = time.monotonic() + PATIENCE
        while True:
            try:
                fcntl.lockf(self._fd.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > end:
                    yield False
                    return
                time.sleep(0.0001)
        try:
            yield True
        finally:
            fcntl.lockf(self._fd.fileno(), fcntl.LOCK_UN)


class Quotas:
    """The pages of this node's jobs, as long as one of their processes uses them."""

    def __init__(self, awaited: Callable[[str], bool]) -> None:
        """`awaited`: may a server of this job, which an earlier daemon has started, still bring its page?"""
        self._awaited = awaited
        self._pages: WeakValueDictionary[str, QuotaPage] = WeakValueDictionary()

    def of(self, job: str) -> QuotaPage | None:
        return self._pages.get(job)

    def of_or_new(self, job: str) -> QuotaPage:
        """Raises OSError, Unavailable."""
        page = self._pages.get(job)
        if page is None and self._awaited(job):
            raise Unavailable(
                "what the job's other programs have of its memory quota is not known yet: the daemon has just started, "
                "and their servers have not announced themselves", hint="try again in some seconds",
            )  # fmt: skip
        if page is None:
            page = self._pages[job] = QuotaPage.make()
        return page

    def adopt(self, job: str, fd: Fd) -> QuotaPage:
        """One of an earlier daemon. Raises ProtocolError: it is none, or not the one that the job's others have."""
        page = self._pages.get(job)
        if page is None:
            page = self._pages[job] = QuotaPage(Fd(os.dup(fd.fileno())))
        elif not page.is_of(fd):
            raise ProtocolError("a quota's page that is not the job's")
        return page


def key_of(device: str) -> int:
    return int.from_bytes(hashlib.sha256(device.encode()).digest()[:8], "little")
