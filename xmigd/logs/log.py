"""Lines on their way into the job's log: who reported them, how many there may be, when they are collected.

Invariants:
  Text of programs and servers is made harmless before it is kept.
  One user's programs write no more lines than their share, however they do it; what is left out is counted, and the
  count becomes a line as soon as there is room for one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from xmigd.logs.notices import Notices
from xmigd.native import Layout
from xmigd.records import JobRow, LogLevel, LogLine, LogSource, Records
from xmigd.text import harmless

BURST = 200  # lines that a user may have at once
RATE = 10.0  # and a second
EARLIEST, LATEST = 3600.0, 5.0  # seconds around now that a program's own time of a line may differ


@dataclass(slots=True)
class Share:
    """Of one user."""

    tokens: float
    at: float
    left_out: int = 0

    def take(self, now: float) -> bool:
        self.tokens = min(BURST, self.tokens + (now - self.at) * RATE)
        self.at = now
        if self.tokens < 1:
            self.left_out += 1
            return False
        self.tokens -= 1
        return True


class JobLog:
    def __init__(self, records: Records, layout: Layout, clock: Callable[[], float] = time.monotonic) -> None:
        self._records = records
        self._layout = layout
        self._clock = clock
        self._shares: dict[int, Share] = {}
        self._rings: dict[str, tuple[int, Notices]] = {}  # by process: the journal's descriptor, what reads it

    def line(
        self, job: JobRow, text: str, *, source: LogSource, level: LogLevel = "info", process: str | None = None,
        at: float | None = None,
    ) -> None:  # fmt: skip
        """One line, as far as its owner's share goes. Never fails."""
        share = self._share(job.uid)
        if not share.take(self._clock()):
            return
        if share.left_out:
            count, share.left_out = share.left_out, 0
            why = f"{count} lines were left out: more than {RATE:g} a second from one user's programs"
            self._write(job, why, "xmigd", "warning", process, time.time())
        self._write(job, text, source, level, process, time.time() if at is None else at)

    def collect(self, job: JobRow, process: str, journal: int) -> None:
        """What the process's shim has reported since the last time. `journal`: the descriptor of its journal."""
        known = self._rings.get(process)
        if known is None or known[0] != journal:
            known = self._rings[process] = (journal, Notices(self._layout, journal))
        taken = known[1].take()
        if taken is None:
            return
        now = time.time()
        for reported_at, text in taken.lines:
            at = reported_at if now - EARLIEST <= reported_at <= now + LATEST else now
            self.line(job, text, source="program", process=process, at=at)
        if taken.dropped:
            self._share(job.uid).left_out += taken.dropped

    def over(self, process: str) -> None:
        """Its journal is closed."""
        self._rings.pop(process, None)

    def _share(self, uid: int) -> Share:
        share = self._shares.get(uid)
        if share is None:
            share = self._shares[uid] = Share(BURST, self._clock())
        return share

    def _write(
        self, job: JobRow, text: str, source: LogSource, level: LogLevel, process: str | None, at: float
    ) -> None:
        line = LogLine(job=job.id, process=process, at=at, source=source, level=level, text=harmless(text))
        self._records.log_line(line)
