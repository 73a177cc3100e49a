"""When checkpoints are due by a policy."""

from __future__ import annotations

from xmigd.checkpoints.schedule import FIRST_RETRY, Failures, Policy, due_at

HOURLY = Policy(every_minutes=60, keep=3, before_drain=False)


def after(count: int, at: float = 4000.0) -> float | None:
    return due_at(HOURLY, 400.0, Failures(count=count, at=at, why="x"))


def test_by_the_clock_only_if_the_policy_wants_it() -> None:
    assert due_at(HOURLY, 400.0, None) == 4000
    assert due_at(Policy(every_minutes=None, keep=3, before_drain=True), 400.0, None) is None


def test_failures_are_tried_again_ever_less_often() -> None:
    waits = [(after(count) or 0) - 4000 for count in range(1, 9)]
    assert waits[:3] == [FIRST_RETRY, 2 * FIRST_RETRY, 4 * FIRST_RETRY]
    assert waits == sorted(waits)
    assert waits[-1] == 3600  # never less often than by the clock
    assert after(10_000) == 7600


def test_a_failure_before_its_time_does_not_hurry_the_next_one() -> None:
    """One that a drain requested."""
    assert after(1, at=500.0) == 4000
