"""Packings of jobs over many nodes. No I/O.

Thousands of devices have to be packed within seconds. So a device (or a whole node) is emptied only onto devices that
are in use and stay so: nothing that was emptied gets anything, and nothing that got something is emptied. Then every
order of the moves has room at every moment, and one pass from the least to the most used one suffices.

Memory is a hard limit. The predicted slow-down is that of `xmigd.consolidation.placement`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

Objective = Literal["free_devices", "free_nodes"]
EPSILON = 1e-9
LOOKS = 64  # devices that are looked at for one process, the fullest first


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A process on one device. `cpu` and `host`: what it takes of its node's, in any unit."""

    key: str
    device: int  # index of its Device
    bytes: int
    busy: float = 0.0
    movable: bool = True
    cpu: int = 0
    host: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    key: str
    node: int  # index of its Node
    kind: str  # processes go to devices of the same kind
    capacity: int | None  # bytes, after what is to stay free; None: unknown, it takes nothing
    takes: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    key: str
    cpu: int | None = None  # None: no limit
    host: int | None = None


@dataclass(slots=True)
class Packed:
    place: list[int]  # by task, its device
    moves: list[int] = field(default_factory=list)  # tasks that move, in an order that has room
    freed_devices: list[int] = field(default_factory=list)
    freed_nodes: list[int] = field(default_factory=list)


class _State:
    """Where everything is while a packing is made."""

    def __init__(
        self, nodes: Sequence[Node], devices: Sequence[Device], tasks: Sequence[Task], max_slow_down: float
    ) -> None:
        self.nodes, self.devices, self.tasks = nodes, devices, tasks
        self.bound = max_slow_down - 1 + EPSILON
        self.place = [task.device for task in tasks]
        self.on: list[list[int]] = [[] for _ in devices]
        self.used = [0] * len(devices)
        self.load = [0.0] * len(devices)
        self.cpu, self.host = [0] * len(nodes), [0] * len(nodes)
        self.of_node: list[list[int]] = [[] for _ in nodes]
        for number, device in enumerate(devices):
            self.of_node[device.node].append(number)
        for index, task in enumerate(tasks):
            self._add(index, task.device)
        # Devices that may get something, by kind, in the order of their room.
        self.room: dict[str, list[tuple[int, int]]] = {}
        self.listed = [False] * len(devices)
        self.got = [False] * len(devices)

    def _add(self, index: int, device: int) -> None:
        task, node = self.tasks[index], self.devices[device].node
        self.on[device].append(index)
        self.used[device] += task.bytes
        self.load[device] += task.busy
        self.cpu[node] += task.cpu
        self.host[node] += task.host

    def _remove(self, index: int, device: int) -> None:
        task, node = self.tasks[index], self.devices[device].node
        self.on[device].remove(index)
        self.used[device] -= task.bytes
        self.load[device] -= task.busy
        self.cpu[node] -= task.cpu
        self.host[node] -= task.host

    def left(self, device: int) -> int:
        return (self.devices[device].capacity or 0) - self.used[device]

    def enlist(self, device: int) -> None:
        """It may get something."""
        each = self.devices[device]
        if each.takes and each.capacity is not None and not self.listed[device]:
            insort(self.room.setdefault(each.kind, []), (self.left(device), device))
            self.listed[device] = True

    def delist(self, device: int) -> None:
        if self.listed[device]:
            rooms = self.room[self.devices[device].kind]
            del rooms[bisect_left(rooms, (self.left(device), device))]
            self.listed[device] = False

    def fits(self, task: Task, device: int, from_node: int) -> bool:
        node = self.devices[device].node
        if node != from_node:
            limits = self.nodes[node]
            if limits.cpu is not None and self.cpu[node] + task.cpu > limits.cpu:
                return False
            if limits.host is not None and self.host[node] + task.host > limits.host:
                return False
        if not self.on[device]:
            return True
        load = self.load[device] + task.busy
        if task.busy * max(0.0, load - task.busy) > self.bound:
            return False
        return all(self.tasks[i].busy * max(0.0, load - self.tasks[i].busy) <= self.bound for i in self.on[device])

    def best(self, index: int) -> int | None:
        """The device with the least room that has enough: one of the same node, where a move takes milliseconds, before
        one of another."""
        task = self.tasks[index]
        kind, node = self.devices[task.device].kind, self.devices[self.place[index]].node
        near = [
            (self.left(device), device) for device in self.of_node[node]
            if self.listed[device] and self.devices[device].kind == kind and self.left(device) >= task.bytes
        ]  # fmt: skip
        for _, device in sorted(near):
            if self.fits(task, device, node):
                return device
        rooms = self.room.get(kind, [])
        at = bisect_left(rooms, (task.bytes, -1))
        for _, device in rooms[at : at + LOOKS]:
            if self.fits(task, device, node):
                return device
        return None

    def move(self, index: int, device: int) -> None:
        here = self.place[index]
        was = self.listed[device], self.listed[here]
        self.delist(device)
        self.delist(here)
        self._remove(index, here)
        self._add(index, device)
        self.place[index] = device
        if was[0]:
            self.enlist(device)
        if was[1]:
            self.enlist(here)

    def empty(self, group: Iterable[int], others: Iterable[int]) -> list[int] | None:
        """Move all from these devices elsewhere; `others`, they among them, get nothing then. None: they do not all
        fit, and everything is as before."""
        hidden = [device for device in others if self.listed[device]]
        for device in hidden:
            self.delist(device)
        indices = [index for device in group for index in self.on[device]]
        done: list[tuple[int, int]] = []
        for index in sorted(indices, key=lambda each: -self.tasks[each].bytes):
            target = self.best(index)
            if target is None:
                for moved, back in reversed(done):
                    self.move(moved, back)
                for device in hidden:
                    self.enlist(device)
                return None
            done.append((index, self.place[index]))
            self.move(index, target)
        for moved, _ in done:
            self.got[self.place[moved]] = True
        return [moved for moved, _ in done]


def pack(
    nodes: Sequence[Node], devices: Sequence[Device], tasks: Sequence[Task], *, objective: Objective,
    max_slow_down: float = 1.25, max_moves: int | None = None,
) -> Packed:  # fmt: skip
    """A packing that breaks no rule; at worst the present one."""
    state = _State(nodes, devices, tasks, max_slow_down)
    result = Packed(place=state.place)
    of_node = state.of_node
    groups = _groups(state, objective)
    if objective == "free_devices":
        for number in range(len(devices)):
            if state.on[number]:
                state.enlist(number)
    else:  # empty devices of nodes that are in use are filled, too
        for numbers in of_node:
            if any(state.on[number] for number in numbers):
                for number in numbers:
                    state.enlist(number)
    for group in groups:
        count = sum(len(state.on[number]) for number in group)
        too_many = max_moves is not None and len(result.moves) + count > max_moves
        others = group if objective == "free_devices" else of_node[devices[group[0]].node]
        if too_many or any(state.got[number] for number in others):
            continue
        moved = state.empty(group, others)
        if moved is not None:
            result.moves += moved
    before = {task.device for task in tasks}
    after = set(state.place)
    result.freed_devices = sorted(before - after)
    used = {devices[number].node for number in after}
    result.freed_nodes = sorted({devices[number].node for number in before} - used)
    return result


def _groups(state: _State, objective: Objective) -> list[list[int]]:
    """What may be emptied as one, the least used first."""
    candidates = [[number] for number in range(len(state.devices))]
    if objective == "free_nodes":
        candidates = state.of_node
    found = []
    for group in candidates:
        indices = [index for number in group for index in state.on[number]]
        if indices and all(state.tasks[index].movable for index in indices):
            found.append((sum(state.tasks[index].bytes for index in indices), group))
    return [[number for number in group if state.on[number]] for _, group in sorted(found)]
