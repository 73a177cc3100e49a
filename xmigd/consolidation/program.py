"""The packing as a mixed-integer program, and HiGHS on it.

x[i, d] = 1: process i is on device d. used[d] = 1: something is. load[d]: the sum of the busy shares. The bound on the
slow-down, 1 + b (L - b) <= s for every process there, is linear in L: L <= b + (s - 1) / b. A device that breaks a rule
now may stay as it is as long as nothing comes: `comes[d]` lifts its rules.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from importlib import import_module
from typing import Any

from xmigd.consolidation.placement import Bin, Packing, Problem, item_load, occupants, of_quotas, why_not

INFINITY = 1e30
OF_MOVES = 0.1  # of the worth of a device: what it may cost at most to move everything
OF_BALANCE = 0.05  # of load, in the same way


class _Program:
    """Columns and rows as they are added."""

    def __init__(self) -> None:
        self.cost: list[float] = []
        self.upper: list[float] = []
        self.whole: list[bool] = []
        self.starts: list[int] = [0]
        self.columns: list[int] = []
        self.values: list[float] = []
        self.low: list[float] = []
        self.high: list[float] = []

    def column(self, cost: float = 0.0, *, whole: bool = True, upper: float = 1.0) -> int:
        self.cost.append(cost)
        self.upper.append(upper)
        self.whole.append(whole)
        return len(self.cost) - 1

    def row(self, terms: Iterable[tuple[int, float]], *, low: float = -INFINITY, high: float = INFINITY) -> None:
        for column, value in terms:
            self.columns.append(column)
            self.values.append(value)
        self.starts.append(len(self.columns))
        self.low.append(low)
        self.high.append(high)


class _Packing:
    """The program of a problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.program = _Program()
        self.x: dict[tuple[int, str], int] = {}
        self.by_device: dict[str, list[int]] = {}  # processes that may be there
        items = problem.items
        total = sum(item.memory_bytes + 1 for item in items)
        weight = OF_MOVES if problem.objective == "free_devices" else OF_BALANCE
        for index, item in enumerate(items):
            for device in problem.targets(index):
                cost = 0.0 if device == item.device else weight * (item.memory_bytes + 1) / total
                self.x[index, device] = self.program.column(cost)
                self.by_device.setdefault(device, []).append(index)
            self.program.row([(self.x[index, d], 1.0) for d in problem.targets(index)], low=1.0, high=1.0)
        self._most = sum(problem.busy(index) for index in range(len(items))) + 1.0
        highest = None
        if problem.objective == "balance":
            highest = self.program.column(1.0, whole=False, upper=INFINITY)
        now = occupants(problem.now)
        for each in problem.bins:
            if each.id in self.by_device:
                self._device(each, now.get(each.id, []), highest)

    def _device(self, each: Bin, now: list[int], highest: int | None) -> None:
        problem, row, x = self.problem, self.program.row, self.x
        here = self.by_device[each.id]
        if highest is not None:
            loads = [(x[i, each.id], item_load(problem, each.id, i)) for i in here]
            row([*loads, (highest, -1.0)], high=0.0)
        used = None
        if highest is None:
            used = self.program.column(1.0)
            for i in here:
                row([(x[i, each.id], 1.0), (used, -1.0)], high=0.0)
        coming = [i for i in here if problem.items[i].device != each.id]
        if not coming or each.capacity_bytes is None:
            return
        lifted: list[tuple[int, float]] = []  # (1 - comes) as a term, where the present breaks a rule
        if why_not(problem, each.id, now) is not None:
            comes = self.program.column()
            for i in coming:
                row([(x[i, each.id], 1.0), (comes, -1.0)], high=0.0)
            lifted = [(comes, 1.0)]
        if used is not None:
            self._shares_of_a_device(each, here, now, used)
        self._rules(each, here, lifted)

    def _shares_of_a_device(self, each: Bin, here: list[int], now: list[int], used: int) -> None:
        """Follows from the rules, and without it the relaxation says nothing: whatever fits on a device together takes
        at most the whole of its memory, and of its time: f(b) = b + (s - 1) / b >= L for each, so that the sum of
        b / f(b) is at most 1. Where nothing comes it is no more than now."""
        problem, rules = self.problem, self.problem.rules
        assert each.capacity_bytes is not None
        room = max(1.0, each.capacity_bytes * (1 - rules.headroom))
        memory = {i: problem.items[i].memory_bytes / room for i in here}
        squares = {i: problem.busy(i) ** 2 for i in here}
        time = {i: square / (square + rules.max_slow_down - 1) for i, square in squares.items() if square > 0}
        for parts in (memory, time):
            whole = max(1.0, sum(parts.get(i, 0.0) for i in now))
            self.program.row([*((self.x[i, each.id], part) for i, part in parts.items()), (used, -whole)], high=0.0)

    def _rules(self, each: Bin, here: list[int], lifted: list[tuple[int, float]]) -> None:
        problem, x, rules = self.problem, self.x, self.problem.rules
        assert each.capacity_bytes is not None

        def bounded(terms: list[tuple[int, float]], most: float, slack: float) -> None:
            """sum <= most, and nothing at all where nothing comes."""
            self.program.row(
                [*terms, *((column, slack) for column, _ in lifted)], high=most + (slack if lifted else 0.0)
            )

        size = 1.0 / max(1, each.capacity_bytes)
        memory = [(x[i, each.id], problem.items[i].memory_bytes * size) for i in here]
        bounded(memory, 1 - rules.headroom, sum(value for _, value in memory))
        for quota, those in of_quotas(problem, here):
            claimed = [(x[i, each.id], problem.items[i].claimed_bytes / quota) for i in those]
            bounded(claimed, 1.0, sum(value for _, value in claimed))
        jobs = self._jobs(each, here)
        if rules.max_jobs is not None:
            bounded([(column, 1.0) for column in jobs.values()], rules.max_jobs, len(jobs))
        for group in rules.apart:
            bounded([(column, 1.0) for job, column in jobs.items() if job in group], 1, len(jobs))
        for job in jobs.keys() & rules.alone:
            others = [(column, 1.0) for other, column in jobs.items() if other != job]
            bounded([*others, (jobs[job], len(others))], len(others), len(others))
        if each.kind == "cuda":
            for job in {problem.items[i].job for i in here if problem.items[i].rank}:
                ranks = [i for i in here if problem.items[i].job == job and problem.items[i].rank]
                bounded([(x[i, each.id], 1.0) for i in ranks], 1, len(ranks))
        load = self.program.column(whole=False, upper=INFINITY)
        self.program.row([*((x[i, each.id], problem.busy(i)) for i in here), (load, -1.0)], low=0.0, high=0.0)
        for i in here:
            share = problem.busy(i)
            most = share + (rules.max_slow_down - 1) / share if share > 0 else self._most
            if most < self._most:
                slack = self._most - most
                bounded([(load, 1.0), (x[i, each.id], slack)], self._most, self._most)

    def _jobs(self, each: Bin, here: list[int]) -> dict[str, int]:
        """By job, a column that is 1 if one of its processes is there."""
        found: dict[str, list[int]] = {}
        for i in here:
            found.setdefault(self.problem.items[i].job, []).append(self.x[i, each.id])
        jobs = {}
        for job, columns in found.items():
            if len(columns) == 1:
                jobs[job] = columns[0]
                continue
            jobs[job] = self.program.column(whole=False)
            for column in columns:
                self.program.row([(column, 1.0), (jobs[job], -1.0)], high=0.0)
        return jobs

    def read(self, values: Any) -> Packing:
        return tuple(
            max(self.problem.targets(i), key=lambda device: values[self.x[i, device]])
            for i in range(len(self.problem.items))
        )


def best(problem: Problem, start: Packing, seconds: float) -> tuple[Packing | None, bool]:
    """The best that HiGHS finds in so many seconds, from `start` on, and whether it is proved that none frees more
    devices, or is more even. None: nothing."""
    highspy: Any = import_module("highspy")
    numpy: Any = import_module("numpy")
    made = _Packing(problem)
    program = made.program
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(program.cost), len(program.low)
    lp.col_cost_ = numpy.array(program.cost)
    lp.col_lower_ = numpy.zeros(len(program.cost))
    lp.col_upper_ = numpy.array(program.upper)
    lp.row_lower_, lp.row_upper_ = numpy.array(program.low), numpy.array(program.high)
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = numpy.array(program.starts, dtype=numpy.int32)
    lp.a_matrix_.index_ = numpy.array(program.columns, dtype=numpy.int32)
    lp.a_matrix_.value_ = numpy.array(program.values)
    kinds = highspy.HighsVarType
    lp.integrality_ = [kinds.kInteger if whole else kinds.kContinuous for whole in program.whole]
    solver = highspy.Highs()
    for name, value in (
        ("output_flag", False), ("time_limit", float(seconds)), ("threads", 1), ("mip_rel_gap", 1e-4),
    ):  # fmt: skip
        solver.setOptionValue(name, value)
    solver.passModel(lp)
    columns = [made.x[index, device] for index, device in enumerate(start)]
    # The rest of the start follows from where the processes are.
    solver.setSolution(len(columns), numpy.array(columns, dtype=numpy.int32), numpy.ones(len(columns)))
    solver.run()
    values, info = solver.getSolution().col_value, solver.getInfo()
    if info.primal_solution_status != 2 or not values:  # feasible
        return None, False
    packing = made.read(values)
    if solver.getModelStatus() == highspy.HighsModelStatus.kOptimal:
        return packing, True
    # The moves may be fewer, but devices are not: the bound without what moves can cost is a whole number.
    bound = math.ceil(info.mip_dual_bound - OF_MOVES - 1e-6) if math.isfinite(info.mip_dual_bound) else 0
    return packing, problem.objective == "free_devices" and bound >= len(set(packing))
