"""Recoveries of single ranks, put together to those of all."""

from __future__ import annotations

from typing import Any

from xmigd.ranks.together import outcome, together


def row(number: int, process: str, at: float, resumed_ms: float | None, how: str = "resumed") -> dict[str, Any]:
    return {
        "id": number, "process_id": process, "at": at, "outcome": how, "detected_ms": 1.0, "standby_ready_ms": 4.0,
        "mapped_ms": None, "restored_ms": None, "replayed_ms": None, "resumed_ms": resumed_ms,
    }  # fmt: skip


def numbers(rows: list[dict[str, Any]], recovering: set[str] | None = None) -> list[list[int]]:
    return [[one["id"] for one in group] for group in together(rows, recovering or set())]


def test_what_overlaps_is_one() -> None:
    rows = [row(1, "a", 10.0, 50.0), row(2, "b", 10.02, 40.0), row(3, "a", 11.0, 20.0), row(4, "b", 11.01, 15.0)]
    assert numbers(rows[::-1]) == [[3, 4], [1, 2]]


def test_one_that_is_lost_again_before_all_run() -> None:
    """The second loss of `a` falls into the recovery that `b` still is in."""
    rows = [row(1, "a", 10.0, 50.0), row(2, "b", 10.01, 900.0), row(3, "a", 10.5, 100.0)]
    assert numbers(rows) == [[1, 2, 3]]


def test_one_that_is_under_way_is_not_over() -> None:
    rows = [row(1, "a", 10.0, None, "running"), row(2, "b", 10.5, None, "running")]
    assert numbers(rows, {"a", "b"}) == [[1, 2]]
    assert numbers(rows) == [[2], [1]]  # an earlier daemon has left them


def test_the_outcome_is_the_worst() -> None:
    assert outcome([row(1, "a", 0.0, 1.0), row(2, "b", 0.0, None, "lost")]) == "lost"
    assert outcome([row(1, "a", 0.0, 1.0), row(2, "b", 0.0, None, "running")]) == "running"
    assert outcome([row(1, "a", 0.0, 1.0), row(2, "b", 0.0, None, "abandoned")]) == "resumed"
