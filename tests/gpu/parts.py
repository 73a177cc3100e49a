"""The parts of `make gpu`: each a name, the time that it takes on an H200, and what measures it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from tests.gpu import faults, kills, memory, profile, recovery, results, steps
from tests.gpu.bench import Bench
from tests.gpu.cases import KILLED, RESULTS, TIMED
from xmigd.measurements import Row


@dataclass(frozen=True)
class Part:
    """``seconds``: what it takes; it is not begun when less is left. ``alone``: nothing else may use the GPU."""

    name: str
    group: str
    seconds: float
    measure: Callable[[Bench], Iterable[Row]]
    alone: bool = True


# In this order. Those that need not be alone run together, at the end of their neighbours.
PARTS = [
    *(Part(case.name, "results", 30, partial(results.measure, case=case), alone=False) for case in RESULTS),
    Part("two-jobs", "results", 30, results.two_jobs, alone=False),
    Part("files", "results", 15, results.device_files, alone=False),
    Part("profile", "profile", 20, profile.measure),
    *(Part(case.name, "steps", 45, partial(steps.measure, case=case)) for case in TIMED),
    *(Part(case.name, "kills", 30, partial(kills.measure, case=case)) for case in KILLED),
    Part("faults", "faults", 70, faults.hundred),
    Part("faults-graphs", "faults", 25, faults.graphs),
    Part("bugs", "faults", 25, faults.bugs),
    Part("recovery", "recovery", 60, recovery.measure),
    Part("memory", "memory", 20, memory.measure),
]


def chosen(only: str | None) -> list[Part]:
    """The parts and groups that are named, separated by commas. Raises ValueError for a name that there is not."""
    if only is None:
        return PARTS
    wanted = {word.strip() for word in only.split(",") if word.strip()}
    known = {part.name for part in PARTS} | {part.group for part in PARTS}
    if not wanted <= known:
        raise ValueError(f"there is no part {', '.join(sorted(wanted - known))}; there are: {', '.join(sorted(known))}")
    return [part for part in PARTS if {part.name, part.group} & wanted]
