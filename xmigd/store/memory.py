"""Reading a process's snapshots and journal out of its memfds.

Server and program go on writing while we read, and either may write anything there: everything is read with pread (no
mapping that somebody could shrink under us), every length is checked, and what was overwritten meanwhile is
distinguished from what was not. The formats are those of shim/server/snapshot/snapshot_file.cc and
shim/journal/layout.h.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import xxhash

from xmigd.native import Layout

SNAPSHOT_MAGIC = 0x3254554347494D58
SNAPSHOT_HEADER = struct.Struct("<13Q")  # magic, bytes, checksum, number, position, sequence, seven counts
FAILURES = 8 * 16  # follow it
CHECKSUM_AT, CHECKSUMMED_FROM = 16, 24
EXTENT, LIVE_RANGE, CHUNK, IMAGE = 16, 24, 24, 16  # bytes of an entry, in the order of the file
MAX_SNAPSHOT = 64 << 20  # hashes of 5 TiB of device memory
PIECE = 1 << 20

RECORD = struct.Struct("<IHHQIHHIIIIIIQ")  # RecordHeader, up to its end: 56 bytes
RECORD_HEADER = 56
# The longest record, which the client may be writing behind the tail that it has published.
MAX_RECORD = (1 << 20) + (1 << 17)


class Unreadable(Exception):
    """A snapshot or a piece of journal that cannot be kept, and why. The job does not notice."""


@dataclass(frozen=True, slots=True)
class SnapshotFile:
    number: int
    position: int
    sequence: int
    images: tuple[tuple[int, int], ...]  # number, bytes of it that were there
    content: bytes


@dataclass(frozen=True, slots=True)
class Record:
    """The header of a record of the journal."""

    size: int
    op: int
    flags: int
    sequence: int
    thread: int
    result: int


def read_snapshot(files: tuple[int, int], number: int) -> SnapshotFile:
    """The snapshot `number`, from the one of the two memfds that has it. Raises Unreadable: it is overwritten."""
    fd = files[number & 1]
    size = os.fstat(fd).st_size
    if size > MAX_SNAPSHOT:
        raise Unreadable(f"its file has {size} bytes")
    content = b"".join(_pieces(fd, 0, size))
    snapshot = parse_snapshot(content)
    if snapshot.number != number:
        raise Unreadable(f"snapshot {snapshot.number} has taken its place")
    return snapshot


def parse_snapshot(content: bytes) -> SnapshotFile:
    """Raises Unreadable with the reason if these bytes are not a snapshot."""
    if len(content) < SNAPSHOT_HEADER.size + FAILURES:
        raise Unreadable("it is cut off")
    magic, size, checksum, number, position, sequence, memory, live, chunks, images, *_ = SNAPSHOT_HEADER.unpack_from(
        content
    )
    if magic != SNAPSHOT_MAGIC or size != len(content):
        raise Unreadable("it is not a whole snapshot")
    if xxhash.xxh3_64_intdigest(memoryview(content)[CHECKSUMMED_FROM:]) != checksum:
        raise Unreadable("its checksum is wrong")
    start = SNAPSHOT_HEADER.size + FAILURES + memory * EXTENT + live * LIVE_RANGE + chunks * CHUNK
    if images > len(content) // IMAGE or start + images * IMAGE > len(content):
        raise Unreadable("its parts are longer than the whole")
    found = tuple(struct.unpack_from("<2Q", content, start + i * IMAGE) for i in range(images))
    return SnapshotFile(number, position, sequence, found, content)


def extent_bytes(content: bytes) -> int:
    """Of the device memory that the program has, live or not. Raises Unreadable."""
    parse_snapshot(content)
    words = array("Q")
    start = SNAPSHOT_HEADER.size + FAILURES
    words.frombytes(memoryview(content)[start : start + SNAPSHOT_HEADER.unpack_from(content)[6] * EXTENT])
    return sum(words[1::2])


def with_slots(content: bytes, slot: Callable[[int], int]) -> bytes:
    """A snapshot's file in which each chunk has another place, by the one that it has. Raises Unreadable."""
    parse_snapshot(content)
    memory, live, chunks = SNAPSHOT_HEADER.unpack_from(content)[6:9]
    start = SNAPSHOT_HEADER.size + FAILURES + memory * EXTENT + live * LIVE_RANGE
    words = array("Q")
    words.frombytes(memoryview(content)[start : start + chunks * CHUNK])
    words[2::3] = array("Q", map(slot, words[2::3]))
    changed = b"".join((content[:start], words.tobytes(), content[start + chunks * CHUNK :]))
    checksum = xxhash.xxh3_64_intdigest(memoryview(changed)[CHECKSUMMED_FROM:])
    return b"".join((changed[:CHECKSUM_AT], checksum.to_bytes(8, "little"), changed[CHECKSUMMED_FROM:]))


@dataclass(frozen=True, slots=True)
class Chunks:
    """Device memory as a snapshot describes it, without content."""

    addresses: array[int]
    hashes: array[int]
    zeros: int | None  # the hash of a chunk of zeros, if there is one
    live: array[int]  # allocations: address, bytes and context of each


def read_chunks(files: tuple[int, int], number: int, most: int) -> Chunks:
    """Of the snapshot `number`, the first `most` chunks. Raises Unreadable: it is overwritten."""
    content = read_snapshot(files, number).content
    memory, live, chunks = SNAPSHOT_HEADER.unpack_from(content)[6:9]
    start = SNAPSHOT_HEADER.size + FAILURES + memory * EXTENT
    allocations, words = array("Q"), array("Q")
    allocations.frombytes(memoryview(content)[start : start + live * LIVE_RANGE])
    start += live * LIVE_RANGE
    words.frombytes(memoryview(content)[start : start + min(chunks, most) * CHUNK])
    slots = words[2::3]
    zeros = words[3 * slots.index(0) + 1] if 0 in slots else None
    return Chunks(words[0::3], words[1::3], zeros, allocations)


class Journal:
    """The ring of one process."""

    def __init__(self, fd: int, layout: Layout) -> None:
        self._fd = fd
        self._layout = layout
        self.ring_bytes = os.fstat(fd).st_size - layout.header_bytes
        if self.ring_bytes <= 0:
            raise Unreadable("its journal has no room for records")

    def tail(self) -> int:
        """The end of what the program has written; as it says."""
        return int.from_bytes(os.pread(self._fd, 8, self._layout.tail_offset), "little")

    def has(self, start: int) -> bool:
        """Are the bytes from `start` on still those of that position?"""
        return self.tail() + MAX_RECORD <= start + self.ring_bytes

    def pieces(self, start: int, end: int) -> Iterator[bytes]:
        """The bytes between two positions. Raises Unreadable when the program has written over them meanwhile."""
        if not 0 <= end - start <= self.ring_bytes:
            raise Unreadable(f"{end - start} bytes are more than its journal has")
        at = start
        while at < end:
            offset = at % self.ring_bytes
            length = min(end - at, self.ring_bytes - offset, PIECE)
            yield from _pieces(self._fd, self._layout.header_bytes + offset, length)
            at += length
        if not self.has(start):
            raise Unreadable("the program has written over its journal meanwhile")


def records(journal: bytes) -> Iterator[Record]:
    """The headers of the records of a kept piece of journal. Raises Unreadable where it does not decode."""
    at = 0
    while at < len(journal):
        if len(journal) - at < RECORD_HEADER:
            raise Unreadable(f"a record is cut off at byte {at}")
        size, op, flags, sequence, thread, _, _, _, _, _, _, result, _, _ = RECORD.unpack_from(journal, at)
        if size < RECORD_HEADER or size % 8 != 0 or size > len(journal) - at:
            raise Unreadable(f"a record of {size} bytes at byte {at}")
        yield Record(size, op, flags, sequence, thread, result)
        at += size


def _pieces(fd: int, offset: int, length: int) -> Iterator[bytes]:
    while length > 0:
        piece = os.pread(fd, min(length, PIECE), offset)
        if not piece:
            raise Unreadable("a file is shorter than it was")
        yield piece
        offset += len(piece)
        length -= len(piece)


def image_pieces(fd: int, offset: int, length: int) -> Iterator[bytes]:
    """A module image, or as much of it as has come. Raises Unreadable."""
    return _pieces(fd, offset, length)
