"""Plans with real servers on cpu devices: programs are packed while they work, and nothing of it is seen in results."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any

import pytest

from tests import harness
from tests.consolidation.conftest import Scatter, begin_apply, device_of, make_plan, make_spread
from tests.migration.moves import ended, reaches, refusal, succeeded
from xmigd.client import Refused
from xmigd.demo.node import Node, Program

CUDA_ERROR_INVALID_VALUE = 1


def by_process(programs: list[Program]) -> dict[str, Program]:
    return {str(program.until("running")["id"]): program for program in programs}


def apply_is_refused(node: Node, plan: dict[str, Any]) -> dict[str, Any]:
    return refusal(node, f"/v1/consolidation-plans/{plan['id']}/apply", {})


def test_programs_are_packed_and_spread_again(node: Node, scatter: Scatter) -> None:
    quiet = scatter("cpu:0")[0]
    expected = [harness.steps(quiet, 200), harness.steps(quiet, 50)]
    harness.output(quiet)
    programs = scatter("cpu:0", "cpu:1", "cpu:2")
    plan = make_plan(node)
    assert len(plan["freed"]) == 2
    assert {device["device"] for device in plan["after"] if device["processes"]} == {"cpu:0", "cpu:1", "cpu:2"} - {
        *plan["freed"]
    }
    assert all(job["predicted_slow_down"] is None for job in plan["jobs"])  # unknown, not none
    assert plan["refusals"] == []
    for program in programs:
        harness.ask(program, 200)
    operation = succeeded(node, begin_apply(node, plan))
    assert operation["result"]["moved"] == len(plan["moves"])
    assert operation["result"]["freed"] == plan["freed"]
    assert [harness.answer(program) for program in programs] == expected[:1] * 3
    assert len({device_of(program) for program in programs}) == 1
    assert apply_is_refused(node, plan)["code"] == "plan_stale"

    # And out again: with equal loads, one on each.
    succeeded(node, begin_apply(node, make_spread(node, programs)))
    assert {device_of(program) for program in programs} == {"cpu:0", "cpu:1", "cpu:2"}
    assert [harness.steps(program, 50) for program in programs] == expected[1:] * 3
    for program in programs:
        harness.output(program)


@pytest.mark.parametrize(
    ("ids", "whose"),
    [(("slurm:4711", "slurm:4712"), "Slurm's job"), (("k8s:a/b/1-2", "k8s:a/c/1-3"), "Kubernetes' pod a/")],
)
def test_jobs_stay_in_their_allocation(node: Node, scatter: Scatter, ids: tuple[str, str], whose: str) -> None:
    """Whoever is given the other device by their scheduler would share it with them. Also if that is known only after
    the plan was made."""
    programs = scatter("cpu:0", "cpu:1")
    before = [device_of(program) for program in programs]
    plan = make_plan(node)
    assert len(plan["moves"]) == 1
    for id, program in zip(ids, programs, strict=True):
        tag = node.client.get_tagged(f"/v1/jobs/{program.job}")[1]
        node.client.patch(f"/v1/jobs/{program.job}", {"external_id": id}, tag)
    refused = apply_is_refused(node, plan)
    assert refused["code"] == "plan_stale"
    assert whose in refused["detail"]
    again = make_plan(node)
    assert again["moves"] == []
    assert [(each["code"], each["device"]) for each in again["refusals"]] == [
        ("scheduled", "cpu:0"),
        ("scheduled", "cpu:1"),
    ]
    tag = node.client.get_tagged(f"/v1/jobs/{programs[0].job}")[1]
    node.client.patch(f"/v1/jobs/{programs[0].job}", {"external_id": "queue:1"}, tag)
    (move,) = make_plan(node)["moves"]
    assert (move["source"], move["target"]) == ("cpu:0", "cpu:1")
    assert [device_of(program) for program in programs] == before
    for program in programs:
        harness.output(program)


def test_a_plan_of_another_node_than_this_is_stale(node: Node, scatter: Scatter) -> None:
    programs = scatter("cpu:0", "cpu:1", "cpu:2")
    plan = make_plan(node)
    harness.output(programs[1])
    harness.wait_until(lambda: programs[1].until("ended")["state"] == "ended", "it has ended")
    refused = apply_is_refused(node, plan)
    assert (refused["code"], refused["status"]) == ("plan_stale", 409)
    assert "ended" in refused["detail"] or "left" in refused["detail"]

    plan = make_plan(node)
    target = plan["moves"][0]["target"]
    newcomer = scatter(target)[0]
    assert f"has come to {target}" in apply_is_refused(node, plan)["detail"]

    plan = make_plan(node, jobs=[plan["moves"][0]["job_id"]])
    tag = node.client.get_tagged(f"/v1/devices/{target}")[1]
    node.client.patch(f"/v1/devices/{target}", {"cordoned": True, "reason": "a fan"}, tag)
    assert "it is cordoned: a fan" in apply_is_refused(node, plan)["detail"]
    for program in (programs[0], programs[2], newcomer):
        harness.output(program)


def test_what_was_moved_goes_back_when_a_move_fails(node: Node, scatter: Scatter) -> None:
    programs = scatter("cpu:0", "cpu:1", "cpu:2")
    plan = make_plan(node)
    before = {process: device_of(program) for process, program in by_process(programs).items()}
    first, second = plan["moves"]
    fails = by_process(programs)[second["process"]]
    harness.wait_until(lambda: bool((fails.info() or {})["shadow_bytes"]), "it has a shadow to import")
    fails.inject("fault", point="import", error=CUDA_ERROR_INVALID_VALUE)
    operation = ended(node, begin_apply(node, plan))
    assert operation["error"]["code"] == "consolidation_failed", operation
    assert "CUDA error 1" in operation["error"]["detail"]
    states = {part["process"]: part["state"] for part in operation["progress"]["parts"]}
    assert states == {first["process"]: "moved_back", second["process"]: "failed"}
    assert {process: device_of(program) for process, program in by_process(programs).items()} == before
    assert len({harness.steps(program, 50) for program in programs}) == 1
    for program in programs:
        harness.output(program)


def test_cancelled_between_moves_it_goes_back(node: Node, scatter: Scatter) -> None:
    programs = scatter("cpu:0", "cpu:1", "cpu:2")
    plan = make_plan(node)
    before = {process: device_of(program) for process, program in by_process(programs).items()}
    server = int(by_process(programs)[plan["moves"][1]["process"]].until("running")["server_pid"])
    harness.stop(server)  # it hands over nothing: the second move lasts until it is cancelled
    try:
        operation = begin_apply(node, plan)
        harness.wait_until(lambda: done(node, operation) == 1, "the first move is done")
        node.client.delete(f"/v1/operations/{operation['id']}")
    finally:
        os.kill(server, signal.SIGCONT)
    assert ended(node, operation)["state"] == "cancelled"
    assert {process: device_of(program) for process, program in by_process(programs).items()} == before

    # Also when all are moved, and watched.
    operation = begin_apply(node, make_plan(node), guard_seconds=600)
    assert reaches(node, operation, "watching")["progress"]["done"] == 2
    node.client.delete(f"/v1/operations/{operation['id']}")
    assert ended(node, operation)["state"] == "cancelled"
    assert {process: device_of(program) for process, program in by_process(programs).items()} == before
    for program in programs:
        harness.output(program)


def test_the_daemon_is_killed_at_any_moment(node: Node, scatter: Scatter) -> None:
    """Packed and spread in turn. Where the operation says that a process is, it is; it has come there by one move."""
    chance = random.Random(11)
    programs = scatter("cpu:0", "cpu:1", "cpu:2")
    for number in range(4):
        harness.wait_until(lambda: movable(node, programs), "all can move")
        scattered = len({device_of(program) for program in programs}) > 1
        plan = make_plan(node, assumed_busy_share=0.05) if scattered else make_spread(node, programs, 0.05)
        before = migrations(node)
        operation = begin_apply(node, plan)
        time.sleep(chance.uniform(0, 0.25))
        node.kill()
        node.start()
        operation = ended(node, operation)
        assert operation["state"] == "succeeded" or operation["error"]["code"] == "interrupted", operation
        harness.wait_until(lambda: movable(node, programs), "all are known")
        there = {process: device_of(program) for process, program in by_process(programs).items()}
        for part in operation["result"]["parts"]:
            if operation["state"] != "succeeded":
                assert part["device"] == there[part["process"]], f"{number}: {operation}"
            if there[part["process"]] == part["source"]:
                continue
            assert there[part["process"]] == part["target"]
            begun = [move for move in migrations(node)[: len(migrations(node)) - len(before)]
                     if move["process_id"] == part["process"]]  # fmt: skip
            assert [move["state"] for move in begun] == ["done"], begun
    assert len({harness.steps(program, 50) for program in programs}) == 1
    for program in programs:
        harness.output(program)


def migrations(node: Node) -> list[dict[str, Any]]:
    """Newest first."""
    found: list[dict[str, Any]] = node.client.get("/v1/migrations", limit=1000)
    return found


def test_what_cannot_be_moved_back_is_reported(node: Node, scatter: Scatter) -> None:
    programs = scatter("cpu:0", "cpu:1", "cpu:2")
    plan = make_plan(node)
    first, second = plan["moves"]
    server = int(by_process(programs)[second["process"]].until("running")["server_pid"])
    harness.stop(server)
    try:
        operation = begin_apply(node, plan)
        harness.wait_until(lambda: done(node, operation) == 1, "the first move is done")
        tag = node.client.get_tagged(f"/v1/devices/{first['source']}")[1]
        node.client.patch(f"/v1/devices/{first['source']}", {"cordoned": True, "reason": "a fan"}, tag)
        node.client.delete(f"/v1/operations/{operation['id']}")
    finally:
        os.kill(server, signal.SIGCONT)
    operation = ended(node, operation)
    assert (operation["state"], operation["error"]["code"]) == ("failed", "consolidation_incomplete")
    assert f"{first['process'][:12]} on {first['target']}: " in operation["error"]["detail"]
    assert "a fan" in operation["error"]["detail"]
    places = {process: device_of(program) for process, program in by_process(programs).items()}
    assert places[first["process"]] == first["target"]
    assert places[second["process"]] == second["source"]
    for program in programs:
        harness.output(program)


def movable(node: Node, programs: list[Program]) -> bool:
    """All are there, and none of them is doing something else."""
    try:
        plan = make_plan(node, solver_seconds=0)
    except Refused as refused:
        if refused.code == "not_ready":  # after a restart of the daemon
            return False
        raise
    there = {process["process"] for device in plan["before"] for process in device["processes"]}
    assert there == set(by_process(programs))
    return not plan["refusals"]


def done(node: Node, operation: dict[str, Any]) -> int | None:
    progress = node.client.get(f"/v1/operations/{operation['id']}")["progress"] or {}
    found: int | None = progress.get("done")
    return found


def test_the_daemon_is_killed_in_the_middle(node: Node, scatter: Scatter) -> None:
    """No process is moved twice, and the next daemon says where each is."""
    programs = scatter("cpu:0", "cpu:1", "cpu:2")
    plan = make_plan(node)
    first, second = plan["moves"]
    server = int(by_process(programs)[second["process"]].until("running")["server_pid"])
    harness.stop(server)
    operation = begin_apply(node, plan)
    harness.wait_until(lambda: done(node, operation) == 1, "the first move is done")
    node.kill()
    os.kill(server, signal.SIGCONT)
    node.start()
    operation = ended(node, operation)
    assert (operation["state"], operation["error"]["code"]) == ("failed", "interrupted")
    parts = {part["process"]: (part["state"], part["device"]) for part in operation["result"]["parts"]}
    assert parts[first["process"]] == ("moved", first["target"])
    assert parts[second["process"]][0] in ("moved", "not_moved")
    harness.wait_until(lambda: all(program.info() for program in programs), "all are known")
    assert {process: device_of(p) for process, p in by_process(programs).items()}.items() >= {
        process: device for process, (_, device) in parts.items()
    }.items()
    moves = node.client.get("/v1/migrations", process=first["process"])
    assert [move["state"] for move in moves] == ["done"]

    # Killed while jobs are watched, it has succeeded: all were moved. Nobody has watched them to the end.
    harness.wait_until(lambda: movable(node, programs), "all can move again")
    operation = begin_apply(node, make_spread(node, programs), guard_seconds=600)
    reaches(node, operation, "watching")
    node.kill()
    node.start()
    operation = ended(node, operation)
    assert (operation["state"], operation["result"]["guard"]) == ("succeeded", None)
    assert len({device_of(program) for program in programs}) == 3
    assert len({harness.steps(program, 50) for program in programs}) == 1
    for program in programs:
        harness.output(program)


def test_rules(node: Node, scatter: Scatter) -> None:
    programs = scatter("cpu:0", "cpu:1", "cpu:2")
    jobs = [str(program.job) for program in programs]
    assert make_plan(node, alone=[jobs[0]])["freed"] in (["cpu:1"], ["cpu:2"])
    assert make_plan(node, max_jobs_per_device=1)["moves"] == []
    assert make_plan(node, apart=[jobs])["moves"] == []
    assert [move["job_id"] for move in make_plan(node, jobs=[jobs[2]])["moves"]] == [jobs[2]]
    assert jobs[2] not in [move["job_id"] for move in make_plan(node, exclude_jobs=[jobs[2]])["moves"]]
    assert make_plan(node, devices=["cpu:0", "cpu:1"])["freed"] in (["cpu:0"], ["cpu:1"])
    assert make_plan(node, busy_shares=dict.fromkeys(jobs, 1.0))["moves"] == []  # whatever was measured
    two_busy = make_plan(node, busy_shares={jobs[0]: 1.0, jobs[1]: 1.0, jobs[2]: 0.0})
    assert len(two_busy["freed"]) == 1
    without = make_plan(node, solver_seconds=0)
    assert (without["solver"]["solver"], len(without["freed"])) == ("heuristic", 2)
    process = str(programs[0].until("running")["id"])
    node.client.post(f"/v1/processes/{process}:pause", {})
    refused = make_plan(node)["refusals"]
    assert [(one["process"], one["code"]) for one in refused] == [(process, "paused")]
    node.client.post(f"/v1/processes/{process}:continue", {})
    nothing = make_plan(node, max_jobs_per_device=1)
    assert apply_is_refused(node, nothing)["code"] == "plan_empty"
    for program in programs:
        harness.output(program)


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"devices": ["cpu:9"]}, 404, "no_such_device"),
        ({"jobs": ["nobody"]}, 404, "not_found"),
        ({"busy_shares": {"nobody": 0.5}}, 404, "not_found"),
        ({"busy_shares": {"nobody": 1.5}}, 422, "invalid"),
        ({"headroom": 2}, 422, "invalid"),
        ({"objective": "faster"}, 422, "invalid"),
    ],
)
def test_bad_input(daemon: Node, body: dict[str, Any], status: int, code: str) -> None:
    refused = refusal(daemon, "/v1/consolidation-plans", body)
    assert (refused["status"], refused["code"]) == (status, code)


def test_an_unknown_plan(daemon: Node) -> None:
    refused = refusal(daemon, "/v1/consolidation-plans/none/apply", {})
    assert (refused["status"], refused["code"]) == (404, "not_found")
