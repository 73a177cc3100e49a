"""A plan that was applied goes back by request, and says what has changed so that it cannot."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace
from typing import Any, cast

from tests import harness
from tests.cli.conftest import ctl
from tests.consolidation.conftest import Scatter, begin_apply, device_of, make_plan
from tests.consolidation.test_apply import CUDA_ERROR_INVALID_VALUE, by_process, movable
from tests.migration.moves import ended, moved, refusal, succeeded
from xmigd.cli.exits import Exit
from xmigd.consolidation.plan import Seen
from xmigd.consolidation.undo import obstacles
from xmigd.demo.node import Node, Program
from xmigd.migrations.plan import Place

MIB = 1 << 20


def begin_undo(node: Node, plan: dict[str, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = node.client.post(f"/v1/consolidation-plans/{plan['id']}/undo", {})
    return operation


def undo_is_refused(node: Node, plan: dict[str, Any]) -> dict[str, Any]:
    return refusal(node, f"/v1/consolidation-plans/{plan['id']}/undo", {})


def places(programs: list[Program]) -> dict[str, str]:
    return {process: device_of(program) for process, program in by_process(programs).items()}


def test_all_go_back(node: Node, scatter: Scatter) -> None:
    programs = scatter("cpu:0", "cpu:1", "cpu:2")
    before, plan = places(programs), make_plan(node)
    assert undo_is_refused(node, plan)["code"] == "nothing_to_undo"
    succeeded(node, begin_apply(node, plan))
    assert places(programs) != before
    for program in programs:
        harness.ask(program, 200)
    operation = succeeded(node, begin_undo(node, plan))
    assert operation["result"]["moved"] == len(plan["moves"]) == 2
    assert {part["state"] for part in operation["result"]["parts"]} == {"moved_back"}
    assert not operation["may_cancel"]
    assert places(programs) == before
    assert len({harness.answer(program) for program in programs}) == 1
    again = undo_is_refused(node, plan)
    assert (again["code"], again["status"]) == ("nothing_to_undo", 409)
    for program in programs:
        harness.output(program)


def test_those_that_live_go_back_by_the_command_line(node: Node, scatter: Scatter) -> None:
    programs = scatter("cpu:0", "cpu:1", "cpu:2")
    before, plan = places(programs), make_plan(node)
    succeeded(node, begin_apply(node, plan))
    gone, lives = (by_process(programs)[move["process"]] for move in plan["moves"])
    harness.output(gone)
    harness.wait_until(lambda: gone.until("ended")["state"] == "ended", "it has ended")
    shown = ctl(node, "consolidate", "undo", plan["id"][:12], "--yes")
    assert (shown.returncode, shown.stdout.count("moved back")) == (Exit.OK, 1), shown.stderr
    assert device_of(lives) == before[plan["moves"][1]["process"]]
    assert ctl(node, "consolidate", "undo", plan["id"], "--yes").returncode == Exit.REFUSED
    for program in programs:
        if program is not gone:
            harness.output(program)


def test_what_has_changed_is_named(node: Node, scatter: Scatter) -> None:
    programs = scatter("cpu:0", "cpu:1", "cpu:2")
    plan = make_plan(node)
    succeeded(node, begin_apply(node, plan))
    then = places(programs)
    first = plan["moves"][0]
    tag = node.client.get_tagged(f"/v1/devices/{first['source']}")[1]
    node.client.patch(f"/v1/devices/{first['source']}", {"cordoned": True, "reason": "a fan"}, tag)
    refused = undo_is_refused(node, plan)
    assert (refused["code"], refused["status"]) == ("plan_stale", 409)
    assert f"nothing may come to {first['source']}: it is cordoned: a fan" in refused["detail"]
    tag = node.client.get_tagged(f"/v1/devices/{first['source']}")[1]
    node.client.patch(f"/v1/devices/{first['source']}", {"cordoned": False}, tag)
    assert places(programs) == then

    elsewhere = by_process(programs)[first["process"]]
    moved(elsewhere, plan["moves"][1]["source"])
    assert f"is on {device_of(elsewhere)}, not on {first['target']}" in undo_is_refused(node, plan)["detail"]
    for program in programs:
        harness.output(program)


def test_what_stays_goes_back_the_second_time(node: Node, scatter: Scatter) -> None:
    programs = scatter("cpu:0", "cpu:1", "cpu:2")
    before, plan = places(programs), make_plan(node)
    succeeded(node, begin_apply(node, plan))
    first, second = plan["moves"]
    fails = by_process(programs)[second["process"]]
    harness.wait_until(lambda: bool((fails.info() or {})["shadow_bytes"]), "it has a shadow to import")
    fails.inject("fault", point="import", error=CUDA_ERROR_INVALID_VALUE)
    operation = ended(node, begin_undo(node, plan))
    assert (operation["state"], operation["error"]["code"]) == ("failed", "consolidation_incomplete")
    assert f"{second['process'][:12]} on {second['target']}: " in operation["error"]["detail"]
    there = places(programs)
    assert (there[first["process"]], there[second["process"]]) == (first["source"], second["target"])
    assert succeeded(node, begin_undo(node, plan))["result"]["moved"] == 1
    assert places(programs) == before
    for program in programs:
        harness.output(program)


def test_after_the_daemon_was_killed(node: Node, scatter: Scatter) -> None:
    """The next daemon knows no plan, but what was done. Killed in the middle of an undo, that is undone in a second
    one."""
    programs = scatter("cpu:0", "cpu:1", "cpu:2")
    before, plan = places(programs), make_plan(node)
    succeeded(node, begin_apply(node, plan))
    node.kill()
    node.start()
    harness.wait_until(lambda: movable(node, programs), "all can move again")
    first = plan["moves"][0]  # the last to go back
    server = int(by_process(programs)[first["process"]].until("running")["server_pid"])
    harness.stop(server)
    operation = begin_undo(node, plan)
    harness.wait_until(lambda: moved_back(node, operation) == 1, "one is back")
    node.kill()
    os.kill(server, signal.SIGCONT)
    node.start()
    operation = ended(node, operation)
    states = {part["process"]: part["state"] for part in operation["result"]["parts"]}
    assert states[plan["moves"][1]["process"]] == "not_moved"  # from where it is again
    harness.wait_until(lambda: movable(node, programs), "all can move again")
    if operation["state"] == "failed":
        assert (operation["error"]["code"], states[first["process"]]) == ("interrupted", "moved")
        assert succeeded(node, begin_undo(node, plan))["result"]["moved"] == 1
    assert places(programs) == before
    assert len({harness.steps(program, 50) for program in programs}) == 1
    for program in programs:
        harness.output(program)


def moved_back(node: Node, operation: dict[str, Any]) -> int:
    progress = node.client.get(f"/v1/operations/{operation['id']}")["progress"] or {}
    return sum(part["state"] == "moved_back" for part in progress.get("parts", []))


def seen(free: dict[str, int], at: dict[str, tuple[str, int]]) -> Seen:
    """Devices with so many MiB free, processes on one each with so many MiB."""
    processes = {
        name: SimpleNamespace(row=SimpleNamespace(device=device), job=SimpleNamespace(name=f"job of {name}"))
        for name, (device, _) in at.items()
    }
    return Seen(
        places={
            name: cast(Place, SimpleNamespace(id=name, configured=True, cordoned=False, healthy=True,
                                              free_bytes=mib * MIB))
            for name, mib in free.items()
        },
        processes=cast(Any, processes), busy={}, step_ms={}, remaining={}, why_not=dict.fromkeys(at),
        held={name: {device: mib * MIB} for name, (device, mib) in at.items()},
    )  # fmt: skip


def part(process: str, source: str, target: str) -> dict[str, Any]:
    return {"process": process, "job": "j", "job_name": f"job of {process}", "source": source, "target": target}


class TestRoom:
    def test_who_came_meanwhile_may_leave_none(self) -> None:
        parts = [part("a", "cpu:0", "cpu:1")]
        assert obstacles(parts, seen({"cpu:0": 60, "cpu:1": 0}, {"a": ("cpu:1", 50), "new": ("cpu:0", 40)})) == []
        (why,) = obstacles(parts, seen({"cpu:0": 40, "cpu:1": 0}, {"a": ("cpu:1", 50), "new": ("cpu:0", 60)}))
        assert why == "cpu:0 has no room any more for process a of job job of a: it needs 50 MiB, and 40 MiB are left"

    def test_who_leaves_first_makes_room(self) -> None:
        """a went to cpu:1 first, then b to where a had been: b goes back first."""
        parts = [part("a", "cpu:0", "cpu:1"), part("b", "cpu:2", "cpu:0")]
        there = {"a": ("cpu:1", 50), "b": ("cpu:0", 50)}
        assert obstacles(parts, seen({"cpu:0": 10, "cpu:1": 10, "cpu:2": 50}, there)) == []
        assert obstacles(list(reversed(parts)), seen({"cpu:0": 10, "cpu:1": 10, "cpu:2": 50}, there)) != []

    def test_a_device_that_is_lost(self) -> None:
        (why,) = obstacles([part("a", "cpu:0", "cpu:1")], seen({"cpu:1": 50}, {"a": ("cpu:1", 50)}))
        assert why == "nothing may come to cpu:0: the node does not have it any more"
