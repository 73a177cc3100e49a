"""Packings of jobs over many nodes. No I/O.

Thousands of devices have to be packed within seconds. So a device (or a whole node) is emptied only onto devices that
are in use and stay so: nothing that was emptied gets anything, and nothing that got something is emptied. Then the
moves have room one after the other, and one pass from the least to the most used one suffices.

The processes of a job are on one node before and afterwards: within it each moves by itself, to another one all of them
move at once.

Memory is a hard limit. The predicted slow-down is that of `xmigd.consolidation.placement`.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

Objective = Literal["free_devices", "free_nodes"]
EPSILON = 1e-9
LOOKS = 64  # devices, or nodes, that are looked at for one process, or job, the fullest first


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A process on one device. `cpu` and `host`: what it takes of its node's, in any unit. `job`: of those with the
    same one, which are on one node; empty: it is alone. `rank`: it shares communicators with others of its job."""

    key: str
    device: int  # index of its Device
    bytes: int
    busy: float = 0.0
    movable: bool = True
    cpu: int = 0
    host: int = 0
    job: str = ""
    rank: bool = False


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
    moves: list[tuple[int, ...]] = field(default_factory=list)  # tasks that move at once, in an order that has room
    without_node: set[str] = field(default_factory=set)  # jobs of several tasks that no other node can take
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
        self.moved = [False] * len(tasks)
        self.of_job: dict[str, list[int]] = {}
        for index, task in enumerate(tasks):
            if task.job:
                self.of_job.setdefault(task.job, []).append(index)
        self.without_node: set[str] = set()
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
        ranks = (self.tasks[i].job for i in self.on[device] if self.tasks[i].rank)
        if task.rank and self.devices[device].kind == "cuda" and task.job in ranks:
            return False  # NCCL refuses a communicator with two ranks on a GPU
        load = self.load[device] + task.busy
        if task.busy * max(0.0, load - task.busy) > self.bound:
            return False
        return all(self.tasks[i].busy * max(0.0, load - self.tasks[i].busy) <= self.bound for i in self.on[device])

    def near(self, index: int, node: int) -> int | None:
        """The device of this node with the least room that has enough."""
        task = self.tasks[index]
        kind, here = self.devices[task.device].kind, self.devices[self.place[index]].node
        rooms = [
            (self.left(device), device) for device in self.of_node[node]
            if self.listed[device] and self.devices[device].kind == kind and self.left(device) >= task.bytes
        ]  # fmt: skip
        return next((device for _, device in sorted(rooms) if self.fits(task, device, here)), None)

    def far(self, index: int) -> int | None:
        """The same of all nodes."""
        task = self.tasks[index]
        rooms = self.room.get(self.devices[task.device].kind, [])
        at = bisect_left(rooms, (task.bytes, -1))
        here = self.devices[self.place[index]].node
        return next((device for _, device in rooms[at : at + LOOKS] if self.fits(task, device, here)), None)

    def nodes_for(self, index: int) -> list[int]:
        """Other ones with a device that has room for it, those with the least room first."""
        task = self.tasks[index]
        rooms = self.room.get(self.devices[task.device].kind, [])
        at, here = bisect_left(rooms, (task.bytes, -1)), self.devices[self.place[index]].node
        found: dict[int, None] = {}
        for _, device in itertools.islice(rooms, at, None):
            if (node := self.devices[device].node) != here:
                found[node] = None
            if len(found) >= LOOKS:
                break
        return list(found)

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

    def empty(self, group: Iterable[int], others: Iterable[int], most: int | None) -> list[tuple[int, ...]] | None:
        """Move all from these devices elsewhere, by so many moves at most; `others`, they among them, get nothing then.
        None: they do not all fit, and everything is as before."""
        hidden = [device for device in others if self.listed[device]]
        for device in hidden:
            self.delist(device)
        done: list[tuple[int, int]] = []  # tasks, and where each was
        moves: list[tuple[int, ...]] = []
        for indices in self._units(group):
            its = self._emptied(indices, done)
            moves += its or []
            if its is None or (most is not None and len(moves) > most):
                self._undo(done, 0)
                for device in hidden:
                    self.enlist(device)
                return None
        for moved, was in done:
            self.moved[moved] = True
            self.got[self.place[moved]] = True
            if not self.on[was]:  # also one that was not to be emptied: all of its jobs had others there
                self.delist(was)
        return moves

    def _units(self, group: Iterable[int]) -> list[list[int]]:
        """What is on these devices, by job, the largest first."""
        found: dict[str | int, list[int]] = {}
        for index in (index for device in group for index in self.on[device]):
            found.setdefault(self.tasks[index].job or index, []).append(index)
        return sorted(found.values(), key=lambda each: -self._bytes(each))

    def _bytes(self, indices: Iterable[int]) -> int:
        return sum(self.tasks[index].bytes for index in indices)

    def _emptied(self, indices: list[int], done: list[tuple[int, int]]) -> list[tuple[int, ...]] | None:
        """These, of one job, on other devices: of the same node, where a move takes milliseconds, before those of
        another one. None: there is no room."""
        job = self.of_job.get(self.tasks[indices[0]].job, indices)
        alone, mark = len(job) == 1, len(done)
        for index in sorted(indices, key=lambda each: -self.tasks[each].bytes):
            target = self.near(index, self.devices[self.place[index]].node)
            if target is None and alone:
                target = self.far(index)
            if target is None:
                self._undo(done, mark)
                break
            self._do(index, target, done)
        else:
            return [(index,) for index, _ in done[mark:]]
        if alone or any(self.moved[index] or not self.tasks[index].movable for index in job):
            return None
        if self._together(job, done):
            return [tuple(job)]
        self.without_node.add(self.tasks[job[0]].job)
        return None

    def _together(self, job: list[int], done: list[tuple[int, int]]) -> bool:
        """All of the job on one other node, if there is one with room for all at once."""
        largest_first, mark = sorted(job, key=lambda each: -self.tasks[each].bytes), len(done)
        for node in self.nodes_for(largest_first[0]):
            for index in largest_first:
                target = self.near(index, node)
                if target is None:
                    self._undo(done, mark)
                    break
                self._do(index, target, done)
            else:
                return True
        return False

    def _do(self, index: int, target: int, done: list[tuple[int, int]]) -> None:
        done.append((index, self.place[index]))
        self.move(index, target)

    def _undo(self, done: list[tuple[int, int]], mark: int) -> None:
        """Back to when so many were done."""
        while len(done) > mark:
            self.move(*done.pop())


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
        others = group if objective == "free_devices" else of_node[devices[group[0]].node]
        if any(state.got[number] for number in others):
            continue
        left = None if max_moves is None else max_moves - len(result.moves)
        result.moves += state.empty(group, others, left) or []
    result.without_node = {job for job in state.without_node if not any(state.moved[i] for i in state.of_job[job])}
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
