"""How long a process's server or its device had work, from what the server reports of a recovery (header.Stall).

The time in which there was work since the last snapshot is what a replay would take again. It is added up over
snapshots: the words say what it was right before the last one. Only time between two reads is believed: a program can
write into its journal's header. A snapshot that passes unseen between two others is missing: the share is then too
small.
"""

from __future__ import annotations

from xmigd.devices.header import Stall


class Busy:
    """Of one process, since this daemon knows it. All times in ns of CLOCK_MONOTONIC."""

    def __init__(self) -> None:
        self._total = 0
        self._since: int | None = None  # when it was last read
        self._replay = 0  # as it was then

    def snapshot(self, stall: Stall | None, at: int) -> None:
        """One was taken, and the words are those after it."""
        if stall is None:
            return
        before = max(0, stall.peak - stall.constant) * 1000 // max(1, stall.correction)
        self._add(before - self._replay, at)
        self._replay = 0

    def total(self, stall: Stall | None, at: int) -> int | None:
        """None: its server has reported nothing."""
        if stall is None:
            return None
        replay = stall.replay + (max(0, at - stall.reported_at) if stall.working else 0)
        self._add(max(0, replay - self._replay), at)
        self._replay = replay
        return self._total

    def _add(self, time: int, at: int) -> None:
        if self._since is not None:
            self._total += max(0, min(time, at - self._since))
        self._since = at
