"""Snapshots and journals are read out of memory that others write: the answer is content or Unreadable."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from xmigd.native import Layout
from xmigd.store.memory import (
    FAILURES,
    SNAPSHOT_HEADER,
    SNAPSHOT_MAGIC,
    Journal,
    Unreadable,
    parse_snapshot,
    read_snapshot,
    records,
)

LAYOUT = Layout(header_bytes=1 << 16, tail_offset=6464)
RING = 8 << 20


def make_snapshot(number: int = 5, images: int = 2, *, claimed: int | None = None) -> bytes:
    """A snapshot with three pieces of memory, a live range, two chunks."""
    counts = (3, 1, 2, images if claimed is None else claimed, 0, 0, 0)
    body = (
        bytes(FAILURES) + bytes(3 * 16 + 24 + 2 * 24) + b"".join(struct.pack("<2Q", i, 100 + i) for i in range(images))
    )
    size = SNAPSHOT_HEADER.size + len(body)
    rest = SNAPSHOT_HEADER.pack(SNAPSHOT_MAGIC, size, 0, number, 700, 9, *counts)[24:] + body
    return struct.pack("<3Q", SNAPSHOT_MAGIC, size, xxhash.xxh3_64_intdigest(rest)) + rest


@pytest.fixture
def files() -> Iterator[tuple[int, int]]:
    pair = (os.memfd_create("snapshot0"), os.memfd_create("snapshot1"))
    yield pair
    for fd in pair:
        os.close(fd)


def test_a_snapshot(files: tuple[int, int]) -> None:
    os.pwrite(files[1], make_snapshot(), 0)
    snapshot = read_snapshot(files, 5)
    assert (snapshot.number, snapshot.position, snapshot.sequence, snapshot.images) == (5, 700, 9, ((0, 100), (1, 101)))
    with pytest.raises(Unreadable, match="cut off"):
        read_snapshot(files, 4)
    with pytest.raises(Unreadable, match="snapshot 5 has taken its place"):
        read_snapshot(files, 3)


def test_a_snapshot_that_lies_about_its_parts() -> None:
    for claimed in (3, 1 << 40, (1 << 64) - 1):
        with pytest.raises(Unreadable, match="longer than the whole"):
            parse_snapshot(make_snapshot(claimed=claimed))


def test_a_huge_snapshot_is_not_read(files: tuple[int, int]) -> None:
    os.ftruncate(files[1], 1 << 40)
    with pytest.raises(Unreadable, match="bytes"):
        read_snapshot(files, 5)


@given(st.binary(max_size=600), st.integers(0, 400), st.integers(0, 255))
@settings(deadline=None)
def test_no_bytes_do_harm(content: bytes, at: int, value: int) -> None:
    good = make_snapshot()
    corrupted = bytearray(good)
    corrupted[at % len(good)] = value
    for each in (content, good[: at % len(good)], bytes(corrupted), good[:232] + content):
        try:
            assert parse_snapshot(each).content == good
        except Unreadable:
            continue
    try:
        for record in records(content):
            assert 56 <= record.size <= len(content)
    except Unreadable:
        pass


class Ring:
    def __init__(self) -> None:
        self.fd = os.memfd_create("journal")
        os.ftruncate(self.fd, LAYOUT.header_bytes + RING)
        self.journal = Journal(self.fd, LAYOUT)

    def write(self, position: int, content: bytes) -> None:
        for i in range(0, len(content), 1 << 16):
            at = (position + i) % RING
            piece = content[i : i + (1 << 16)]
            first = piece[: RING - at]
            os.pwrite(self.fd, first, LAYOUT.header_bytes + at)
            os.pwrite(self.fd, piece[len(first) :], LAYOUT.header_bytes)
        os.pwrite(self.fd, (position + len(content)).to_bytes(8, "little"), LAYOUT.tail_offset)


@pytest.fixture
def ring() -> Iterator[Ring]:
    made = Ring()
    yield made
    os.close(made.fd)


def test_a_journal_that_runs_over_the_rings_end(ring: Ring) -> None:
    start = 5 * RING - 1000
    content = os.urandom(3 << 20)
    ring.write(start, content)
    assert b"".join(ring.journal.pieces(start, start + len(content))) == content
    assert list(ring.journal.pieces(start, start)) == []


def test_a_journal_that_was_written_over(ring: Ring) -> None:
    ring.write(0, bytes(1 << 20))
    assert ring.journal.has(0)
    ring.write(RING - (1 << 20), bytes(1 << 20))  # the next record may lie over the first ones already
    assert not ring.journal.has(0)
    with pytest.raises(Unreadable, match="written over"):
        list(ring.journal.pieces(0, 100))


def test_positions_that_cannot_be(ring: Ring) -> None:
    for start, end in ((0, RING + 1), (100, 50), (0, 1 << 62)):
        with pytest.raises(Unreadable):
            list(ring.journal.pieces(start, end))
    os.pwrite(ring.fd, b"\xff" * 8, LAYOUT.tail_offset)
    assert not ring.journal.has(0)


def test_an_empty_journal() -> None:
    fd = os.memfd_create("journal")
    with pytest.raises(Unreadable, match="no room"):
        Journal(fd, LAYOUT)
    os.close(fd)
