"""The memory in which servers write profiles and traces down (shim/server/profiling/pages.h).

A page is a memfd of a fixed size: nobody can make it grow, and what a server has written stays when it dies. Servers
are hostile: what is read here is checked, and what makes no sense is left out.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from xmigd.ipc.fds import Fd

VERSION = 1
PROFILE_MAGIC, TRACE_MAGIC = 0x31666F7270676D78, 0x3165636172676D78
ENTRIES, LAUNCHES, TICKS, RECENT = 1024, 1 << 16, 1 << 12, 48
ENTRIES_AT = PIECES_AT = 4096
HEADER = struct.Struct("<QII8Q")
ENTRY = struct.Struct("<5Q2I3I3I5I48f228s")
TICK = struct.Struct("<2Q")
LAUNCHES_AT = ENTRIES_AT + ENTRIES * ENTRY.size
TICKS_AT = LAUNCHES_AT + LAUNCHES * 4
PROFILE_BYTES = TICKS_AT + TICKS * TICK.size
TRACE_HEADER = struct.Struct("<QIIQQQ")
PIECE = struct.Struct("<2I")
NAME = struct.Struct("<4I")
EVENT = struct.Struct("<2I4I4Q3I3I2I")
SMALLEST_TRACE = PIECES_AT + (64 << 10)
LONGEST_NS = 1 << 52  # what a number of JSON says exactly
PIECES_READ = 1 << 20  # bytes at once


class Kind(IntEnum):
    kernel = 0
    to_device = 1
    to_host = 2
    on_device = 3
    between_devices = 4
    fill = 5
    graph = 6
    collective = 7
    snapshot = 8
    replay = 9
    restore = 10


LAUNCHED = frozenset({Kind.kernel, Kind.graph, Kind.collective})
OF_XMIG = frozenset({Kind.snapshot, Kind.replay, Kind.restore})


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Operations of one kind, name and shape. Sums are since the page was given to the server."""

    kind: Kind
    name: str
    ordinal: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    calls: int
    timed: int
    total_ns: int  # of those that were timed
    bytes: int
    reachable_bytes: int
    blocks_per_processor: int  # 0: not known
    processors: int
    threads_per_processor: int
    memory_mbps: int
    recent_ns: tuple[float, ...]

    @property
    def mean_ns(self) -> float | None:
        return self.total_ns / self.timed if self.timed else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A server's."""

    began: int  # CLOCK_MONOTONIC, ns
    entries: tuple[Entry, ...]
    launches: int
    ticks: int
    live_bytes: int
    peak_bytes: int
    unlisted: int
    samples: int
    dropped: int


def read_profile(page: Fd) -> Profile | None:
    """None: its server has written nothing yet, or what makes no sense."""
    raw = os.pread(page.fileno(), HEADER.size, 0)
    magic, version, count, began, launches, ticks, live, peak, unlisted, samples, dropped = HEADER.unpack(raw)
    if magic != PROFILE_MAGIC or version != VERSION or count > ENTRIES:
        return None
    raw = os.pread(page.fileno(), count * ENTRY.size, ENTRIES_AT)
    found = (_entry(fields) for fields in ENTRY.iter_unpack(raw[: len(raw) // ENTRY.size * ENTRY.size]))
    return Profile(
        began=began, entries=tuple(entry for entry in found if entry is not None), launches=launches, ticks=ticks,
        live_bytes=_sane(live), peak_bytes=_sane(peak), unlisted=_sane(unlisted), samples=_sane(samples),
        dropped=_sane(dropped),
    )  # fmt: skip


def _entry(fields: tuple[int | float | bytes, ...]) -> Entry | None:
    numbers = [int(value) for value in fields[:18] if not isinstance(value, bytes)]
    calls, timed, total, size, reachable, kind, ordinal = numbers[:7]
    if kind not in Kind.__members__.values() or timed > calls or total > LONGEST_NS or calls > LONGEST_NS:
        return None
    recent = [float(value) for value in fields[18:-1] if not isinstance(value, bytes)][: min(timed, RECENT)]
    raw = fields[-1]
    assert isinstance(raw, bytes)
    grid, block = numbers[7:10], numbers[10:13]
    return Entry(
        kind=Kind(kind), name=_text(raw), ordinal=ordinal, grid=(grid[0], grid[1], grid[2]),
        block=(block[0], block[1], block[2]), shared_bytes=numbers[13], calls=calls, timed=timed, total_ns=total,
        bytes=_sane(size), reachable_bytes=_sane(reachable), blocks_per_processor=numbers[14], processors=numbers[15],
        threads_per_processor=numbers[16], memory_mbps=numbers[17],
        recent_ns=tuple(value for value in recent if math.isfinite(value) and value >= 0),
    )  # fmt: skip


def read_launches(page: Fd, launches: int, count: int) -> list[int]:
    """What the last `count` launches were, oldest first, of so many that there have been; fewer if there are."""
    count = min(count, launches, LAUNCHES)
    first, end = (launches - count) % LAUNCHES, launches % LAUNCHES
    if count == 0:
        return []
    if first < end:
        raw = os.pread(page.fileno(), (end - first) * 4, LAUNCHES_AT + first * 4)
    else:
        raw = os.pread(page.fileno(), (LAUNCHES - first) * 4, LAUNCHES_AT + first * 4)
        raw += os.pread(page.fileno(), end * 4, LAUNCHES_AT)
    return list(struct.unpack(f"<{len(raw) // 4}I", raw))


def read_ticks(page: Fd, ticks: int) -> list[tuple[int, int]]:
    """(launches that there had been, ns), oldest first. Neither ever falls."""
    raw = os.pread(page.fileno(), TICKS * TICK.size, TICKS_AT)
    ring = list(TICK.iter_unpack(raw))
    count = min(ticks, TICKS)
    place = ticks % TICKS
    ordered = ring[:count] if ticks <= TICKS else ring[place:] + ring[:place]
    found: list[tuple[int, int]] = []
    for launches, at in ordered:
        if at <= LONGEST_NS << 8 and (not found or (launches >= found[-1][0] and at >= found[-1][1])):
            found.append((launches, at))
    return found


@dataclass(frozen=True, slots=True)
class TraceHead:
    began: int
    ended: bool
    written: int
    dropped: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    kind: Kind
    name: str
    ordinal: int
    stream: int
    began: int
    took: int
    bytes: int
    sequence: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    replayed: bool


def read_trace_head(page: Fd) -> TraceHead | None:
    """None: nothing is written yet."""
    magic, version, ended, began, written, dropped = TRACE_HEADER.unpack(os.pread(page.fileno(), TRACE_HEADER.size, 0))
    if magic != TRACE_MAGIC or version != VERSION:
        return None
    return TraceHead(began, ended == 1, written, _sane(dropped))


def read_trace(page: Fd) -> Iterator[Event]:
    """In the order in which their ends were seen. Ends at what makes no sense."""
    head = read_trace_head(page)
    if head is None:
        return
    names: dict[int, str] = {}
    for type, piece in _pieces(page, head.written):
        if type == 1 and len(piece) >= NAME.size:
            _, _, number, length = NAME.unpack_from(piece)
            names[number] = _text(piece[NAME.size : NAME.size + length])
        elif type == 2 and len(piece) == EVENT.size:
            _, _, kind, name, ordinal, stream, began, took, size, sequence, *rest = EVENT.unpack(piece)
            if kind not in Kind.__members__.values() or took > LONGEST_NS or began > LONGEST_NS << 8:
                continue
            yield Event(
                kind=Kind(kind), name=names.get(name, Kind(kind).name), ordinal=ordinal, stream=stream, began=began,
                took=took, bytes=_sane(size), sequence=sequence, grid=(rest[0], rest[1], rest[2]),
                block=(rest[3], rest[4], rest[5]), shared_bytes=rest[6], replayed=rest[7] == 1,
            )  # fmt: skip


def _pieces(page: Fd, written: int) -> Iterator[tuple[int, bytes]]:
    size = os.fstat(page.fileno()).st_size
    end = min(PIECES_AT + written, size)
    at, held, held_at = PIECES_AT, b"", PIECES_AT
    while at + PIECE.size <= end:
        if at + 4096 > held_at + len(held):  # no piece is longer
            held, held_at = os.pread(page.fileno(), min(PIECES_READ, end - at), at), at
        offset = at - held_at
        if offset + PIECE.size > len(held):
            return
        type, length = PIECE.unpack_from(held, offset)
        if length < PIECE.size or length % 8 or length > 4096 or at + length > end:
            return
        yield type, held[offset : offset + length]
        at += length


def _text(raw: bytes) -> str:
    text = raw.partition(b"\0")[0].decode(errors="replace")
    return "".join(character if character.isprintable() else "\ufffd" for character in text)


def _sane(value: int) -> int:
    """A number that a program may have made up, as one that everybody can write down."""
    return min(value, LONGEST_NS)


assert (ENTRY.size, EVENT.size) == (512, 88)
