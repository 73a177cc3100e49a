"""What goes to another node stays in host memory there and here: neither waits for a disk.

At the source that is the memory into which servers have copied, and CRIU's files, as they are; at the target it is
memory of our own, which the program's next server is given as slabs (slabs.py). Invariants:

- It is one move's, and ends with it. No checkpoint relies on it.
- What is read of it has the hash that it is read by: what servers have handed over, to which they may still write, is
  compared each time; what we have written, to memory that nobody else may open for writing, was compared before.
- What host memory has no room for goes to the disk, as of any checkpoint.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass

from xmigd.checkpoints.content import PIECE, Chunks, Source, Writing, checked, encode, read_all
from xmigd.checkpoints.memory import Slab
from xmigd.checkpoints.planes import Bytes
from xmigd.host_memory import RESERVE, available_memory
from xmigd.ids import new_id
from xmigd.ipc.fds import Fd, free, punch, write_all
from xmigd.memory.host_pool import make_file, make_huge

SLAB = 64 << 20  # bytes of memory that is made at once: what a server makes for a copy


@dataclass(eq=False, slots=True)
class _Filling:
    """A slab of our own, and where its next piece goes. One thread at a time has it, with a descriptor that nobody else
    closes."""

    slab: Slab
    fd: Fd
    at: int = 0


class Transit(Writing):
    """Of one move. Every thread may call it."""

    def __init__(self, chunks: Chunks, owner: int) -> None:
        """`owner`: of its programs."""
        super().__init__(chunks)
        self._owner = owner
        self._lock = threading.Lock()
        self._slabs: dict[Slab, Fd] = {}
        self._own: set[Slab] = set()  # of these: written by us
        self._places: dict[str, tuple[Slab, int]] = {}  # of pieces
        self._unfilled: list[_Filling] = []
        self._closed = False
        self.whole = True  # is nothing of it on the disk?

    def close(self) -> None:
        super().close()
        with self._lock:
            self._closed = True
            free(self._slabs.values())
            self._slabs, self._own, self._places, self._unfilled = {}, set(), {}, []

    # --- what is stored -----------------------------------------------------------------------------------------------

    def retain(self, memory: Fd, owner: int | None) -> tuple[Fd, Slab | None]:
        """Whatever file it is. Raises OSError: no descriptors."""
        slab = Slab(new_id(), owner, os.fstat(memory.fileno()).st_blocks * 512)
        with self._lock:
            self._slabs[slab] = Fd(os.dup(memory.fileno()))
        return memory, slab

    def put(self, content: Bytes, source: Source, at: int) -> tuple[str, int]:
        name = hashlib.sha256(content).hexdigest()
        if source.slab is None:
            return name, self._store(name, content)
        with self._lock:
            self._note(source.slab, at, name, len(content))
        return name, 0

    def take(self, name: str, size: int, piece: Bytes) -> int:
        return self._store(name, checked(piece, name, size))

    def has(self, names: Iterable[str]) -> bool:
        return all(name in self._places or self._chunks.is_sound(name) for name in names if name)

    def lacks(self, name: str) -> bool:
        return name not in self._places and super().lacks(name)

    def sync(self) -> None:
        """Nothing of it has to outlive this daemon."""

    def sent(self) -> None:
        """CRIU's files, of which each round has its own, are of no use any more. The next copies of devices rely on the
        ones before."""
        with self._lock:
            files = {slab for slab in self._slabs if slab.owner is None}
            self._places = {name: place for name, place in self._places.items() if place[0] not in files}
            free(self._slabs.pop(slab) for slab in files)

    def retain_only(self, names: Set[str]) -> None:
        """At the target: what has come and is none of these has been replaced. Its memory is given back; who still
        reads it finds zeros there."""
        with self._lock:
            for name in self._places.keys() - names:
                slab, at = self._places.pop(name)
                del slab.places[at]
                slab.names.discard(name)
                punch(self._slabs[slab].fileno(), at, PIECE)

    def _store(self, name: str, content: Bytes) -> int:
        """In a slab of our own. Returns the bytes that it took on the disk. Raises OSError."""
        if name in self._places:
            return 0
        filling = self._next()
        if filling is None:
            self.whole = False
            return self._chunks.keep(name, len(content), lambda: encode(content))
        write_all(filling.fd.fileno(), content, filling.at)
        with self._lock:
            if self._closed:
                return 0
            self._note(filling.slab, filling.at, name, len(content))
            filling.at += PIECE
            if filling.at < SLAB:
                self._unfilled.append(filling)
        return 0

    def _next(self) -> _Filling | None:
        """With room for a piece. None: the host has none. Raises OSError: no descriptors."""
        with self._lock:
            if self._unfilled:
                return self._unfilled.pop()
        if available_memory() - RESERVE < SLAB:
            return None
        memory, slab = make_file(None), Slab(new_id(), self._owner, SLAB)
        os.fchmod(memory.fileno(), 0o600)  # servers get it for reading, as another user
        os.ftruncate(memory.fileno(), SLAB)
        with contextlib.suppress(OSError):  # small pages do as well
            make_huge(memory.fileno(), SLAB)
        with self._lock:
            if not self._closed:
                self._slabs[slab] = Fd(os.dup(memory.fileno()))
                self._own.add(slab)
        return _Filling(slab, memory)

    def _note(self, slab: Slab, at: int, name: str, size: int) -> None:
        slab.places[at] = (name, size)
        slab.names.add(name)
        place = self._places.get(name)
        if place is None or place[0].owner is None:  # rather where it stays
            self._places[name] = slab, at

    # --- what is read -------------------------------------------------------------------------------------------------

    def read(self, name: str, size: int, buffer: bytearray) -> memoryview | None:
        """The piece, in a buffer that has room for it; None: it is not here, or is not what it was."""
        with self._lock:
            found = self._places.get(name)
            if found is None:
                return None
            file = Fd(os.dup(self._slabs[found[0]].fileno()))  # that nobody closes meanwhile
            own = found[0] in self._own
        content = memoryview(buffer)[:size]
        try:
            read_all(file.fileno(), content, found[1])
        except OSError:
            return None
        finally:
            file.close()
        if not own:
            return content if hashlib.sha256(content).hexdigest() == name else None
        with self._lock:
            return content if self._places.get(name) == found else None  # or it was replaced meanwhile

    def encoded(self, name: str, size: int, buffer: bytearray) -> tuple[Bytes, ...]:
        found = self.read(name, size, buffer)
        return super().encoded(name, size, buffer) if found is None else encode(found)

    def slabs_of(self, owner: int) -> list[tuple[Slab, Fd]]:
        """This user's, open for reading. Raises OSError: no descriptors."""
        opened: list[tuple[Slab, Fd]] = []
        with self._lock:
            for slab, fd in self._slabs.items():
                if slab.owner == owner and slab.places:
                    number = os.open(f"/proc/self/fd/{fd.fileno()}", os.O_RDONLY | os.O_CLOEXEC)
                    as_it_is = Slab(slab.name, slab.owner, slab.bytes, dict(slab.places), set(slab.names))
                    opened.append((as_it_is, Fd(number)))
        return opened


@contextlib.contextmanager
def in_transit(chunks: Chunks, id: str, owner: int) -> Iterator[Transit]:
    """`id`: of the manifest that will name what goes. Raises OSError: there is no folder for what memory has no room
    for."""
    with chunks.nothing_is_removed(), contextlib.closing(Transit(chunks, owner)) as transit:
        chunks.transits[id] = transit
        try:
            yield transit
        finally:
            del chunks.transits[id]
