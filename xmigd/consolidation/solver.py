"""Packings by HiGHS, in a process of their own: `python -m xmigd.consolidation.solver` reads a problem and writes one.

HiGHS is optional (`pip install xmig[consolidation]`). Apart, because a solver that takes much memory, never ends, or
crashes, is not to take the daemon with it; the daemon kills it at its time limit and has the heuristic's packing.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import resource
import sys
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from xmigd.child import answer_of
from xmigd.consolidation.heuristic import heuristic
from xmigd.consolidation.placement import Bin, Item, Packing, Problem, Rules, freed, violations, worth

COMMAND = (sys.executable, "-m", "xmigd.consolidation.solver")
GRACE = 5.0  # seconds beyond its limit, for the start and for reading the problem
MOST_OUTPUT = 1 << 24  # bytes
MEMORY = 8 << 30  # bytes of addresses that it may have


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    packing: Packing
    solver: str  # whose packing it is: highs or heuristic
    optimal: bool  # proved
    why: str  # that HiGHS has no part in it; empty: it has
    heuristic_freed: int
    highs_freed: int | None  # None: it has found nothing
    highs_ms: float | None


def is_installed() -> bool:
    return importlib.util.find_spec("highspy") is not None


async def solve(problem: Problem, seconds: float) -> Solution:
    """The better one of both packings. `seconds`: for HiGHS; 0: the heuristic only. Raises nothing for a solver that
    fails: `why` says it."""
    simple = await asyncio.to_thread(heuristic, problem)
    base = Solution(
        packing=simple, solver="heuristic", optimal=False, why="", heuristic_freed=len(freed(problem, simple)),
        highs_freed=None, highs_ms=None,
    )  # fmt: skip
    if seconds <= 0:
        return replace(base, why="it was not requested")
    if not is_installed():
        return replace(base, why="highspy is not installed (pip install 'xmig[consolidation]')")
    if not any(len(problem.targets(index)) > 1 for index in range(len(problem.items))):
        return replace(base, why="nothing can be moved")
    began = time.monotonic()
    answer, why = await _ask(problem, simple, seconds)
    ms = round((time.monotonic() - began) * 1e3, 1)
    if answer is None:
        return replace(base, why=why, highs_ms=ms)
    packing, optimal = answer
    wrong = violations(problem, packing)
    if wrong:
        return replace(base, why=f"HiGHS broke a rule ({wrong[0]})", highs_ms=ms)
    found = replace(base, highs_freed=len(freed(problem, packing)), highs_ms=ms)
    if worth(problem, packing) > worth(problem, simple):
        return replace(found, packing=packing, solver="highs", optimal=optimal)
    return replace(found, optimal=optimal)


async def _ask(problem: Problem, start: Packing, seconds: float) -> tuple[tuple[Packing, bool] | None, str]:
    """Its packing, and whether it is proved to be the best; or None and why."""
    body = json.dumps({"problem": packed(problem), "start": start, "seconds": seconds}).encode()
    out, why = await answer_of(COMMAND, body, within=seconds + GRACE, most=MOST_OUTPUT)
    if out is None:
        return None, f"HiGHS {why or f'found nothing within {seconds:g} s'}"
    try:
        answer = json.loads(out)
        if answer["packing"] is None:
            return None, f"HiGHS found nothing within {seconds:g} s"
        return (tuple(map(str, answer["packing"])), answer["optimal"] is True), ""
    except (ValueError, KeyError, TypeError):
        return None, "HiGHS wrote what nobody can read"


def packed(problem: Problem) -> dict[str, Any]:
    """For JSON."""
    rules = asdict(problem.rules) | {
        "apart": [sorted(group) for group in problem.rules.apart], "alone": sorted(problem.rules.alone),
    }  # fmt: skip
    return {
        "items": [asdict(item) for item in problem.items], "bins": [asdict(each) for each in problem.bins],
        "rules": rules, "objective": problem.objective,
    }  # fmt: skip


def unpacked(values: dict[str, Any]) -> Problem:
    rules = values["rules"]
    rules |= {"apart": tuple(frozenset(group) for group in rules["apart"]), "alone": frozenset(rules["alone"])}
    return Problem(
        items=tuple(Item(**item) for item in values["items"]), bins=tuple(Bin(**each) for each in values["bins"]),
        rules=Rules(**rules), objective=values["objective"],
    )  # fmt: skip


def main() -> None:
    from xmigd.consolidation.program import best

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    os.nice(10)  # recoveries come first
    request = json.load(sys.stdin)
    answers = os.dup(1)
    os.dup2(2, 1)  # HiGHS writes there, too
    packing, optimal = best(unpacked(request["problem"]), tuple(request["start"]), request["seconds"])
    with open(answers, "w") as out:
        json.dump({"packing": packing, "optimal": optimal}, out)


if __name__ == "__main__":
    main()
