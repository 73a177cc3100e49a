"""Faults of every kind at every place: the program's results are those of an undisturbed native run. And the program's
own bugs: it receives what it would receive natively."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.gpu import resumption
from tests.gpu.bench import Bench, Failed, Outcome, Running
from tests.gpu.cases import BUGS, FAULTED, FAULTED_GRAPHS, Case
from tests.gpu.compare import differences
from tests.gpu.injections import KINDS, POINTS, Injection, arm, schedule
from tests.gpu.kills import step
from tests.gpu.recovery import replaced
from xmigd.demo.node import Node
from xmigd.measurements import Row

FAULTS = 100
SEED = 7
SEEN = (0.05, 0.15)  # the parts of a run after which snapshots say how many records a step has
POINTS_WITHOUT_WORK = ("record",)  # nothing runs on the null device that could be injected into, or hang
HANG_TIMEOUT = 2.0  # seconds

Plan = Callable[[Callable[[float], int]], list[Injection]]  # of the function that says which record comes at which part


def hundred(bench: Bench) -> Iterator[Row]:
    """A hundred faults of random kind at random records of one run."""
    points = POINTS_WITHOUT_WORK if bench.rehearsal else POINTS
    with bench.node() as node:
        native, outcome = injected(
            bench, node, FAULTED, lambda record: schedule(FAULTS, record(0.25), record(0.8), SEED, points)
        )
    yield from rows(FAULTED, native, outcome, FAULTS)


def graphs(bench: Bench) -> Iterator[Row]:
    """Each kind while a CUDA graph is replayed, and a kernel that never ends."""
    kinds = KINDS if bench.rehearsal else (*KINDS, ("hang", 0))
    point = POINTS_WITHOUT_WORK[0] if bench.rehearsal else "kernel"
    with bench.node(hang_timeout=HANG_TIMEOUT) as node:
        native, outcome = injected(
            bench, node, FAULTED_GRAPHS,
            lambda record: [
                Injection(*kind, point, record(0.4 + 0.5 * i / len(kinds))) for i, kind in enumerate(kinds)
            ],
        )  # fmt: skip
    yield from rows(FAULTED_GRAPHS, native, outcome, len(kinds))


def injected(bench: Bench, node: Node, case: Case, plan: Plan) -> tuple[Outcome, Outcome]:
    """A native run, and one with these injections. A inject that falls into a server which is about to die is lost with
    it: it is armed again, once the others have been injected."""
    status = bench.logs / f"{case.name}.status"
    native = bench.native(case)  # before: a repair that shares the GPU with another program is not this one's time
    with bench.started(case, node, f"--status {status}") as job:
        assert job.program is not None
        injections = plan(course(job, status, case.steps(tiny=bench.rehearsal)))
        job.process.send_signal(signal.SIGSTOP)  # what is due when it is armed injections at once, and then the repair
        arm(job.program, injections)
        job.process.send_signal(signal.SIGCONT)
        inject_the_lost(job, injections)
        outcome = job.finish()
        return native, outcome


def course(job: Running, status: Path, steps: int) -> Callable[[float], int]:
    """Which record comes at which part of a run that has begun, from where two of its snapshots are."""
    (early, first), (late, second) = (snapshot_after(job, status, part * steps) for part in SEEN)
    if job.process.poll() is not None or late == early:
        job.finish()
        raise Failed("nothing can be injected: the program was over too soon")
    return lambda part: round(second + (second - first) / (late - early) * (part * steps - late))


def snapshot_after(job: Running, status: Path, wanted: float) -> tuple[int, int]:
    """The first snapshot that is known after this step: the step by then, and its record."""
    assert job.program is not None
    before = None
    while job.process.poll() is None:
        if step(status) >= wanted:
            position = job.program.position()
            if before is not None and position != before:
                return step(status), position
            before = position
        time.sleep(0.005)
    return 0, 0


def inject_the_lost(job: Running, plan: list[Injection]) -> None:
    """When the last planned record is behind the program, arm as many as was not injected: each once the program runs
    again after the one before, or it would hit the repair, again and again."""
    assert job.program is not None
    while job.program.position() <= max(inject.sequence for inject in plan) and job.process.poll() is None:
        time.sleep(0.05)
    for one in lost(plan, [fault for fault in job.program.faults() if fault["injection"] is not None]):
        before = job.program.until("running", "ended")
        if before["state"] == "ended":
            return
        arm(job.program, [Injection(one.kind, one.error, one.point, 0)])
        replaced(job, before["server_pid"])


def lost(plan: list[Injection], injected: list[dict[str, Any]]) -> list[Injection]:
    """As many of each kind as were planned and was not injected."""
    left = Counter((fault["error"] or 0) for fault in injected)
    missing = []
    for inject in plan:
        if left[inject.reported] > 0:
            left[inject.reported] -= 1
        else:
            missing.append(inject)
    return missing


def rows(case: Case, native: Outcome, outcome: Outcome, planned: int) -> Iterator[Row]:
    faults = outcome.faults
    found = differences(native.result, outcome.result)
    done = [r for r in outcome.recoveries if r["resumed_ms"] is not None]
    inexact = sum(r["exact"] is False for r in done)
    kinds = Counter(f["error"] or "kill" for f in faults if f["injection"] is not None)
    others = Counter(f["kind"] for f in faults if f["injection"] is None)
    which = ", ".join(f"{count} × {kind}" for kind, count in sorted(kinds.items(), key=str))
    reported = f"{case.reported}; {which or 'nothing'} injected" + (f", and {dict(others)}" if others else "")
    yield Row(
        name=f"{case.name}: differences", value=len(found), unit="in all", target=0, better="lower",
        conditions=f"{reported}; {len(done)} recoveries, {inexact} not exact",
    )  # fmt: skip
    yield Row(
        name=f"{case.name}: faults survived", value=sum(kinds.values()), unit="faults", target=planned,
        better="higher", conditions=f"planned: {planned}",
    )  # fmt: skip
    if not done:
        raise Failed("nothing injected: the program was over too soon")
    yield from resumption.rows(f"{case.name}: fault", done, case.reported)


def bugs(bench: Bench) -> Iterator[Row]:
    """An index outside of a table, a store to nowhere, a misaligned store, a trap: the error of each, at each call."""
    native = bench.native(BUGS)
    with bench.node() as node:
        xmig = bench.under(node, BUGS)
    found = differences(native.result, xmig.result)
    reported = xmig.result["reported"]
    yield Row(
        name="bugs: differences", value=len(found), unit="in all", target=0, better="lower",
        conditions=f"{BUGS.reported}; " + (
            f"different: {', '.join(found)}" if found else f"reported: {reported}"
        )[:300],
    )  # fmt: skip
