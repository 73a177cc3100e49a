"""A job of several ranks moves whole or not at all."""

from __future__ import annotations

from pathlib import Path

from tests import harness
from tests.collectives.conftest import Launch, enough, launch, lines_of
from tests.collectives.test_steps import DONE, RANKS, begun, ranks_of
from tests.consolidation.conftest import Scatter, begin_apply, make_plan
from tests.migration.moves import succeeded
from xmigd.demo.node import Node

__all__ = ["launch"]


def test_ranks_are_packed_together(node: Node, launch: Launch, scatter: Scatter, tmp_path: Path) -> None:
    program = launch("steps", RANKS, 0)
    begun(tmp_path)
    alone = scatter("cpu:2")[0]
    harness.wait_until(lambda: len(ranks_of(node, program)) == RANKS, "the daemon has written all down")
    assert len({one["device"] for one in ranks_of(node, program)}) > 1

    # One that cannot move keeps all where they are.
    paused = ranks_of(node, program)[1]["id"]
    node.client.post(f"/v1/processes/{paused}:pause", {})
    plan = make_plan(node)
    refused = {one["process"]: one["code"] for one in plan["refusals"]}
    assert refused == {one["id"]: "paused" if one["id"] == paused else "job_stays" for one in ranks_of(node, program)}
    assert {move["job_id"] for move in plan["moves"]} <= {alone.job}
    node.client.post(f"/v1/processes/{paused}:continue", {})

    plan = make_plan(node, max_slow_down=100, jobs=[program.job])
    assert plan["moves"], plan
    operation = succeeded(node, begin_apply(node, plan))
    assert operation["result"]["moved"] == len(plan["moves"])
    assert {one["device"] for one in ranks_of(node, program)} == {device["device"] for device in plan["after"]} - {
        *plan["freed"]
    }
    enough(tmp_path)
    assert lines_of(program, timeout=60) == DONE
    assert all(one["recoveries"] == 0 for one in ranks_of(node, program))
    harness.output(alone)
