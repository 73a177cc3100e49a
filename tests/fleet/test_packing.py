"""Packings over nodes: no rule is broken, whatever is given, and what can be freed is."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from xmigd.fleet.packing import Device, Node, Objective, Packed, Task, pack

BOUND = 1.5


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[Node], list[Device], list[Task]]:
    limits = st.one_of(st.none(), st.integers(8, 20))
    nodes = [Node(key=str(number), cpu=draw(limits)) for number in range(draw(st.integers(1, 5)))]
    devices = [
        Device(
            key=f"{number}/{each}", node=number, kind=draw(st.sampled_from(["cpu", "cuda"])),
            capacity=draw(st.one_of(st.none(), st.integers(0, 20))), takes=draw(st.booleans()),
        )
        for number in range(len(nodes)) for each in range(draw(st.integers(0, 4)))
    ]  # fmt: skip
    tasks = []
    for number in range(draw(st.integers(0, 12)) if devices else 0):
        at = draw(st.integers(0, len(devices) - 1))
        job = draw(st.sampled_from(["", "a", "b"]))  # of this node
        tasks.append(
            Task(
                key=str(number), device=at, bytes=draw(st.integers(0, 12)), busy=draw(st.sampled_from([0.0, 0.3, 1.0])),
                movable=draw(st.booleans()), cpu=draw(st.integers(0, 4)),
                job=f"{devices[at].node}/{job}" if job else "", rank=draw(st.booleans()),
            )
        )  # fmt: skip
    return nodes, devices, tasks


def node_of(devices: list[Device], place: list[int], job: str, tasks: list[Task]) -> set[int]:
    """On which nodes a job is."""
    return {devices[at].node for task, at in zip(tasks, place, strict=True) if task.job == job}


def check(nodes: list[Node], devices: list[Device], tasks: list[Task], packed: Packed) -> None:
    """Move after move: what comes has room at every moment."""
    place = [task.device for task in tasks]
    for indices in packed.moves:
        for index in indices:
            place[index] = packed.place[index]
        check_move(nodes, devices, tasks, place, indices)
        assert all(len(node_of(devices, place, task.job, tasks)) == 1 for task in tasks if task.job)
    assert place == packed.place
    assert not set(packed.freed_devices) & set(place)
    assert not set(packed.freed_nodes) & {devices[at].node for at in place}
    for job in packed.without_node:
        assert all(at == task.device for task, at in zip(tasks, place, strict=True) if task.job == job)


def check_move(
    nodes: list[Node], devices: list[Device], tasks: list[Task], place: list[int], indices: tuple[int, ...]
) -> None:
    """It has just been made."""
    for index in indices:
        task, target = tasks[index], place[index]
        there = [tasks[each] for each, device in enumerate(place) if device == target]
        each = devices[target]
        assert task.movable
        assert each.takes
        assert each.kind == devices[task.device].kind
        assert each.capacity is not None
        assert sum(one.bytes for one in there) <= each.capacity
        load = sum(one.busy for one in there)
        assert len(there) < 2 or all(1 + one.busy * (load - one.busy) <= BOUND + 1e-6 for one in there)
        limit = nodes[each.node].cpu
        if limit is not None and each.node != devices[task.device].node:
            assert sum(one.cpu for one, at in zip(tasks, place, strict=True) if devices[at].node == each.node) <= limit
        if task.job and each.node != devices[task.device].node:
            assert {tasks[one].job for one in indices} == {task.job}
            assert len(indices) == sum(one.job == task.job for one in tasks)
        if task.job and task.rank and each.kind == "cuda":
            assert sum(one.job == task.job and one.rank for one in there) == 1


@given(problems(), st.sampled_from(["free_devices", "free_nodes"]), st.integers(0, 6))
@settings(max_examples=150)
def test_no_rule_is_broken(
    problem: tuple[list[Node], list[Device], list[Task]], objective: Objective, most: int
) -> None:  # fmt: skip
    packed = pack(*problem, objective=objective, max_slow_down=BOUND, max_moves=most)
    assert len(packed.moves) <= most
    moved = list(itertools.chain.from_iterable(packed.moves))
    assert len(set(moved)) == len(moved)
    check(*problem, packed)


def test_a_node_is_freed_where_a_device_would_not_be() -> None:
    """Whole devices' worth of work: only nodes can be emptied, onto devices of others that are free."""
    nodes = [Node(key="a"), Node(key="b")]
    devices = [Device(key=f"{number}", node=number // 2, kind="cuda", capacity=10) for number in range(4)]
    tasks = [Task(key=str(at), device=at, bytes=10) for at in (0, 2)]
    assert pack(nodes, devices, tasks, objective="free_devices").moves == []
    packed = pack(nodes, devices, tasks, objective="free_nodes")
    assert (packed.freed_nodes, packed.place) == ([0], [3, 2])


def test_within_a_node_first() -> None:
    nodes = [Node(key="a"), Node(key="b")]
    devices = [Device(key=f"{number}", node=number // 2, kind="cuda", capacity=10) for number in range(4)]
    tasks = [Task(key="x", device=0, bytes=2), Task(key="y", device=1, bytes=5), Task(key="z", device=2, bytes=7)]
    assert pack(nodes, devices, tasks, objective="free_devices").place == [1, 1, 2]


def of_two(**fields: Any) -> tuple[list[Node], list[Device], list[Task]]:
    """Two nodes of two devices. On the first a job of two processes, on the second one that stays, on each device."""
    nodes = [Node(key="a"), Node(key="b")]
    devices = [Device(key=f"{number}", node=number // 2, kind="cuda", capacity=10) for number in range(4)]
    tasks = [Task(key=str(at), device=at, bytes=4, job="a/j", **fields) for at in (0, 1)]
    return nodes, devices, tasks + [Task(key=str(at), device=at, bytes=2, movable=False) for at in (2, 3)]


def test_a_job_of_several_processes_moves_at_once() -> None:
    problem = of_two(rank=True)
    objectives: tuple[Objective, ...] = ("free_devices", "free_nodes")
    for objective in objectives:
        packed = pack(*problem, objective=objective)
        assert (packed.moves, sorted(packed.place[:2])) == ([(0, 1)], [2, 3])
        assert (packed.freed_devices, packed.freed_nodes) == ([0, 1], [0])
    # Without what NCCL refuses, one device is enough for both.
    assert pack(*of_two(), objective="free_nodes").place[:2] == [2, 2]
    assert pack(*of_two(), objective="free_devices").place[:2] == [1, 1]  # a move within the node


def test_a_job_stays_whole() -> None:
    """There is room for one of both processes only, or one of both may not move."""
    nodes, devices, tasks = of_two(rank=True)
    full = [*devices[:3], Device(key="3", node=1, kind="cuda", capacity=5)]
    packed = pack(nodes, full, tasks, objective="free_nodes")
    assert (packed.moves, packed.without_node) == ([], {"a/j"})
    tasks[1] = Task(key="1", device=1, bytes=4, job="a/j", rank=True, movable=False)
    packed = pack(nodes, devices, tasks, objective="free_devices")
    assert packed.moves == []


def test_all_of_a_job_is_one_move() -> None:
    """It may be the only one; and the device that its other process leaves gets nothing."""
    nodes, devices, tasks = of_two(rank=True)
    tasks.append(Task(key="other", device=1, bytes=1, movable=False))
    packed = pack(nodes, devices, tasks, objective="free_devices", max_moves=1)
    assert (packed.moves, packed.freed_devices) == ([(0, 1)], [0])
    assert pack(nodes, devices, tasks, objective="free_devices", max_moves=0).moves == []
