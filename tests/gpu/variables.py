"""What kernels leave in variables for which the program has never requested, across everything that injections."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

from tests.gpu.bench import Bench, Failed, Outcome
from tests.gpu.cases import COUNTERS
from tests.gpu.kills import injections, step
from tests.gpu.moves import Moving
from tests.gpu.recovery import inject_once, wait_for_step
from xmigd.measurements import Row

KILLS, FAULTS, SUSPENSIONS, MOVES = 8, 4, 3, 4
BETWEEN = 40  # steps: in them everything is looked at twice


def measure(bench: Bench) -> Iterator[Row]:
    """One run: kills, illegal addresses, suspensions."""
    status, enough = bench.logs / "counters.status", bench.logs / "counters.enough"
    enough.unlink(missing_ok=True)
    with bench.node() as node, bench.started(COUNTERS, node, f"--status {status} --until {enough}") as running:
        assert running.program is not None
        running.program.until("running")
        wait_for_step(running, status, BETWEEN)
        killed = sum(Counter(injections(running, status, KILLS, random.Random(23))).values())
        wait_for_step(running, status, step(status) + BETWEEN)
        faulted = sum(inject_once(running, bench, "illegal address", standby=True) for _ in range(FAULTS))
        wait_for_step(running, status, step(status) + BETWEEN)
        moving = Moving(running)
        for _ in range(SUSPENSIONS):
            moving.suspend()
            moving.resume()
            wait_for_step(running, status, step(status) + BETWEEN)
        enough.touch()
        outcome = running.finish()
    done = [r for r in outcome.recoveries if r["resumed_ms"] is not None]
    if len(done) < killed + faulted or not done:
        raise Failed(f"of {killed} kills and {faulted} illegal addresses {len(done)} led to a recovery")
    yield row("counters", outcome, f"{killed} kills, {faulted} illegal addresses, {SUSPENSIONS} suspensions")


def moved(bench: Bench) -> Iterator[Row]:
    """One run, moved between two GPUs and killed on each."""
    status, enough = bench.logs / "moved-counters.status", bench.logs / "moved-counters.enough"
    enough.unlink(missing_ok=True)
    more = f"--status {status} --until {enough}"
    with bench.node(devices=bench.two_devices()) as node, bench.started(COUNTERS, node, more) as running:
        assert running.program is not None
        running.program.until("running")
        wait_for_step(running, status, BETWEEN)
        moving = Moving(running, bench.two())
        for _ in range(MOVES):
            moving.move()
            wait_for_step(running, status, step(status) + BETWEEN)
            list(injections(running, status, 1, random.Random(29)))
            wait_for_step(running, status, step(status) + BETWEEN)
        enough.touch()
        outcome = running.finish()
    yield row("counters, moved", outcome, f"{MOVES} moves, a kill after each")


def row(name: str, outcome: Outcome, reported: str) -> Row:
    result = outcome.result
    first = "; ".join(result["first"])
    return Row(
        name=f"{name}: differences", value=result["wrong"], unit="in all", target=0, better="lower",
        conditions=f"{COUNTERS.reported}; {reported}; {result['launches']} launches, {result['calls']} counted; "
        f"compared with what is computed beside them{'; ' if first else ''}{first}",
    )  # fmt: skip
