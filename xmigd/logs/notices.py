"""The shim's lines, out of the memory that it shares with the daemon (shim/journal/layout.h: Notice).

The program can write anything there at any time: numbers are only compared, and no more is read than there are slots.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, field

from xmigd.native import Layout

COUNTS = struct.Struct("=QQ")  # posted, dropped
TAKEN = struct.Struct("=Q")
HEAD = struct.Struct("=QII")  # unix_ns, bytes, reserved
SLOT = 1024
TAKEN_AT = 64  # from the beginning
SLOTS_AT = 72
MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Taken:
    lines: list[tuple[float, str]] = field(default_factory=list)  # Unix seconds, text
    dropped: int = 0  # the shim had no room for so many more


class Notices:
    """Of one journal."""

    def __init__(self, layout: Layout, journal: int) -> None:
        """`journal`: the descriptor. Lines that an earlier daemon has not taken are still to come."""
        self._at, self._slots, self._journal = layout.notices_at, layout.notices, journal
        posted, self._dropped = COUNTS.unpack(os.pread(journal, COUNTS.size, self._at))
        (taken,) = TAKEN.unpack(os.pread(journal, TAKEN.size, self._at + TAKEN_AT))
        waiting = (posted - taken) & MASK
        self._taken = (posted - waiting if waiting <= self._slots else posted) & MASK

    def take(self) -> Taken | None:
        """What has come since; None: nothing."""
        posted, dropped = COUNTS.unpack(os.pread(self._journal, COUNTS.size, self._at))
        if posted == self._taken and dropped == self._dropped:
            return None
        waiting = (posted - self._taken) & MASK
        missed = (dropped - self._dropped) & MASK
        first = self._taken
        if waiting > self._slots:  # it has counted without waiting for room, which the shim does not do
            first, missed = (posted - self._slots) & MASK, missed + waiting - self._slots
        count = (posted - first) & MASK
        lines = [self._line((first + i) & MASK) for i in range(count)]
        self._taken, self._dropped = posted, dropped
        os.pwrite(self._journal, TAKEN.pack(posted), self._at + TAKEN_AT)
        return Taken(lines, min(missed, 1 << 31))

    def _line(self, number: int) -> tuple[float, str]:
        slot = os.pread(self._journal, SLOT, self._at + SLOTS_AT + number % self._slots * SLOT)
        unix_ns, size, _ = HEAD.unpack_from(slot)
        text = slot[HEAD.size : HEAD.size + min(size, SLOT - HEAD.size)]
        return unix_ns / 1e9, text.decode(errors="replace")
