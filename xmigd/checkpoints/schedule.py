"""When the next checkpoint of a job is due by its policy. No I/O: moments in, a moment out. All are Unix seconds."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_RETRY = 60.0  # seconds after a failure; twice as many after each further one


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    every_minutes: float | None  # None: none by the clock
    keep: int
    before_drain: bool
    keep_bits: int | None = None  # None: they are exact

    @property
    def every(self) -> float | None:
        """Seconds."""
        return None if self.every_minutes is None else 60 * self.every_minutes


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """Those since the last checkpoint that succeeded."""

    count: int
    at: float  # of the last one
    why: str


def due_at(policy: Policy, since: float, failures: Failures | None) -> float | None:
    """`since`: when its newest checkpoint was made, whoever requested that; or, if there is none, when the job began or
    got its policy. None: none is due."""
    every = policy.every
    if every is None:
        return None
    due = since + every
    if failures is None:
        return due
    # Sooner than the next regular one, because the job is without it; but ever less often, because each attempt may
    # stop the job.
    return max(due, failures.at + min(every, FIRST_RETRY * 2.0 ** min(failures.count - 1, 30)))
