"""Packings over nodes: no rule is broken, whatever is given, and what can be freed is."""

from __future__ import annotations

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
    tasks = [
        Task(
            key=str(number), device=draw(st.integers(0, len(devices) - 1)), bytes=draw(st.integers(0, 12)),
            busy=draw(st.sampled_from([0.0, 0.3, 1.0])), movable=draw(st.booleans()), cpu=draw(st.integers(0, 4)),
        )
        for number in range(draw(st.integers(0, 12)) if devices else 0)
    ]  # fmt: skip
    return nodes, devices, tasks


def check(nodes: list[Node], devices: list[Device], tasks: list[Task], packed: Packed) -> None:
    """Move after move: what comes has room at every moment."""
    place = [task.device for task in tasks]
    for index in packed.moves:
        task, target = tasks[index], packed.place[index]
        place[index] = target
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
    assert place == packed.place
    assert not set(packed.freed_devices) & set(place)
    assert not set(packed.freed_nodes) & {devices[at].node for at in place}


@given(problems(), st.sampled_from(["free_devices", "free_nodes"]), st.integers(0, 6))
@settings(max_examples=150)
def test_no_rule_is_broken(
    problem: tuple[list[Node], list[Device], list[Task]], objective: Objective, most: int
) -> None:  # fmt: skip
    packed = pack(*problem, objective=objective, max_slow_down=BOUND, max_moves=most)
    assert len(packed.moves) <= most
    assert len(set(packed.moves)) == len(packed.moves)
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
