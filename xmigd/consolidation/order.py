"""In which order processes move, so that there is always room for the next. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from xmigd.consolidation.placement import Packing, Problem, moved, occupants, why_not_together


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A move. While it lasts its process takes memory on both devices."""

    index: int
    source: str
    target: str
    detour: bool = False  # to make room: the process moves once more


@dataclass(slots=True)
class Order:
    steps: list[Step] = field(default_factory=list)
    stuck: list[int] = field(default_factory=list)  # processes for which no order has room


def order(problem: Problem, packing: Packing) -> Order:
    """Jobs one after the other where that is possible. Where processes wait for each other's room, the smallest of them
    goes to a third device first."""
    result = Order()
    place = list(problem.now)
    waiting = sorted(moved(problem, packing), key=lambda index: (problem.items[index].job, index))
    detours: set[int] = set()
    while waiting:
        job = _whole_job(problem, place, packing, waiting)
        chosen = job or _one(problem, place, packing, waiting)
        if chosen:
            for index in chosen:
                _go(result, place, index, packing[index])
                waiting.remove(index)
            continue
        step = _detour(problem, place, waiting, detours)
        if step is None:
            result.stuck = waiting
            return result
        detours.add(step.index)
        result.steps.append(step)
        place[step.index] = step.target
    return result


def _fits(problem: Problem, place: Sequence[str], index: int, target: str) -> bool:
    there = occupants(place).get(target, [])
    return why_not_together(problem, target, [*there, index]) is None


def _go(result: Order, place: list[str], index: int, target: str) -> None:
    result.steps.append(Step(index=index, source=place[index], target=target))
    place[index] = target


def _whole_job(problem: Problem, place: Sequence[str], packing: Packing, waiting: Iterable[int]) -> list[int]:
    """All that is to move of the first job for which there is room. Empty: there is none."""
    jobs: dict[str, list[int]] = {}
    for index in waiting:
        jobs.setdefault(problem.items[index].job, []).append(index)
    for indices in jobs.values():
        then = list(place)
        for index in indices:
            if not _fits(problem, then, index, packing[index]):
                break
            then[index] = packing[index]
        else:
            return indices
    return []


def _one(problem: Problem, place: Sequence[str], packing: Packing, waiting: Iterable[int]) -> list[int]:
    return next(([index] for index in waiting if _fits(problem, place, index, packing[index])), [])


def _detour(problem: Problem, place: Sequence[str], waiting: Iterable[int], detours: set[int]) -> Step | None:
    for index in sorted(waiting, key=lambda each: problem.items[each].memory_bytes):
        if index in detours:
            continue
        for target in problem.targets(index):
            if target != place[index] and _fits(problem, place, index, target):
                return Step(index=index, source=place[index], target=target, detour=True)
    return None
