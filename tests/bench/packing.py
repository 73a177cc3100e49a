"""Plans of consolidation for 8 devices with 24 jobs, and 64 with 200: how long they take, and how many devices they
free, by the heuristic and by HiGHS."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Iterator

from tests.bench.native import Failed
from xmigd.consolidation.heuristic import heuristic
from xmigd.consolidation.order import order
from xmigd.consolidation.placement import Bin, Item, Problem, Rules, freed, moved, violations
from xmigd.consolidation.solver import is_installed, solve
from xmigd.measurements import Row

GIB = 1 << 30
SIZES_OF_NODES = ((8, 24), (64, 200))
CAPACITY = 80 * GIB
SECONDS = (2.0, 10.0)
# Memory and busy share of inference and of small trainings, as operators of shared GPUs describe them; not a trace.
SIZES, SHARES = (2, 4, 8, 12, 20, 30), (0.02, 0.05, 0.1, 0.2, 0.3, 0.5)


def node(devices: int, jobs: int, seed: int) -> Problem:
    """Jobs of one process, scattered by chance."""
    chance = random.Random(seed)
    used = {f"cuda:{number}": 0 for number in range(devices)}
    items: list[Item] = []
    while len(items) < jobs:
        memory, device = chance.choice(SIZES) * GIB, chance.choice(list(used))
        if used[device] + memory > CAPACITY * 0.95:
            continue
        used[device] += memory
        name = f"job-{len(items)}"
        items.append(
            Item(process=name, job=name, device=device, memory_bytes=memory, busy=chance.choice(SHARES))
        )  # fmt: skip
    return Problem(
        items=tuple(items), bins=tuple(Bin(id=device, capacity_bytes=CAPACITY) for device in used), rules=Rules()
    )  # fmt: skip


def measure(runs: int) -> Iterator[Row]:
    if not is_installed():
        raise Failed("highspy is not installed")
    for devices, jobs in SIZES_OF_NODES:
        yield from _of_size(devices, jobs, runs)


def _of_size(devices: int, jobs: int, runs: int) -> Iterator[Row]:
    problems = [node(devices, jobs, seed) for seed in range(runs)]
    occupied = statistics.median(len(set(problem.now)) for problem in problems)
    what = f"{devices} devices, {jobs} jobs"
    about = f"80 GiB each, scattered by chance over {occupied:g}, slow-down at most 1.25; median of {runs} nodes"
    took, found = [], []
    for problem in problems:
        began = time.monotonic()
        packing = heuristic(problem)
        steps = order(problem, packing)
        took.append((time.monotonic() - began) * 1e3)
        if violations(problem, packing) or steps.stuck:
            raise Failed("the heuristic's packing breaks a rule, or its moves have no order")
        found.append(len(freed(problem, packing)))
    yield Row(
        name=f"{what}: heuristic, a plan", value=round(statistics.median(took), 1), unit="ms", target=1000,
        better="lower", conditions=f"{about}; with the order of its moves",
    )  # fmt: skip
    yield Row(
        name=f"{what}: heuristic, devices freed", value=statistics.median(found), unit="devices", better="higher",
        conditions=about,
    )  # fmt: skip
    for seconds in SECONDS:
        solutions = [asyncio.run(solve(problem, seconds)) for problem in problems]
        for solution in solutions:
            if solution.why:
                raise Failed(solution.why)
        proved = sum(solution.optimal for solution in solutions)
        more = sum((solution.highs_freed or 0) > solution.heuristic_freed for solution in solutions)
        fewer = sum(
            len(moved(problem, solution.packing)) < len(moved(problem, heuristic(problem)))
            for problem, solution in zip(problems, solutions, strict=True)
        )
        yield Row(
            name=f"{what}: HiGHS, {seconds:g} s, devices freed",
            value=statistics.median(solution.highs_freed or 0 for solution in solutions), unit="devices",
            better="higher", conditions=f"{about}; begins with the heuristic's packing: more devices in {more}, fewer "
            f"moves in {fewer}, proved to be the best in {proved}",
        )  # fmt: skip
        yield Row(
            name=f"{what}: HiGHS, {seconds:g} s, a plan",
            value=round(statistics.median(solution.highs_ms or 0.0 for solution in solutions), 1), unit="ms",
            better="lower", conditions=f"{about}; one thread, with the start of its process",
        )  # fmt: skip
