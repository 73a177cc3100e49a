"""What other nodes' devices alone have, in host memory of this one (docs/decisions/0081).

Of each process a memfd, with as many places as it is to keep chunks. Nobody here looks at content: the server that gets
it back hashes it where it has arrived. Every thread may use it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from xmigd.errors import Conflict, Unavailable
from xmigd.ipc import messages as m
from xmigd.ipc.fds import Fd, write_all


@dataclass(frozen=True, slots=True)
class Owner:
    """A process of another node, and the nodes of its job."""

    peer: str
    nodes: str
    process: str


@dataclass(slots=True, eq=False)
class _Part:
    memory: Fd
    wanted: frozenset[int] = frozenset()  # hashes
    places: dict[int, int] = field(default_factory=dict)  # by hash, of what is there

    def become(self, wanted: frozenset[int]) -> None:
        """What is not wanted goes, the rest moves to where there is room for it. Raises OSError."""
        self.places = {one: place for one, place in self.places.items() if one in wanted}
        self.wanted = wanted
        free = self.free()
        for one, place in self.places.items():
            if place >= len(wanted):
                to = free.pop()
                moved = os.pread(self.memory.fileno(), m.CHUNK, place * m.CHUNK)
                write_all(self.memory.fileno(), moved, to * m.CHUNK)
                self.places[one] = to
        os.ftruncate(self.memory.fileno(), len(wanted) * m.CHUNK)

    def free(self) -> list[int]:
        return sorted(set(range(len(self.wanted))) - set(self.places.values()), reverse=True)


class Retained:
    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._lock = threading.Lock()
        self._parts: dict[Owner, _Part] = {}

    @property
    def bound(self) -> int:
        """Bytes."""
        return self._most

    @property
    def reserved(self) -> int:
        """Bytes, of what is here and what is to come."""
        with self._lock:
            return self._reserved()

    def retain(self, owner: Owner, hashes: Sequence[int]) -> bytes:
        """Of a process, these chunks and no others: all of them or none, for a part would be of no use. For each, 1 if
        it is not there. Raises Conflict: there is no room for all; what was there is gone then."""
        wanted = frozenset(hashes)
        with self._lock:
            part = self._parts.pop(owner, None)
            if not wanted:
                return b""
            if (needed := len(wanted) * m.CHUNK) > (left := self._most - self._reserved()):
                raise Conflict(
                    f"{needed >> 20} MiB are to be kept, and there is room for {left >> 20} MiB", code="no_room",
                    hint="an operator of that node sets neighbour_copies_mib",
                )  # fmt: skip
            try:
                part = part or _Part(Fd(os.memfd_create("xmig-retained", os.MFD_CLOEXEC)))
                part.become(wanted)
            except OSError as error:
                raise Unavailable(f"host memory for chunks cannot be made: {error.strerror}") from None
            self._parts[owner] = part
            return bytes(one not in part.places for one in hashes)

    def put(self, owner: Owner, hashes: Sequence[int], content: bytes) -> None:
        """Of those that are to be kept. Raises Unavailable: they are not any more, or not with this daemon."""
        with self._lock:
            part = self._parts.get(owner)
            if part is None or not part.wanted.issuperset(hashes):
                raise Unavailable("these chunks are not to be kept here")
            free = part.free()
            try:
                for number, one in enumerate(hashes):
                    place = part.places.pop(one, None)
                    place = free.pop() if place is None else place
                    one_chunk = memoryview(content)[number * m.CHUNK : (number + 1) * m.CHUNK]
                    write_all(part.memory.fileno(), one_chunk, place * m.CHUNK)
                    part.places[one] = place
            except OSError as error:
                raise Conflict(f"host memory has no room: {error.strerror}", code="no_room") from None

    def find(self, owner: Owner, chunks: Sequence[m.ChunkHash]) -> tuple[int, tuple[int, ...], bytes]:
        """Of how many of these it was looked, the places of those that are here, as many as one answer takes, and their
        content. Raises OSError."""
        found: list[int] = []
        content: list[bytes] = []
        with self._lock:
            part = self._parts.get(owner)
            for number, (_, one) in enumerate(chunks):
                place = None if part is None else part.places.get(one)
                if part is None or place is None:
                    continue
                if len(found) == m.CHUNKS_AT_ONCE:
                    return number, tuple(found), b"".join(content)
                content.append(os.pread(part.memory.fileno(), m.CHUNK, place * m.CHUNK))
                found.append(number)
        return len(chunks), tuple(found), b"".join(content)

    def forget(self, which: Callable[[Owner], bool]) -> None:
        """Waits, for content that is being written, and for the kernel, which frees all of it."""
        with self._lock:
            gone = [self._parts.pop(owner) for owner in list(self._parts) if which(owner)]
        gone.clear()  # where nobody waits for the lock

    def _reserved(self) -> int:
        return sum(len(part.wanted) for part in self._parts.values()) * m.CHUNK
