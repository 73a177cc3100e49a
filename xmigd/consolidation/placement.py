"""What a packing is: processes, devices, rules, and whether a device may hold some processes. No I/O.

A packing is a tuple of devices, one for each process of the problem, in the problem's order. Memory is a hard limit.
The share of time in which a process keeps its device busy is a soft one: it bounds the predicted slow-down.

The prediction: while a process wants its device, it shares it with all others that want it at that moment. With shares
`b`, the busy part of process i takes 1 + (sum of the other shares) times as long: slow-down 1 + b_i * (L - b_i), where
L is the sum of all shares on the device. Two processes that are always busy are predicted 2, which is what time slices
give.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

Objective = Literal["free_devices", "balance"]
Packing = tuple[str, ...]
EPSILON = 1e-9
OF_EACH = 0.05  # busy share that a process counts for in addition: it has contexts and snapshots
ENOUGH = 0.02  # a balance that gains less is not worth a move


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A process on one of its devices."""

    process: str
    job: str
    device: str  # now
    memory_bytes: int  # that it takes there
    busy: float | None = None  # share of time, 0 to 1; None: unknown
    movable: bool = True
    rank: bool = False  # it shares communicators with others of its job
    claimed_bytes: int = 0  # of memory_bytes, what its job's memory quota counts
    quota_bytes: int | None = None  # of its job, for all of its processes on a device; None: it has none


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """A device."""

    id: str
    capacity_bytes: int | None  # for processes; None: unknown
    takes: bool = True  # may processes come?

    @property
    def kind(self) -> str:
        return self.id.partition(":")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    max_slow_down: float = 1.25
    assumed_busy: float = 1.0  # of processes whose share is unknown
    headroom: float = 0.05  # share of the memory that stays free on a device to which something comes
    max_jobs: int | None = None  # on a device to which something comes
    apart: tuple[frozenset[str], ...] = ()  # jobs of one of these sets share no device
    alone: frozenset[str] = frozenset()  # jobs that share no device with any other


@dataclass(frozen=True, kw_only=True)
class Problem:
    items: tuple[Item, ...]
    bins: tuple[Bin, ...]
    rules: Rules = field(default_factory=Rules)
    objective: Objective = "free_devices"

    @cached_property
    def bin(self) -> Mapping[str, Bin]:
        return {each.id: each for each in self.bins}

    @cached_property
    def now(self) -> Packing:
        return tuple(item.device for item in self.items)

    def busy(self, index: int) -> float:
        """As the rules count it."""
        share = self.items[index].busy
        return self.rules.assumed_busy if share is None else share

    def targets(self, index: int) -> list[str]:
        """Devices that it may have: its own first."""
        item = self.items[index]
        if not item.movable:
            return [item.device]
        kind = item.device.partition(":")[0]
        others = [
            each.id for each in self.bins
            if each.takes and each.kind == kind and each.id != item.device and each.capacity_bytes is not None
        ]  # fmt: skip
        return [item.device, *others]


def occupants(packing: Iterable[str]) -> dict[str, list[int]]:
    """Indices of processes by device."""
    found: dict[str, list[int]] = defaultdict(list)
    for index, device in enumerate(packing):
        found[device].append(index)
    return dict(found)


def used_bytes(problem: Problem, indices: Iterable[int]) -> int:
    return sum(problem.items[index].memory_bytes for index in indices)


def of_quotas(problem: Problem, indices: Iterable[int]) -> list[tuple[int, list[int]]]:
    """Each memory quota that several of these have together, and who they are."""
    found: dict[tuple[str, int], list[int]] = defaultdict(list)
    for index in indices:
        item = problem.items[index]
        if item.quota_bytes is not None:
            found[item.job, item.quota_bytes].append(index)
    return [(most, those) for (_, most), those in found.items() if len(those) > 1]


def slow_down(share: float, load: float) -> float:
    """Of a process with this share, on a device whose shares add up to `load`."""
    return 1.0 + share * max(0.0, load - share)


def why_not_together(problem: Problem, device: str, indices: Collection[int]) -> str | None:
    """What forbids that these share the device when one of them comes to it, at any moment: memory and the hard rules.
    None: nothing."""
    rules, items = problem.rules, problem.items
    capacity = problem.bin[device].capacity_bytes
    if capacity is None:
        return "its memory is unknown"
    if used_bytes(problem, indices) > capacity * (1 - rules.headroom):
        return "no room"
    if any(sum(items[i].claimed_bytes for i in those) > most for most, those in of_quotas(problem, indices)):
        return "no room in a job's memory quota"
    jobs = {items[index].job for index in indices}
    if rules.max_jobs is not None and len(jobs) > rules.max_jobs:
        return f"more than {rules.max_jobs} jobs"
    if len(jobs) > 1 and jobs & rules.alone:
        return "a job that is kept alone"
    if any(len(jobs & group) > 1 for group in rules.apart):
        return "jobs that are kept apart"
    if device.startswith("cuda:"):  # NCCL refuses a communicator with two ranks on a GPU
        ranks = Counter(items[index].job for index in indices if items[index].rank)
        if any(count > 1 for count in ranks.values()):
            return "two ranks of a job on one GPU"
    return None


def why_not(problem: Problem, device: str, indices: Collection[int]) -> str | None:
    """The same, with the bound on the predicted slow-down, which holds for packings and not on the way to them."""
    found = why_not_together(problem, device, indices)
    if found is not None or len(indices) < 2:
        return found
    load = sum(problem.busy(index) for index in indices)
    if any(slow_down(problem.busy(index), load) > problem.rules.max_slow_down + EPSILON for index in indices):
        return f"slower than {problem.rules.max_slow_down:g} times"
    return None


def violations(problem: Problem, packing: Packing) -> list[str]:
    """What is wrong with it; empty: nothing. Devices to which nothing comes may be as they are now."""
    found = []
    for index, device in enumerate(packing):
        if device not in problem.targets(index):
            found.append(f"{problem.items[index].process} may not be on {device}")
    for device, indices in occupants(packing).items():
        if any(problem.items[index].device != device for index in indices):
            why = why_not(problem, device, indices)
            if why is not None:
                found.append(f"{device}: {why}")
    return found


def moved(problem: Problem, packing: Packing) -> list[int]:
    return [index for index, item in enumerate(problem.items) if packing[index] != item.device]


def freed(problem: Problem, packing: Packing) -> list[str]:
    """Devices that have processes now, and none then."""
    then, now = set(packing), set(problem.now)
    return [each.id for each in problem.bins if each.id in now and each.id not in then]


def predictions(problem: Problem, packing: Packing) -> dict[str, float | None]:
    """By job: the slow-down of its slowest process. None: the share of a process on one of its devices is unknown."""
    found: dict[str, float | None] = {}
    for indices in occupants(packing).values():
        shares = [problem.items[index].busy for index in indices]
        load = None if None in shares else sum(share for share in shares if share is not None)
        for index, share in zip(indices, shares, strict=True):
            job = problem.items[index].job
            if len(indices) == 1:
                predicted: float | None = 1.0  # nobody else is there
            elif load is None or share is None:
                predicted = None
            else:
                predicted = slow_down(share, load)
            before = found.get(job, 1.0)
            found[job] = None if before is None or predicted is None else max(before, predicted)
    return found


def load(problem: Problem, device: str, indices: Sequence[int]) -> float:
    """What `balance` evens out: the busy shares, a little for each process, and a tenth of the share of memory."""
    return sum(item_load(problem, device, index) for index in indices)


def item_load(problem: Problem, device: str, index: int) -> float:
    capacity = problem.bin[device].capacity_bytes
    memory = problem.items[index].memory_bytes / capacity if capacity else 0.0
    return problem.busy(index) + OF_EACH + memory / 10


def worth(problem: Problem, packing: Packing) -> tuple[float, int]:
    """The larger is the better packing: what the objective says, then as few bytes as possible to move."""
    bytes = sum(problem.items[index].memory_bytes for index in moved(problem, packing))
    if problem.objective == "free_devices":
        return -float(len(set(packing))), -bytes
    found = occupants(packing)
    highest = max((load(problem, device, indices) for device, indices in found.items()), default=0.0)
    return -round(highest / ENOUGH), -bytes
