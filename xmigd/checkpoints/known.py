"""What a checkpoint has of the one before: chunks of device memory that nobody has written since.

A server knows by the snapshot that wrote a chunk's place in its shadow last whether it is as it was at an earlier copy
(shim/server/snapshot/snapshots.h). Such a chunk is not copied; it has a place in a piece without memory. Here it gets
the piece of content that was stored for it then. No hash decides that two chunks are equal.

What a server says may be wrong, but it can name only what was stored of its own process.
"""

from __future__ import annotations

import os
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

from xmigd.checkpoints.content import PIECE
from xmigd.checkpoints.manifest import Chunk, Content
from xmigd.errors import Conflict
from xmigd.ipc import messages as m
from xmigd.store.memory import (
    CHUNK,
    EXTENT,
    FAILURES,
    LIVE_RANGE,
    MAX_SNAPSHOT,
    SNAPSHOT_HEADER,
    Unreadable,
    parse_snapshot,
)
from xmigd.supervisor.copying import Known, SnapshotCopy

Places = dict[int, int]  # the address of the chunk that has it


def places_of(copy: SnapshotCopy) -> Places:
    """Of what it has copied or left out, as its file says. Blocks. Raises Conflict."""
    fd = copy.file.fileno()
    try:
        size = os.fstat(fd).st_size
        if size > MAX_SNAPSHOT:
            raise Unreadable(f"it has {size} bytes")
        content = os.pread(fd, size, 0)
        if parse_snapshot(content).number != copy.number:
            raise Unreadable("it is another one's")
    except (Unreadable, OSError) as error:
        raise _not_copied(f"the file of the snapshot is not readable: {error}") from None
    memory, live, chunks = SNAPSHOT_HEADER.unpack_from(content)[6:9]
    start = SNAPSHOT_HEADER.size + FAILURES + memory * EXTENT + live * LIVE_RANGE
    words = array("Q")
    words.frombytes(content[start : start + chunks * CHUNK])
    found = dict(zip(words[2::3], words[0::3], strict=True))
    found.pop(0, None)  # zeros have none
    return found


def known_contents(copy: SnapshotCopy, places: Places) -> Iterator[Content | None]:
    """Of each of its slabs; None: it was copied. Raises Conflict: nobody has what it names."""
    pieces = {} if copy.since is None else copy.since.pieces
    by_slab = _by_slab([slab for slab, _ in copy.slabs], places)
    for (slab, fd), there in zip(copy.slabs, by_slab, strict=True):
        if fd is not None:
            yield None
            continue
        chunks = []
        for at, address in there:
            name = pieces.get(address)
            if name is None or at % PIECE or at + PIECE > slab.bytes:
                raise _not_copied("its server left out what is not stored")
            if name:
                chunks.append(Chunk(at, PIECE, name))
        yield Content(bytes=slab.bytes, chunks=tuple(chunks))


def known_after(copy: SnapshotCopy, places: Places, contents: Sequence[Content], generation: int) -> Known:
    """When these are stored, one for each slab. What was rounded is not what the device has, so it is not known."""
    pieces: dict[int, str] = {}
    slabs = [slab for slab, _ in copy.slabs]
    for slab, content, there in zip(slabs, contents, _by_slab(slabs, places), strict=True):
        if slab.rounded:
            continue
        names = {chunk.at: chunk.hash for chunk in content.chunks if chunk.bytes == PIECE}
        pieces.update((address, names.get(at, "")) for at, address in there)
    return Known(copy.server, generation, copy.number, pieces)


def _by_slab(slabs: Sequence[m.SnapshotSlab], places: Places) -> list[list[tuple[int, int]]]:
    """Of each: where in it which chunk is. Raises Conflict: a place is in none of them."""
    order = sorted(range(len(slabs)), key=lambda one: slabs[one].address)
    starts = [slabs[one].address for one in order]
    found: list[list[tuple[int, int]]] = [[] for _ in slabs]
    for place, address in _in_order(places.items()):
        index = bisect_right(starts, place) - 1
        slab = slabs[order[index]] if index >= 0 else None
        if slab is None or place >= slab.address + slab.bytes:
            raise _not_copied("its file names places that there are not")
        found[order[index]].append((place - slab.address, address))
    return found


def _in_order(places: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    return sorted(places)


def _not_copied(why: str) -> Conflict:
    return Conflict(f"its snapshot was not copied: {why}", code="not_copied")
