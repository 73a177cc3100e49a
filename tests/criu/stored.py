"""What a checkpoint has of a program's device memory, read from its pieces without a restoration."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

from xmigd.checkpoints.content import PIECE, Chunks
from xmigd.checkpoints.manifest import Content, Program
from xmigd.store.memory import CHUNK, EXTENT, FAILURES, LIVE_RANGE, SNAPSHOT_HEADER, parse_snapshot

Read = Callable[[str, int], bytes]


def reading(objects: Path, memory: Path) -> Read:
    """Pieces by hash and size, from host memory or the disk."""
    chunks = Chunks(objects)
    slabs = {
        name: (path.with_suffix(".slab"), int(at))
        for path in memory.glob("*.places")
        for at, (name, _) in json.loads(path.read_bytes())["places"].items()
    }

    def read(name: str, size: int) -> bytes:
        kept, at = slabs.get(name, (memory / name, 0))
        if not kept.exists():
            return chunks.get(name, size)
        with kept.open("rb") as file:
            file.seek(at)
            return file.read(size)

    return read


def _whole(content: Content, read: Read) -> bytes:
    found = bytearray(content.bytes)
    for chunk in content.chunks:
        found[chunk.at : chunk.at + chunk.bytes] = read(chunk.hash, chunk.bytes)
    return bytes(found)


class Stored:
    """One program's."""

    def __init__(self, program: Program, read: Read) -> None:
        self._read = read
        (file,) = (_whole(content, read) for content in program.snapshots if content.bytes)
        parse_snapshot(file)
        memory, live, chunks = SNAPSHOT_HEADER.unpack_from(file)[6:9]
        start = SNAPSHOT_HEADER.size + FAILURES + memory * EXTENT + live * LIVE_RANGE
        entries = struct.iter_unpack("<3Q", file[start : start + chunks * CHUNK])
        self._places = {address: place for address, _, place in entries}
        self._pieces = {
            json.loads(one.message)["address"] + chunk.at: chunk.hash
            for one in program.memory
            if one.kind == "shadow"
            for chunk in one.content.chunks
        }

    def at(self, address: int, size: int) -> bytes:
        """Of device memory."""
        first = address - address % PIECE
        found = b"".join(self._piece(self._places[at]) for at in range(first, address + size, PIECE))
        return found[address - first : address - first + size]

    def _piece(self, place: int) -> bytes:
        name = self._pieces.get(place) if place else None
        return bytes(PIECE) if name is None else self._read(name, PIECE)
