"""The few words of a journal's header that the daemon reads or writes (shim/journal/layout.h).

The journal is shared with its program, which may write anything there: numbers are only shown, and what a device is
called is read before the program has the journal.
"""

from __future__ import annotations

import os
import struct
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

MAGIC = 0x314C4E4A47494D58
VERSIONS = (1, 2, 3)  # in which these words are the same: a program may have been started before an upgrade
_START = struct.Struct("<QIIQ")
_DEVICES_AT = 48
_DESCRIPTION = struct.Struct("<128s16sQ")
_DESCRIPTION_BYTES = 800
_MAX_DEVICES = 8
_CLIENT_AT = -(-(_DEVICES_AT + _MAX_DEVICES * _DESCRIPTION_BYTES) // 64) * 64  # tail, next_sequence
_TRIMMED_AT = _CLIENT_AT + 128
_SNAPSHOT_AT = _CLIENT_AT + 320
_TWO = struct.Struct("<QQ")
_STALL = struct.Struct("<9Q")
_MOST = 1 << 62  # ns, a century and a half


@dataclass(frozen=True, slots=True)
class Description:
    """A device as its programs see it."""

    name: str
    uuid: str
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Counters:
    records: int  # that the program has appended
    used_bytes: int  # of the ring


@dataclass(frozen=True, slots=True)
class Stall:
    """What a recovery would take, as the server knows it. Times in ns, moments of CLOCK_MONOTONIC."""

    reported_at: int
    working: bool  # since then: the replay grows with time
    replay: int
    correction: int  # of the replay, in thousandths
    constant: int
    bound: int
    peak: int  # what was expected right before the last snapshot
    spent: int  # on snapshots, since the job began

    def expected(self, at: int) -> int:
        """If the server dies, or died, at this moment."""
        grown = max(0, at - self.reported_at) if self.working else 0
        return min(self.constant + (self.replay + grown) * self.correction // 1000, _MOST)


def _is_journal(fd: int) -> tuple[int, int] | None:
    """Devices, and bytes of the ring."""
    start = os.pread(fd, _START.size, 0)
    if len(start) < _START.size:
        return None
    magic, version, devices, ring = _START.unpack(start)
    return (min(devices, _MAX_DEVICES), ring) if magic == MAGIC and version in VERSIONS else None


def _word(fd: int, offset: int) -> int:
    data = os.pread(fd, 8, offset)
    return int.from_bytes(data, "little") if len(data) == 8 else 0


def descriptions(fd: int) -> list[Description]:
    """The devices of the journal, once a server has filled it in."""
    found = _is_journal(fd)
    if found is None:
        return []
    listed = []
    for place in range(found[0]):
        data = os.pread(fd, _DESCRIPTION.size, _DEVICES_AT + place * _DESCRIPTION_BYTES)
        name, identity, total = _DESCRIPTION.unpack(data)
        text = name.split(b"\0", 1)[0].decode("utf-8", "replace")
        printable = "".join(each if each.isprintable() else "?" for each in text)
        listed.append(Description(printable, str(uuid.UUID(bytes=identity)), total))
    return listed


def counters(fd: int) -> Counters | None:
    """Where the journal is. None: it is none."""
    found = _is_journal(fd)
    if found is None:
        return None
    tail, next_sequence = _TWO.unpack(os.pread(fd, _TWO.size, _CLIENT_AT))
    trimmed = _word(fd, _TRIMMED_AT)
    return Counters(records=next_sequence, used_bytes=max(0, min(tail - trimmed, found[1])))


def snapshot(fd: int) -> int:
    """Changes with every snapshot that is taken. 0: there is none yet, or it is no journal."""
    return 0 if _is_journal(fd) is None else _word(fd, _SNAPSHOT_AT)


def rounds(fd: int, offset: int) -> tuple[int, int]:
    """Of group snapshots: the last that was prepared, and the last that was decided. 0: none."""
    if offset == 0 or _is_journal(fd) is None:
        return 0, 0
    data = os.pread(fd, _TWO.size, offset)
    if len(data) < _TWO.size:
        return 0, 0
    prepared, decided = _TWO.unpack(data)
    return (prepared if prepared < 1 << 63 else 0), (decided if decided < 1 << 63 else 0)


def forsaken(fd: int, offset: int) -> bool:
    """Was its last snapshot taken without the other ranks of its group, so that it fits none of theirs?"""
    if offset == 0 or _is_journal(fd) is None:
        return False
    return any(os.pread(fd, 8, offset + _TWO.size))


def renewed(fd: int, offset: int) -> int:
    """The last round at which a rank of its group left its server for another. 0: none."""
    return 0 if offset == 0 or _is_journal(fd) is None else _word(fd, offset + _TWO.size + 8)


def suspended(fd: int, offset: int) -> int:
    """The round at which it was suspended with the other ranks of its group. 0: it is not, or it was alone."""
    return 0 if offset == 0 or _is_journal(fd) is None else _word(fd, offset + _TWO.size + 16)


def devices_open(fd: int, offset: int) -> int:
    """The devices that its program uses, by ordinal, a bit each. 0: none, or it is not known."""
    known = offset != 0 and _is_journal(fd) is not None
    return _word(fd, offset) & ((1 << _MAX_DEVICES) - 1) if known else 0


def count_standby_bytes(fd: int, offset: int, counted: Sequence[int]) -> None:
    """By ordinal, what the program may count as free though communicators take it that were made ahead."""
    if offset != 0 and _is_journal(fd) is not None:
        os.pwrite(fd, struct.pack(f"<{_MAX_DEVICES}Q", *[*counted, *[0] * _MAX_DEVICES][:_MAX_DEVICES]), offset)


def stall(fd: int, offset: int) -> Stall | None:
    """What the server tells of a recovery. None: it tells nothing, or nothing that could be."""
    if offset == 0 or _is_journal(fd) is None:
        return None
    data = os.pread(fd, _STALL.size, offset)
    if len(data) < _STALL.size:
        return None
    reported_at, working, replay, correction, constant, bound, peak, spent, _ = _STALL.unpack(data)
    if reported_at == 0 or max(reported_at, replay, constant, bound, peak, spent) > _MOST or correction > 1_000_000:
        return None
    return Stall(reported_at, working == 1, replay, correction, constant, bound, peak, spent)
