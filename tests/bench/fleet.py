"""Plans over 1,000 nodes with 8,000 GPUs, with nodes and pods of the shapes of a public trace (tests/bench/traces): how
long they take, what they free, and the fragmentation before and after.

Nodes are the trace's with 8 GPUs, in its proportions. Pods, drawn by chance from the trace's shapes, are placed by a
policy until 90 % of the GPUs are allocated or CPUs are used up; then pods end by chance until 60 % are. That is what a
plan finds. A pod with part of a GPU, or with one, moves to a GPU of the same model; pods with several GPUs, and those
without any, stay. CPUs and memory of nodes are limits.

Fragmentation as in the paper of the trace: the share of unallocated GPU that a pod of the trace, drawn by chance among
those with GPUs, cannot use on its node.
"""

from __future__ import annotations

import csv
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench.native import Failed
from xmigd.fleet.packing import Device, Node, Objective, Packed, Task, pack
from xmigd.measurements import Row

TRACES = Path(__file__).with_name("traces")
NODES, GPUS = 1000, 8
WHOLE = 1000  # thousandths of a GPU
FULL, LEFT = 0.9, 0.6  # shares of the GPUs that are allocated at first and when the plan is made
IN_VAIN = 200  # pods in a row for which there was no room: CPUs are allocated before GPUs
TARGET_S = 5.0


@dataclass(frozen=True, slots=True)
class Shape:
    cpu: int
    memory: int
    gpus: int
    milli: int  # of each
    pods: int


class Machines:
    """Nodes of the trace, and what of them is not allocated."""

    def __init__(self, models: Any, cpu: Any, memory: Any, free: Any) -> None:
        self.models = np.array(models)
        self.cpu, self.memory, self.free = np.array(cpu), np.array(memory), np.array(free)

    def copy(self) -> Machines:
        return Machines(self.models, self.cpu, self.memory, self.free)

    def fitting(self, shape: Shape) -> Any:
        """By node: has it room?"""
        enough = (self.free >= max(shape.milli, 1)).sum(axis=1) >= shape.gpus
        return enough & (self.cpu >= shape.cpu) & (self.memory >= shape.memory)

    def gpus(self, node: int, shape: Shape, *, loosest: bool = False) -> tuple[int, ...]:
        """Of a part of one: the GPU with the least room that has enough, or with the most."""
        free = self.free[node]
        order = np.argsort(-free if loosest else free, kind="stable")
        return tuple(int(number) for number in order if free[number] >= shape.milli)[: shape.gpus]

    def take(self, pod: Pod, sign: int = 1) -> None:
        self.cpu[pod.node] -= sign * pod.shape.cpu
        self.memory[pod.node] -= sign * pod.shape.memory
        for number in pod.gpus:
            self.free[pod.node, number] -= sign * pod.shape.milli


@dataclass(frozen=True, slots=True)
class Pod:
    shape: Shape
    node: int
    gpus: tuple[int, ...]


Cluster = tuple[Machines, list[Pod]]
Policy = Callable[[Machines, Shape, Any], int]  # among these nodes, which all have room


def shapes() -> list[Shape]:
    with (TRACES / "openb_pods.csv").open() as file:
        rows = list(csv.reader(file))[1:]
    return [Shape(*map(int, row)) for row in rows]


def machines() -> Machines:
    with (TRACES / "openb_nodes.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if int(row["gpu"]) == GPUS]
    total = sum(int(row["nodes"]) for row in rows)
    made = [row for row in rows for _ in range(round(NODES * int(row["nodes"]) / total))]
    made = (made + [max(rows, key=lambda row: int(row["nodes"]))] * NODES)[:NODES]
    return Machines(
        [row["model"] for row in made], [int(row["cpu_milli"]) for row in made],
        [int(row["memory_mib"]) for row in made], np.full((NODES, GPUS), WHOLE),
    )  # fmt: skip


def first_fit(there: Machines, shape: Shape, fitting: Any) -> int:
    return int(np.flatnonzero(fitting)[0])


def best_fit(there: Machines, shape: Shape, fitting: Any) -> int:
    """On the GPU with the least room that has enough; of equal ones on the node with the least room."""
    least = np.where(there.free >= shape.milli, there.free, 2 * WHOLE).min(axis=1) if shape.gpus == 1 else 0
    rank = least * (GPUS * WHOLE * 2) + there.free.sum(axis=1)
    return int(np.where(fitting, rank, np.iinfo(np.int64).max).argmin())


def spread(there: Machines, shape: Shape, fitting: Any) -> int:
    """On the node with the most room, as schedulers do that even out the load."""
    return int(np.where(fitting, there.free.sum(axis=1), -1).argmax())


POLICIES: dict[str, Policy] = {"spread": spread, "first-fit": first_fit, "best-fit": best_fit}


def cluster(name: str, seed: int) -> Cluster:
    """As a plan finds it."""
    chance, there, kinds = random.Random(seed), machines(), shapes()
    weights = list(itertools.accumulate(each.pods for each in kinds))
    pods: list[Pod] = []
    allocated, in_vain = 0, 0
    while allocated < FULL * NODES * GPUS * WHOLE and in_vain < IN_VAIN:
        shape = chance.choices(kinds, cum_weights=weights)[0]
        fitting = there.fitting(shape)
        if not fitting.any():
            in_vain += 1
            continue
        in_vain = 0
        node = POLICIES[name](there, shape, fitting)
        pods.append(Pod(shape, node, there.gpus(node, shape, loosest=name == "spread")))
        there.take(pods[-1])
        allocated += shape.gpus * shape.milli
    chance.shuffle(pods)
    while allocated > LEFT * NODES * GPUS * WHOLE:
        pod = pods.pop()
        there.take(pod, -1)
        allocated -= pod.shape.gpus * pod.shape.milli
    return there, pods


def problem(found: Cluster) -> tuple[list[Node], list[Device], list[Task], list[int]]:
    """For the planner; of each task its pod."""
    there, pods = found
    cpu, memory = there.cpu.tolist(), there.memory.tolist()
    tasks, of_task = [], []
    for number, pod in enumerate(pods):
        single = pod.shape.gpus == 1
        for gpu in pod.gpus:
            tasks.append(
                Task(
                    key=str(number), device=pod.node * GPUS + gpu, bytes=pod.shape.milli, movable=single,
                    cpu=pod.shape.cpu if single else 0, host=pod.shape.memory if single else 0,
                )
            )  # fmt: skip
            of_task.append(number)
        if single:
            cpu[pod.node] += pod.shape.cpu
            memory[pod.node] += pod.shape.memory
    nodes = [Node(key=str(number), cpu=cpu[number], host=memory[number]) for number in range(NODES)]
    devices = [
        Device(key=f"{number}/{gpu}", node=number, kind=str(there.models[number]), capacity=WHOLE)
        for number in range(NODES) for gpu in range(GPUS)
    ]  # fmt: skip
    return nodes, devices, tasks, of_task


def applied(found: Cluster, packed: Packed, of_task: Sequence[int]) -> Cluster:
    """After the moves. Raises Failed: a rule is broken."""
    there, pods = found[0].copy(), list(found[1])
    for index in itertools.chain.from_iterable(packed.moves):
        pod, device = pods[of_task[index]], packed.place[index]
        there.take(pod, -1)
        moved = pods[of_task[index]] = Pod(pod.shape, device // GPUS, (device % GPUS,))
        there.take(moved)
        if there.models[moved.node] != there.models[pod.node]:
            raise Failed("a pod came to another model")
        if min(there.cpu[moved.node], there.memory[moved.node], there.free[moved.node].min()) < 0:
            raise Failed("a move needs more than a node has")
    return there, pods


def repacked(found: Cluster, policy: Policy) -> tuple[Cluster, int]:
    """All pods with one GPU or a part of one placed anew, the others where they are. And how many have moved."""
    there, pods, moved = found[0].copy(), [pod for pod in found[1] if pod.shape.gpus != 1], 0
    moving = [pod for pod in found[1] if pod.shape.gpus == 1]
    for pod in moving:
        there.take(pod, -1)
    for pod in sorted(moving, key=lambda each: (-each.shape.milli, -each.shape.cpu)):
        fitting = there.fitting(pod.shape) & (there.models == there.models[pod.node])
        if not fitting.any():
            raise Failed("a pod has no place any more")
        node = policy(there, pod.shape, fitting)
        pods.append(Pod(pod.shape, node, there.gpus(node, pod.shape)))
        there.take(pods[-1])
        moved += (pods[-1].node, pods[-1].gpus) != (pod.node, pod.gpus)
    return (there, pods), moved


def fragmentation(there: Machines) -> float:
    """Percent of the unallocated GPU."""
    kinds = [each for each in shapes() if each.gpus]
    total, room, lost = sum(each.pods for each in kinds), there.free.sum(axis=1), 0.0
    for shape in kinds:
        usable = np.where(there.free >= shape.milli, there.free, 0).sum(axis=1)
        lost += shape.pods / total * float(np.where(there.fitting(shape), room - usable, room).sum())
    return 100 * lost / float(room.sum())


def free(found: Cluster) -> tuple[int, int]:
    """GPUs and nodes on which no pod with a GPU is."""
    whole = found[0].free == WHOLE
    return int(whole.sum()), int(whole.all(axis=1).sum())


def measure(runs: int) -> Iterator[Row]:
    for name in POLICIES:
        clusters = [cluster(name, seed) for seed in range(runs)]
        about = (
            f"{NODES} nodes, {NODES * GPUS} GPUs, {statistics.median(len(found[1]) for found in clusters):.0f} pods; "
            f"placed by {name} up to {FULL:.0%} of the GPUs, ended by chance down to {LEFT:.0%}; shapes of Alibaba's "
            f"trace gpu-v2023; median of {runs}"
        )
        yield from _state(f"placed by {name}: before", about, clusters)
        objectives: tuple[Objective, ...] = ("free_devices", "free_nodes")
        for objective in objectives:
            what = f"placed by {name}: {'GPUs' if objective == 'free_devices' else 'nodes'} freed by a plan"
            took, after, moves = [], [], []
            for found in clusters:
                nodes, devices, tasks, of_task = problem(found)
                began = time.monotonic()
                packed = pack(nodes, devices, tasks, objective=objective)
                took.append(time.monotonic() - began)
                after.append(applied(found, packed, of_task))
                moves.append(len(packed.moves))
            yield Row(
                name=f"{what}: the plan takes", value=round(max(took), 2), unit="s", target=TARGET_S, better="lower",
                conditions=f"{about}; the longest",
            )  # fmt: skip
            yield from _state(what, about, after, moves)
        for other in ("first-fit", "best-fit"):
            done = [repacked(found, POLICIES[other]) for found in clusters]
            yield from _state(
                f"placed by {name}: all packed anew by {other}", f"{about}; the largest pod first",
                [found for found, _ in done], [moved for _, moved in done],
            )  # fmt: skip


def _state(
    what: str, about: str, found: Sequence[Cluster], moves: Sequence[int] | None = None
) -> Iterator[Row]:  # fmt: skip
    gpus, nodes = zip(*(free(each) for each in found), strict=True)
    for value, unit, better in (
        (statistics.median(gpus), "free GPUs", "higher"), (statistics.median(nodes), "free nodes", "higher"),
        (round(statistics.median(fragmentation(each[0]) for each in found), 2), "% fragmented", "lower"),
    ):  # fmt: skip
        yield Row(name=f"{what}: {unit}", value=value, unit=unit.split(" ")[-1] if unit[0] != "%" else "%",
                  better=better, conditions=about)  # type: ignore[arg-type]  # fmt: skip
    if moves is not None:
        yield Row(name=f"{what}: moves", value=statistics.median(moves), unit="moves", better="lower", conditions=about)
