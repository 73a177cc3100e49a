"""Plans and jobs of several processes: all of them move at once, or none, and the plan says why."""

from __future__ import annotations

from typing import Any

from xmigd.fleet.plan import Plan, changes, make
from xmigd.fleet.reading import contradiction
from xmigd.fleet.schemas import FleetNode, FleetPlanRequest, NodeShown

GIB = 1 << 30


def process(id: str, device: str, **fields: Any) -> dict[str, Any]:
    return {
        "id": id, "device": device, "state": "running", "memory_bytes": 2 * GIB, "busy_share": 0.0, "rank": True,
    } | fields  # fmt: skip


def job(id: str, *processes: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": id, "name": id, "uid": 0, "user": "root", "state": "running", "created_at": 1.0, "processes": processes,
    }  # fmt: skip


def node(name: str, *jobs: dict[str, Any], gib: tuple[int, ...] = (10, 10), state: str = "answered") -> FleetNode:
    """With devices of these sizes."""
    devices = [
        {"id": f"cuda:{number}", "state": "ready", "capacity_bytes": each * GIB} for number, each in enumerate(gib)
    ]
    shown = NodeShown.model_validate({"version": "1", "at": 1.0, "devices": devices, "jobs": jobs})
    return FleetNode(
        name=name, here=name == "one", state=state, why="", since=1.0, answered_at=1.0, age_s=0.0,  # type: ignore[arg-type]
        shown=shown,
    )  # fmt: skip


RANKS = job("ranks", process("r0", "cuda:1"), process("r1", "cuda:0"))
STAY = [job(f"stays{at}", process(f"s{at}", f"cuda:{at}", stays="it is paused")) for at in (0, 1)]


def planned(*nodes: FleetNode, **fields: Any) -> Plan:
    return make(FleetPlanRequest.model_validate({"objective": "free_nodes"} | fields), nodes)


def texts(plan: Plan, job: str = "ranks") -> list[str]:
    return [each.text for each in plan.answer.refusals if each.job_id == job]


def test_all_at_once() -> None:
    for objective in ("free_nodes", "free_devices"):
        plan = planned(node("one", RANKS), node("two", *STAY), objective=objective)
        (move,) = plan.answer.moves
        assert (move.job_id, move.source, move.memory_bytes) == ("ranks", "one/cuda:1,cuda:0", 4 * GIB)
        assert [(each.process, each.source) for each in move.processes] == [("r0", "one/cuda:1"), ("r1", "one/cuda:0")]
        assert sorted(each.target for each in move.processes) == ["two/cuda:0", "two/cuda:1"]
        assert (plan.answer.freed_nodes, texts(plan)) == (["one"], [])


def test_none_and_why() -> None:
    full = planned(node("one", RANKS), node("two", *STAY, gib=(10, 3)))
    assert (full.answer.moves, len(texts(full))) == ([], 2)
    assert "no other node has room for all of the 2 processes" in texts(full)[0]
    # Two nodes have room for one of both each.
    third = job("third", process("t", "cuda:0", stays="it is paused"))
    apart = planned(node("one", RANKS), node("two", STAY[0], gib=(10,)), node("three", third, gib=(10,)))
    assert (apart.answer.moves, len(texts(apart))) == ([], 2)
    slow = planned(
        node("one", job("ranks", *(each | {"busy_share": 1.0} for each in RANKS["processes"]))),
        node("two", *(job(each["id"], each["processes"][0] | {"busy_share": 0.9}) for each in STAY)),
    )
    assert (slow.answer.moves, len(texts(slow))) == ([], 2)
    beside = job("beside", process("b", "cuda:0", stays="it is paused"))
    held = planned(node("one", RANKS, beside), node("two", *STAY))
    assert texts(held) == ["its job has several processes, and nothing gets free if it moves"] * 2
    assert "the request leaves it out" in texts(planned(node("one", RANKS), node("two"), exclude_jobs=["ranks"]))[0]


def test_one_that_cannot_move_keeps_all() -> None:
    half = job("ranks", RANKS["processes"][0], RANKS["processes"][1] | {"stays": "it is suspended"})
    plan = planned(node("one", half), node("two", *STAY))
    assert plan.answer.moves == []
    assert texts(plan) == ["process r1 of its job cannot move: it is suspended", "it is suspended"]
    unknown = job("ranks", RANKS["processes"][0], process("r1", "cuda:7"))
    assert texts(planned(node("one", unknown), node("two", *STAY)))[1] == "its node does not list its device"


def test_stale() -> None:
    """A rank is on another device, has ended, or has come; or there is room for one of both only."""
    two = node("two", *STAY)
    plan = planned(node("one", RANKS), two)
    assert changes(plan, [node("one", RANKS), two]) == []
    first, second = RANKS["processes"]
    swapped = job("ranks", first | {"device": "cuda:0"}, second)
    assert changes(plan, [node("one", swapped), two]) == ["process r0 is on one/cuda:0, not on one/cuda:1"]
    assert "process r1 of job ranks has ended" in changes(plan, [node("one", job("ranks", first)), two])
    more = job("ranks", first, second, process("r2", "cuda:0"))
    assert changes(plan, [node("one", more), two]) == ["job ranks has other processes than it had"]
    grown = job("ranks", first, second | {"memory_bytes": 9 * GIB})
    assert "has no room any more" in changes(plan, [node("one", grown), two])[0]
    # Another node cannot make it stale by showing a process with the same id.
    liar = node("three", job("x", first | {"device": "cuda:0"}))
    assert changes(plan, [node("one", RANKS), two, liar]) == []


def test_room_that_an_earlier_move_makes() -> None:
    """One moves to a device that the job has left. That there is no room for it now makes no plan stale."""
    small = job("small", process("s", "cuda:0", memory_bytes=3 * GIB, rank=False))
    held = job("held", process("h", "cuda:1", memory_bytes=6 * GIB, stays="it is paused"))
    one = node("one", job("ranks", process("r0", "cuda:0"), process("r1", "cuda:1")), held)
    two, three = node("two", *STAY, gib=(12, 12)), node("three", small, gib=(10,))
    plan = planned(one, two, three, objective="free_devices")
    moves = [(move.job_id, move.target) for move in plan.answer.moves]
    assert [name for name, _ in moves] == ["ranks", "small"]
    assert moves[1] == ("small", "one/cuda:1")
    assert changes(plan, [one, two, three]) == []


def test_a_job_twice() -> None:
    shown = node("one", RANKS, job("ranks", process("r9", "cuda:0"))).shown
    assert shown is not None
    assert contradiction(shown, None) == "it lists a job twice"
