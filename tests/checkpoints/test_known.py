"""What of a copy is stored already, as its server says; what it says may be wrong."""

from __future__ import annotations

import os
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

from tests.checkpoints.test_memory import SIZE, made, opened
from xmigd.checkpoints.content import PIECE
from xmigd.checkpoints.known import known_after, known_contents, places_of
from xmigd.checkpoints.manifest import Chunk, Content
from xmigd.errors import Conflict
from xmigd.ipc import messages as m
from xmigd.ipc.fds import Fd
from xmigd.store.memory import FAILURES, SNAPSHOT_HEADER, SNAPSHOT_MAGIC
from xmigd.supervisor.copying import Known, SnapshotCopy

A, B, C = "a" * 64, "b" * 64, "c" * 64
SHADOW = 1 << 40


def file_of(number: int, chunks: list[tuple[int, int]]) -> Fd:
    """A snapshot's file that has these chunks, each at this address and in this place."""
    body = bytes(FAILURES) + b"".join(struct.pack("<3Q", address, 7, place) for address, place in chunks)
    size = SNAPSHOT_HEADER.size + len(body)
    rest = SNAPSHOT_HEADER.pack(SNAPSHOT_MAGIC, size, 0, number, 0, 0, 0, 0, len(chunks), 0, 0, 0, 0)[24:] + body
    fd = os.memfd_create("snapshot")
    os.write(fd, struct.pack("<3Q", SNAPSHOT_MAGIC, size, xxhash.xxh3_64_intdigest(rest)) + rest)
    return Fd(fd)


def slab(at: int, pieces: int, known: bool) -> tuple[m.SnapshotSlab, Fd | None]:
    message = m.SnapshotSlab(
        type="snapshot_slab", number=5, ordinal=0, address=SHADOW + at, bytes=pieces * PIECE, known=known
    )
    return message, None if known else Fd(os.memfd_create("slab"))


def copy_of(chunks: list[tuple[int, int]], number: int = 5) -> SnapshotCopy:
    """Two chunks of it are known, one is copied, behind them."""
    since = Known(server=1, generation=2, number=4, pieces={0x10: A, 0x20: B, 0x30: ""})
    slabs = (slab(0, 2, True), slab(2 * PIECE, 1, False))
    return SnapshotCopy(5, 1, since, slabs, file_of(number, chunks), PIECE, 1.0)


def test_each_chunk_is_found_where_it_is_now() -> None:
    """They have changed their places, one is gone, one was zeros, and one is new."""
    copy = copy_of([(0x20, SHADOW), (0x30, SHADOW + PIECE), (0x40, SHADOW + 2 * PIECE), (0x50, 0)])
    places = places_of(copy)
    first, second = known_contents(copy, places)
    assert first == Content(bytes=2 * PIECE, chunks=(Chunk(at=0, bytes=PIECE, hash=B),))
    assert second is None
    copied = Content(bytes=PIECE, chunks=(Chunk(at=0, bytes=PIECE, hash=C),))
    after = known_after(copy, places, [first, copied], 2)
    assert (after.server, after.generation, after.number) == (1, 2, 5)
    assert after.pieces == {0x20: B, 0x30: "", 0x40: C}


def test_what_was_rounded_is_not_known() -> None:
    """The device has something else: a server that counts on it is refused."""
    copy = copy_of([(0x40, SHADOW), (0x50, SHADOW + 2 * PIECE)])
    exact, rounded = slab(0, 2, False), slab(2 * PIECE, 1, False)
    rounded = rounded[0].model_copy(update={"rounded": True}), rounded[1]
    copy = replace(copy, since=None, slabs=(exact, rounded))
    stored = [Content(bytes=PIECE, chunks=(Chunk(at=0, bytes=PIECE, hash=one),)) for one in (A, B)]
    after = known_after(copy, places_of(copy), stored, 2)
    assert after.pieces == {0x40: A}
    later = replace(copy_of([(0x50, SHADOW)]), since=after)
    with pytest.raises(Conflict, match="left out what is not stored"):
        list(known_contents(later, places_of(later)))


@pytest.mark.parametrize(
    "chunks",
    [
        [(0x40, SHADOW)],  # of which nothing is known
        [(0x10, SHADOW + 8)],  # not where a piece begins
        [(0x10, SHADOW + PIECE + 8)],  # and ends outside
        [(0x10, SHADOW + 3 * PIECE)],  # behind everything
        [(0x10, SHADOW - PIECE)],
    ],
)
def test_a_server_that_leaves_out_what_nobody_has(chunks: list[tuple[int, int]]) -> None:
    copy = copy_of(chunks)
    with pytest.raises(Conflict) as caught:
        list(known_contents(copy, places_of(copy)))
    assert caught.value.code == "not_copied"


def test_a_file_of_another_snapshot() -> None:
    with pytest.raises(Conflict, match="another one's"):
        places_of(copy_of([], number=4))


def test_what_is_not_there_any_more_is_not_known(tmp_path: Path) -> None:
    """In host memory, or on the disk, wherever the checkpoint goes: what counts stays until it ends."""
    chunks = opened(tmp_path)
    first, second = made(chunks, "a" * 32, 1), made(chunks, "b" * 32, 2)
    with chunks.writing(owner=0, durable=False) as writing:
        assert writing.has([*first, "", *second])
        chunks.memory.remove("a" * 32)
        writing.sync()
        writing.finish("c" * 32, first | second)
    assert chunks.memory.has("c" * 32)
    assert all(chunks.memory.get(name, SIZE) for name in first)
    for one in ("b", "c"):
        chunks.memory.remove(one * 32)
    with chunks.writing(owner=0) as writing:
        assert not writing.has(first)
    with chunks.writing() as writing:
        assert not writing.has(first)
        assert writing.has([""])
        name, _ = chunks.put(b"on the disk")
        assert writing.has([name])
        assert not chunks.remove_unneeded(set)
    assert chunks.remove_unneeded(set)
    with chunks.writing() as writing:
        assert not writing.has([name])
