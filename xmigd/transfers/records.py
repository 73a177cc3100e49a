"""A transfer among the migrations that both nodes list: written once, when it is over. What is under way, and decides,
is in the table of transfers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy.orm import Session

from xmigd.errors import Cancelled, XmigError
from xmigd.ids import new_id
from xmigd.migrations import repository
from xmigd.process.migration_events import Iteration, MigrationRecord, Phase, PhaseTime
from xmigd.supervisor.process import Process

Write = Callable[[Session], None]


class Record:
    """At the node that it leaves: of all processes of the job, with the first of them."""

    def __init__(self, processes: Sequence[Process], source: str, target: str, operation: str) -> None:
        first = processes[0].row
        self._record = MigrationRecord(
            id=new_id(), kind="move", process=first.id, operation=operation, source=source,
            target=target[:64], started=time.monotonic_ns(), device=first.device,
        )  # fmt: skip
        self.copied = 0  # bytes that were sent

    @property
    def rounds(self) -> int:
        return len(self._record.iterations)

    def phase(self, name: Phase) -> None:
        record = self._record
        if record.phase != name:
            record.phase = name
            record.phases.append(PhaseTime(name, time.monotonic_ns()))

    def round(self, copied: int, total: int, ms: float) -> None:
        """`total`: bytes that the program had. What changes meanwhile is not known before the next round."""
        self._record.iterations.append(Iteration(self.rounds + 1, copied, 0, ms, 0.0))
        self._record.total_bytes = total
        self.copied += copied

    def is_small(self, small: int, shrinks: float) -> bool:
        """Would another round ahead be of no use?"""
        seen = [each.copied_bytes for each in self._record.iterations]
        if not seen:
            return False
        return seen[-1] <= small or (len(seen) > 1 and seen[-1] > shrinks * seen[-2])

    def iterations(self) -> list[dict[str, Any]]:
        return [
            {"n": each.number, "copied_bytes": each.copied_bytes, "ms": round(each.ms, 3)}
            for each in self._record.iterations
        ]

    def done(self, device: str, standstill: float | None) -> Write:
        record = self._record
        record.target = f"{record.target.partition('/')[0]}/{device}"[:64]
        record.downtime_ms = standstill
        return self._over("done")

    def failed(self, error: Exception) -> Write:
        if isinstance(error, XmigError):
            self._record.code, self._record.error = error.code, error.message
        else:
            self._record.code, self._record.error = "internal", "it failed inside xmigd; its log says why"
        return self._over("cancelled" if isinstance(error, Cancelled) else "failed")

    def _over(self, state: Any) -> Write:
        record = self._record
        record.ended, record.state, record.processed_bytes = time.monotonic_ns(), state, self.copied
        record.phase = "over"
        seconds = sum(each.ms for each in record.iterations) / 1e3
        record.bytes_per_s = self.copied / seconds if seconds > 0 else None
        return repository.saving(record)


def arrived(row: dict[str, Any], device: str) -> Write:
    """At the node to which it has come."""
    now = time.monotonic_ns()
    record = MigrationRecord(
        id=new_id(), kind="move", process=row["process_id"], source=row["source"], target=device,
        started=now - max(0, int((time.time() - row["created_at"]) * 1e9)), ended=now, state="done", phase="over",
        device=device,
    )  # fmt: skip
    return repository.saving(record)
