"""Faults of every kind at every place: the program's results are those of an undisturbed native run. And the program's
own bugs: it is told what it is told natively."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

from tests.gpu.bench import Bench, Failed, Outcome, Running
from tests.gpu.cases import BUGS, FAULTED, FAULTED_GRAPHS, Case
from tests.gpu.compare import differences
from tests.gpu.injections import KINDS, POINTS, Strike, arm, schedule
from xmigd.demo.node import Node, Program
from xmigd.measurements import Row

FAULTS = 100
SEED = 7
PATIENCE = 20.0  # seconds for one fault to strike
POINTS_WITHOUT_WORK = ("record",)  # nothing runs on the null device that could be struck, or hang
HANG_TIMEOUT = 2.0  # seconds


def hundred(bench: Bench) -> Iterator[Row]:
    """A hundred faults of random kind at random records of one run."""
    with bench.node() as node:
        native, last = references(bench, node, FAULTED)
        points = POINTS_WITHOUT_WORK if bench.rehearsal else POINTS
        outcome = struck(bench, node, FAULTED, schedule(FAULTS, last // 20, last * 14 // 20, SEED, points))
    yield from rows(FAULTED, native, outcome, FAULTS)


def graphs(bench: Bench) -> Iterator[Row]:
    """Each kind while a CUDA graph is replayed, and a kernel that never ends."""
    with bench.node(hang_timeout=HANG_TIMEOUT) as node:
        native, last = references(bench, node, FAULTED_GRAPHS)
        kinds = KINDS if bench.rehearsal else (*KINDS, ("hang", 0))
        point = POINTS_WITHOUT_WORK[0] if bench.rehearsal else "kernel"
        plan = [Strike(*kind, point, last // 2 + last // 2 * i // len(kinds)) for i, kind in enumerate(kinds)]
        outcome = struck(bench, node, FAULTED_GRAPHS, plan)
    yield from rows(FAULTED_GRAPHS, native, outcome, len(plan))


def references(bench: Bench, node: Node, case: Case) -> tuple[Outcome, int]:
    """A native run, and how many records an undisturbed run under xMIG has, which must have come to the same."""
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(bench.native, case)
        undisturbed = bench.under(node, case)
        native = waiting.result()
    if found := differences(native.result, undisturbed.result):
        raise Failed(f"undisturbed, it differs already: {', '.join(found[:4])}")
    last = max((int(cut["sequence"]) for cut in undisturbed.cuts), default=0)
    if last == 0:
        raise Failed("undisturbed, it took no cut: nobody knows how many records it has")
    return native, last


def struck(bench: Bench, node: Node, case: Case, plan: list[Strike]) -> Outcome:
    """Run it with these strikes. One that falls into a server which is about to die is lost with it: it is armed again,
    once the others have struck."""
    with bench.started(case, node) as job:
        assert job.program is not None
        job.program.until("running")
        arm(job.program, plan)
        strike_the_lost(job, plan)
        return job.finish()


def strike_the_lost(job: Running, plan: list[Strike]) -> None:
    """When the last planned record is behind the program, arm as many as did not strike, one after another."""
    assert job.program is not None
    missing = None
    while job.process.poll() is None:
        struck = [fault for fault in job.program.faults() if fault["injection"] is not None]
        if missing is None and job.program.position() > max(strike.sequence for strike in plan):
            missing = lost(plan, struck)
        if missing == []:
            return
        if missing:
            one = missing.pop()
            arm(job.program, [Strike(one.kind, one.error, one.point, 0)])
            end = time.monotonic() + PATIENCE
            while len(struck) == count_struck(job.program) and job.process.poll() is None and time.monotonic() < end:
                time.sleep(0.01)
        time.sleep(0.05)


def count_struck(program: Program) -> int:
    return sum(fault["injection"] is not None for fault in program.faults())


def lost(plan: list[Strike], struck: list[dict[str, Any]]) -> list[Strike]:
    """As many of each kind as were planned and did not strike."""
    left = Counter((fault["error"] or 0) for fault in struck)
    missing = []
    for strike in plan:
        if left[strike.told] > 0:
            left[strike.told] -= 1
        else:
            missing.append(strike)
    return missing


def rows(case: Case, native: Outcome, outcome: Outcome, planned: int) -> Iterator[Row]:
    faults = outcome.faults
    found = differences(native.result, outcome.result)
    done = [r for r in outcome.recoveries if r["resumed_ms"] is not None]
    inexact = sum(r["exact"] is False for r in done)
    kinds = Counter(f["error"] or "kill" for f in faults if f["injection"] is not None)
    others = Counter(f["kind"] for f in faults if f["injection"] is None)
    which = ", ".join(f"{count} × {kind}" for kind, count in sorted(kinds.items(), key=str))
    said = f"{case.said}; {which or 'nothing'} struck" + (f", and {dict(others)}" if others else "")
    yield Row(
        name=f"{case.name}: differences", value=len(found), unit="in all", target=0, better="lower",
        conditions=f"{said}; {len(done)} recoveries, {inexact} not exact",
    )  # fmt: skip
    yield Row(
        name=f"{case.name}: faults survived", value=sum(kinds.values()), unit="faults", target=planned,
        better="higher", conditions=f"planned: {planned}",
    )  # fmt: skip
    if not done:
        raise Failed("nothing struck: the program was over too soon")
    resumed = [float(r["resumed_ms"]) for r in done]
    yield Row(
        name=f"{case.name}: fault to resumed", value=round(median(resumed), 1), unit="ms", better="lower",
        conditions=f"median of {len(done)}, slowest {max(resumed):.0f} ms, "
        f"{sum(r['standby'] != 'warm' for r in done)} without a warm standby; {case.said}",
    )  # fmt: skip


def bugs(bench: Bench) -> Iterator[Row]:
    """An index outside of a table, a store to nowhere, a misaligned store, a trap: the error of each, at each call."""
    native = bench.native(BUGS)
    with bench.node() as node:
        xmig = bench.under(node, BUGS)
    found = differences(native.result, xmig.result)
    told = xmig.result["told"]
    yield Row(
        name="bugs: differences", value=len(found), unit="in all", target=0, better="lower",
        conditions=f"{BUGS.said}; " + (f"different: {', '.join(found)}" if found else f"told: {told}")[:300],
    )  # fmt: skip
