"""After the moves: a job that gets slower than was promised goes back, and its owner can read why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.consolidation.conftest import begin_apply, device_of, make_plan
from tests.migration.moves import reaches, succeeded
from xmigd.consolidation.guard import Rate, judge
from xmigd.demo.node import Node, Program

GROWING = Path(__file__).parent / "programs" / "growing.py"
GUARD = 2.0  # seconds
ANY, PROMISED = 100.0, 5.0  # times: no machine is so busy, and what the program makes of it


def measured(node: Node) -> bool:
    plan = make_plan(node, solver_seconds=0)
    return all(one["busy_share"] is not None for device in plan["before"] for one in device["processes"])


def growing(node: Node, kernels: Path, device: str) -> Program:
    program = harness.start(node, GROWING, kernels=kernels, device=device)
    harness.go(program)
    return program


def test_a_job_that_gets_slower_goes_back(node: Node, kernels: Path) -> None:
    programs = {device: growing(node, kernels, device) for device in ("cpu:0", "cpu:1")}
    harness.wait_until(lambda: measured(node), "busy shares are known")
    plan = make_plan(node, max_slow_down=ANY)
    assert all(job["predicted_slow_down"] >= 1 for job in plan["jobs"])
    (move,) = plan["moves"]
    assert move["expected_downtime_ms"] is not None
    moved = programs[move["source"]]

    result = succeeded(node, begin_apply(node, plan, GUARD))["result"]
    assert result["guard"]["undone"] == []
    assert {one["why"] for one in result["guard"]["processes"]} == {""}
    assert all(one["slow_down"] is not None for one in result["guard"]["processes"])
    assert device_of(moved) == move["target"]

    succeeded(node, node.client.post("/v1/migrations", {"process": move["process"], "target": move["source"]}))
    plan = make_plan(node, max_slow_down=PROMISED, jobs=[move["job_id"]])
    operation = begin_apply(node, plan, GUARD)
    assert reaches(node, operation, "watching")["phase"] == "watching"
    assert moved.process.stdin is not None
    moved.process.stdin.write("more\n")
    moved.process.stdin.flush()
    result = succeeded(node, operation)["result"]
    assert result["guard"]["undone"] == [move["job_id"]], result
    assert [part["state"] for part in result["parts"]] == ["moved_back"]
    assert device_of(moved) == move["source"]
    event = undone(node)
    assert event["job_id"] == move["job_id"]
    assert event["data"]["slow_down"] > PROMISED
    for program in programs.values():
        harness.output(program)


def undone(node: Node) -> dict[str, Any]:
    for event in node.client.events(after=0):
        if event["event"] == "consolidation.undone":
            return dict(event["data"])
    raise AssertionError("there is no such event")


def rate(records: int, busy: float | None, seconds: float = 10, *, step_ms: float | None = None) -> Rate:
    return Rate(seconds=seconds, records=records, busy_s=busy, step_ms=step_ms)


@pytest.mark.parametrize(
    ("before", "after", "slower"),
    [
        (rate(1000, 5), rate(1000, 5), False),
        (rate(1000, 5), rate(500, 7.5), True),  # half as fast, each record takes three times the work
        (rate(1000, 5), rate(500, 2.5), False),  # it has less to do
        (rate(1000, 5), rate(1100, 10), False),  # it does more
        (rate(1000, None), rate(500, 5), False),
        (rate(1000, 5), rate(3, 5), False),  # too few to judge
        # By steps: half as fast, and each takes more work, whatever its records say
        (rate(1000, 5, step_ms=10), rate(1000, 9, step_ms=20), True),
        (rate(1000, 5, step_ms=10), rate(500, 2.5, step_ms=20), False),  # it waits
        (rate(1000, 5, step_ms=10), rate(300, 9, step_ms=10.5), False),  # larger work per call
        (rate(1000, None, step_ms=10), rate(1000, None, step_ms=20), True),
        (rate(1000, 5, step_ms=10), rate(500, 7.5), True),  # not known afterwards: by calls
        (None, rate(500, 5), False),
        (rate(1000, 5), None, False),
    ],
)
def test_what_is_slower(before: Rate | None, after: Rate | None, slower: bool) -> None:
    verdict = judge("process", "job", before, after, 1.25)
    assert verdict.slower is slower
    assert (verdict.slow_down is None) == bool(verdict.why)
