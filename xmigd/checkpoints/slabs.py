"""What is restored from host memory without being copied: a program's next server is given the slabs that its
checkpoint has there, as they are.

A checkpoint's manifest has device memory in the order in which its server copied it, and of an increment most of that
lies in slabs of earlier checkpoints. So here the shadow gets another order: slabs one behind the other, each with the
pieces that it has of this checkpoint and of others; then what is in none of them, in memory of its own. The snapshot's
file, which says where in the shadow each chunk is, is written anew.

A slab is sealed: the server reads it, and writes what changes elsewhere.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from xmigd.checkpoints.content import PIECE
from xmigd.checkpoints.manifest import Chunk, Content, Memory, Program
from xmigd.checkpoints.memory import Slab
from xmigd.ipc import messages as m
from xmigd.memory.host_pool import PLAIN
from xmigd.store.memory import Unreadable, with_slots

PIECES = 32  # of what is in no slab, in one descriptor: as a server makes them


@dataclass(frozen=True, slots=True)
class Shadow:
    """Of one program. `sealed`: the messages of slabs, by their numbers in the list that was given. `rest`: of memory
    that is to be filled. `slots`: new ones by the old; 0: zeros."""

    sealed: list[tuple[int, m.MemoryAdd]] = field(default_factory=list)
    rest: list[tuple[m.MemoryAdd, Content]] = field(default_factory=list)
    slots: dict[int, int] = field(default_factory=dict)


def arrange(program: Program, slabs: Sequence[tuple[Slab, int]]) -> Shadow | None:
    """`slabs`: with the bytes of each. None: nothing of it is in slabs, or it is none of ours."""
    shadow = [(memory, _address(memory)) for memory in program.memory if memory.kind == "shadow"]
    if not slabs or not shadow or any(not _is_plain(memory) for memory, _ in shadow):
        return None
    if sum(1 for content in program.snapshots if content.bytes) != 1:
        return None
    places: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for number, (slab, bytes) in enumerate(slabs):
        if bytes % PIECE:  # no server has made that
            continue
        for at, (name, size) in slab.places.items():
            if size == PIECE and at % PIECE == 0:
                places[name].append((number, at))
    found = _Arranging(program, [bytes for _, bytes in slabs], dict(_first_addresses(shadow)))
    for memory, address in shadow:
        for chunk in memory.content.chunks:
            # Each place is one slot: what is equal twice needs two.
            there = places.get(chunk.hash)
            slot = address + chunk.at
            found.slots[slot] = (
                found.in_slab(memory.ordinal, *there.pop()) if there else found.in_rest(memory.ordinal, chunk.hash)
            )
    return found.shadow() if found.sealed else None


def rewritten(file: bytes, shadow: Shadow, program: Program) -> bytes:
    """The snapshot's file with the slots of this shadow. Raises Unreadable."""
    stored = [(_address(memory), memory.content.bytes) for memory in program.memory if memory.kind == "shadow"]

    def slot(old: int) -> int:
        if (new := shadow.slots.get(old)) is not None:
            return new
        if old == 0 or any(start <= old < start + size for start, size in stored):
            return 0  # what is stored of no piece is zero
        raise Unreadable("it names a place that there is not")

    return with_slots(file, slot)


class _Arranging:
    def __init__(self, program: Program, sizes: Sequence[int], ends: dict[int, int]) -> None:
        """`sizes`: bytes of each slab. `ends`: by device, where the next memory may begin."""
        self.slots: dict[int, int] = {}
        self.sealed: dict[tuple[int, int], m.MemoryAdd] = {}  # by number and device
        self._sizes = sizes
        self._ends = ends
        self._rest: dict[int, list[list[str]]] = {}  # hashes of each memory, by device
        self._rest_at: dict[int, list[m.MemoryAdd]] = defaultdict(list)
        self._next_id = 1 + max((memory.id for memory in program.memory), default=0)

    def in_slab(self, ordinal: int, number: int, at: int) -> int:
        """The slot."""
        if (message := self.sealed.get((number, ordinal))) is None:
            message = self.sealed[number, ordinal] = self._add(ordinal, self._sizes[number], sealed=True)
        return message.address + at

    def in_rest(self, ordinal: int, name: str) -> int:
        """The slot of a piece that is in no slab."""
        memories = self._rest.setdefault(ordinal, [])
        if not memories or len(memories[-1]) == PIECES:
            memories.append([])
            self._rest_at[ordinal].append(self._add(ordinal, PIECES * PIECE, sealed=False))
        memories[-1].append(name)
        return self._rest_at[ordinal][-1].address + (len(memories[-1]) - 1) * PIECE

    def shadow(self) -> Shadow:
        rest = [
            (message.model_copy(update={"bytes": len(names) * PIECE}), _content(names))
            for ordinal, memories in self._rest.items()
            for message, names in zip(self._rest_at[ordinal], memories, strict=True)
        ]
        return Shadow([(number, message) for (number, _), message in self.sealed.items()], rest, self.slots)

    def _add(self, ordinal: int, bytes: int, *, sealed: bool) -> m.MemoryAdd:
        address, id = self._ends[ordinal], self._next_id
        self._ends[ordinal] += -(-bytes // PIECE) * PIECE
        self._next_id += 1
        return m.MemoryAdd(
            type="memory", op="add", id=id, kind="shadow", ordinal=ordinal, address=address, bytes=bytes, name=PLAIN,
            sealed=sealed,
        )  # fmt: skip


def _content(names: Sequence[str]) -> Content:
    chunks = tuple(Chunk(at=number * PIECE, bytes=PIECE, hash=name) for number, name in enumerate(names))
    return Content(bytes=len(names) * PIECE, chunks=chunks)


def _first_addresses(shadow: Sequence[tuple[Memory, int]]) -> dict[int, int]:
    first: dict[int, int] = {}
    for memory, address in shadow:
        first[memory.ordinal] = min(address, first.get(memory.ordinal, address))
    return first


def _address(memory: Memory) -> int:
    return int(json.loads(memory.message)["address"])


def _is_plain(memory: Memory) -> bool:
    """Is it as a server copies it: in host memory, and only of whole pieces?"""
    whole = all(chunk.bytes == PIECE and chunk.at % PIECE == 0 for chunk in memory.content.chunks)
    return whole and json.loads(memory.message).get("name") == PLAIN
