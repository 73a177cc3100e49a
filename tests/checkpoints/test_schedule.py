"""When checkpoints are due by a policy."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from xmigd.checkpoints.policies import CheckpointPolicies
from xmigd.checkpoints.schedule import FIRST_RETRY, Failures, Policy, due_at
from xmigd.checkpoints.service import CREATE

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


@pytest.mark.parametrize("phase", ["storing", "waiting"])
def test_a_drain_does_not_wait_for_other_nodes(phase: str) -> None:
    """A checkpoint that is being made is the one; a part that waits for the node that leads may wait for ever."""
    row = SimpleNamespace(kind=CREATE, subject_id="j", phase=phase)
    done: list[str] = []

    async def ended(row: object) -> object:
        done.append("waited")
        return SimpleNamespace(state="succeeded")

    async def make(job: str, why: str, due: float | None) -> None:
        done.append("made")

    policies: Any = SimpleNamespace(
        _of=lambda job: SimpleNamespace(before_drain=True), _make=make,
        _operations=SimpleNamespace(active=lambda: [row], ended=ended),
    )  # fmt: skip
    process: Any = SimpleNamespace(job=SimpleNamespace(id="j"))
    asyncio.run(CheckpointPolicies.before_drain(policies, [process]))
    assert done == (["made"] if phase == "waiting" else ["waited"])
