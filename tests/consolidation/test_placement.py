"""Packings: rules, the heuristic, HiGHS beside it, and the order of the moves."""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xmigd.consolidation import solver
from xmigd.consolidation.heuristic import heuristic
from xmigd.consolidation.order import order
from xmigd.consolidation.placement import (
    Bin,
    Item,
    Objective,
    Packing,
    Problem,
    Rules,
    freed,
    moved,
    predictions,
    slow_down,
    used_bytes,
    violations,
    why_not,
    worth,
)
from xmigd.consolidation.program import best

SECONDS = 20.0  # for problems that take milliseconds


def item(process: str, device: str, memory: int, busy: float | None = 0.1, job: str = "", **others: Any) -> Item:
    return Item(process=process, job=job or process, device=device, memory_bytes=memory, busy=busy, **others)


def bins(count: int, capacity: int = 100, kind: str = "cuda") -> tuple[Bin, ...]:
    return tuple(Bin(id=f"{kind}:{number}", capacity_bytes=capacity) for number in range(count))


NO_ROOM_LEFT = Rules(headroom=0.0)
shares = st.one_of(st.none(), st.sampled_from([0.0, 0.1, 0.3, 0.6, 1.0]))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    count = draw(st.integers(2, 4))
    devices = [f"cuda:{number}" for number in range(count)]
    items = tuple(
        item(
            f"p{number}", draw(st.sampled_from(devices)), draw(st.integers(1, 40)), draw(shares),
            job=f"j{draw(st.integers(0, 4))}", movable=draw(st.booleans()), rank=draw(st.booleans()),
        )
        for number in range(draw(st.integers(1, 6)))
    )  # fmt: skip
    jobs = [f"j{number}" for number in range(5)]
    items = with_quotas(items, {job: draw(st.one_of(st.none(), st.integers(30, 60))) for job in jobs})
    some = st.frozensets(st.sampled_from(jobs), max_size=3)
    rules = Rules(
        max_slow_down=draw(st.sampled_from([1.0, 1.1, 1.25, 2.0])), assumed_busy=draw(st.sampled_from([0.0, 0.5, 1.0])),
        headroom=draw(st.sampled_from([0.0, 0.2])), max_jobs=draw(st.one_of(st.none(), st.integers(1, 3))),
        apart=tuple(draw(st.lists(some, max_size=2))), alone=draw(some) if draw(st.booleans()) else frozenset(),
    )  # fmt: skip
    return Problem(
        items=items, bins=bins(count, draw(st.integers(60, 120))), rules=rules,
        objective=draw(st.sampled_from(["free_devices", "balance"])),
    )  # fmt: skip


def with_quotas(items: tuple[Item, ...], quotas: dict[str, int | None]) -> tuple[Item, ...]:
    """What they take is all of their jobs' memory quotas."""
    return tuple(replace(each, claimed_bytes=each.memory_bytes, quota_bytes=quotas[each.job]) for each in items)


def all_packings(problem: Problem) -> list[Packing]:
    found = itertools.product(*(problem.targets(index) for index in range(len(problem.items))))
    return [packing for packing in found if not violations(problem, packing)]


@given(problems())
def test_a_packing_breaks_no_rule_and_its_order_has_room(problem: Problem) -> None:
    packing = heuristic(problem)
    assert violations(problem, packing) == []
    assert worth(problem, packing) >= worth(problem, problem.now)
    found = order(problem, packing)
    place = list(problem.now)
    for step in found.steps:
        assert place[step.index] == step.source
        there = [index for index, device in enumerate(place) if device == step.target]
        capacity = problem.bin[step.target].capacity_bytes
        assert capacity is not None
        assert used_bytes(problem, [*there, step.index]) <= capacity
        place[step.index] = step.target
    arrived = [index for index in range(len(place)) if index not in found.stuck]
    assert [place[index] for index in arrived] == [packing[index] for index in arrived]


@pytest.mark.parametrize("seed", range(25))
def test_highs_finds_the_best_of_all(seed: int) -> None:
    """Compared with every packing that there is."""
    chance = random.Random(seed)
    devices = [f"cuda:{number}" for number in range(3)]
    items = tuple(
        item(
            f"p{n}", chance.choice(devices), chance.randint(1, 40), chance.choice([None, 0.1, 0.3, 0.6]),
            job=f"j{chance.randint(0, 4)}", movable=chance.random() < 0.8, rank=chance.random() < 0.3,
        )
        for n in range(6)
    )  # fmt: skip
    items = with_quotas(items, {f"j{n}": chance.choice([None, 40, 60]) for n in range(5)})
    rules = Rules(
        max_slow_down=chance.choice([1.1, 1.25, 2.0]), assumed_busy=chance.choice([0.2, 1.0]),
        max_jobs=chance.choice([None, 2]), apart=(frozenset({"j0", "j1"}),), alone=frozenset({"j4"}),
    )  # fmt: skip
    problem = Problem(items=items, bins=bins(3, 90), rules=rules)
    packing, optimal = best(problem, problem.now, SECONDS)
    assert packing is not None
    assert optimal
    assert violations(problem, packing) == []
    used = min(len(set(each)) for each in [*all_packings(problem), problem.now])
    assert len(set(packing)) == used
    assert used <= len(set(heuristic(problem)))


@pytest.mark.parametrize("objective", ["free_devices", "balance"])
def test_in_a_process_of_its_own(objective: Objective) -> None:
    problem = Problem(
        items=(item("a", "cuda:0", 30), item("b", "cuda:1", 30), item("c", "cuda:2", 30)), bins=bins(3),
        objective=objective,
    )  # fmt: skip
    found = asyncio.run(solver.solve(problem, SECONDS))
    assert (found.why, found.optimal) == ("", True)
    assert found.highs_freed == found.heuristic_freed == (2 if objective == "free_devices" else 0)


def test_where_the_heuristic_is_not_the_best() -> None:
    """Two devices take all only if 50 + 50 and 40 + 30 + 30 come together."""
    sizes = [("a", "cuda:0", 50), ("b", "cuda:1", 40), ("c", "cuda:2", 30), ("d", "cuda:2", 50), ("e", "cuda:3", 30)]
    problem = Problem(
        items=tuple(item(*each, busy=0.0) for each in sizes), bins=bins(4, 100), rules=NO_ROOM_LEFT
    )  # fmt: skip
    assert len(set(heuristic(problem))) == 3
    found = asyncio.run(solver.solve(problem, SECONDS))
    assert (found.solver, len(set(found.packing)), found.optimal) == ("highs", 2, True)


def test_without_a_solver_the_heuristic_has_the_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(items=(item("a", "cuda:0", 30), item("b", "cuda:1", 30)), bins=bins(2))
    monkeypatch.setattr(solver, "is_installed", lambda: False)
    found = asyncio.run(solver.solve(problem, SECONDS))
    assert (found.solver, found.heuristic_freed, found.highs_freed) == ("heuristic", 1, None)
    assert "highspy" in found.why


@pytest.mark.parametrize("body", ["raise SystemExit(3)", "print('[]')", "import time; time.sleep(60)"])
def test_a_solver_that_fails_takes_nothing_with_it(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(items=(item("a", "cuda:0", 30), item("b", "cuda:1", 30)), bins=bins(2))
    monkeypatch.setattr(solver, "COMMAND", (sys.executable, "-c", body))
    monkeypatch.setattr(solver, "GRACE", 1.0)
    found = asyncio.run(solver.solve(problem, 0.1))
    assert (found.solver, found.heuristic_freed, found.highs_freed) == ("heuristic", 1, None)
    assert found.why.startswith("HiGHS")


def test_processes_that_wait_for_each_others_room_make_a_detour() -> None:
    problem = Problem(
        items=(item("a", "cuda:0", 60), item("b", "cuda:1", 50)), bins=bins(3), rules=NO_ROOM_LEFT
    )  # fmt: skip
    found = order(problem, ("cuda:1", "cuda:0"))
    assert [(step.index, step.target, step.detour) for step in found.steps] == [
        (1, "cuda:2", True), (0, "cuda:1", False), (1, "cuda:0", False),
    ]  # fmt: skip
    stuck = order(replace(problem, bins=bins(2)), ("cuda:1", "cuda:0"))
    assert (stuck.steps, stuck.stuck) == ([], [0, 1])


def test_predictions() -> None:
    assert slow_down(1.0, 2.0) == 2.0  # two that are always busy share a device
    assert slow_down(0.5, 0.5) == 1.0  # alone
    items = (item("a", "cuda:0", 10, 0.2), item("b", "cuda:1", 10, 0.4), item("c", "cuda:2", 10, None))
    problem = Problem(items=items, bins=bins(3))
    together = predictions(problem, ("cuda:0", "cuda:0", "cuda:2"))
    assert together == {"a": pytest.approx(1.08), "b": pytest.approx(1.08), "c": 1.0}
    assert predictions(problem, ("cuda:0", "cuda:0", "cuda:0")) == {"a": None, "b": None, "c": None}


def test_two_ranks_of_a_job_share_no_gpu() -> None:
    items = tuple(item(f"p{n}", f"cuda:{n}", 10, 0.0, job="j", rank=True) for n in range(2))
    assert why_not(Problem(items=items, bins=bins(2)), "cuda:0", [0, 1]) == "two ranks of a job on one GPU"
    there = tuple(replace(each, device=each.device.replace("cuda", "cpu")) for each in items)
    problem = Problem(items=there, bins=bins(2, kind="cpu"))
    assert freed(problem, heuristic(problem)) in (["cpu:0"], ["cpu:1"])


def test_a_jobs_quota_is_for_all_of_its_processes() -> None:
    items = tuple(item(f"p{n}", f"cuda:{n}", 30, 0.0, job="j") for n in range(2))
    tight, wide = (Problem(items=with_quotas(items, {"j": most}), bins=bins(2)) for most in (59, 60))
    assert why_not(tight, "cuda:0", [0, 1]) == "no room in a job's memory quota"
    assert why_not(wide, "cuda:0", [0, 1]) is None
    for problem, count in ((tight, 2), (wide, 1)):
        packing, _ = best(problem, problem.now, SECONDS)
        assert packing is not None
        assert len(set(packing)) == len(set(heuristic(problem))) == count


def test_a_device_that_breaks_a_rule_may_stay_as_it_is() -> None:
    """But nothing comes to it, and what leaves makes it better."""
    items = (item("a", "cuda:0", 10, 1.0), item("b", "cuda:0", 10, 1.0), item("c", "cuda:1", 10, 0.1))
    problem = Problem(items=items, bins=bins(2))
    assert violations(problem, problem.now) == []
    assert moved(problem, heuristic(problem)) == []
    packing, _ = best(problem, problem.now, SECONDS)
    assert packing == problem.now
    even = replace(problem, objective="balance", rules=Rules(max_slow_down=2.0))
    assert len(moved(even, heuristic(even))) == 1
