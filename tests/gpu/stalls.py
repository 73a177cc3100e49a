"""How long a training stands still when its server is killed, or its GPU faults, at any moment: each of many
injections.

Every step is synchronised, as a training does that reads its loss. A inject's stall is the longest step around it less
a median step: what the program's user would see. A standby is warm and has loaded what it needs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from itertools import pairwise
from operator import itemgetter
from random import Random
from statistics import median

from tests.gpu.bench import Bench, Failed, Running
from tests.gpu.cases import Case
from tests.gpu.kills import step, warm_server
from tests.gpu.recovery import replaced, wait_for_step
from tests.gpu.resumption import phases_of
from tests.gpu.steps import in_turn, quarters
from xmigd.measurements import Row

INJECTIONS = 20  # of each kind
BEFORE, AFTER = 2, 2  # steps around a inject in which its stall is looked for
SEED = 9
LONGEST_GAP = 1.0  # seconds between two snapshots of a program that works: the server takes one by then
# Seconds: the median and the worst of each kind.
TARGETS = {"kill": (0.2, 0.35), "illegal address": (0.35, 0.5)}


def measure(bench: Bench, case: Case) -> Iterator[Row]:
    status, enough = bench.logs / f"{case.name}.status", bench.logs / f"{case.name}.enough"
    for file in (status, enough):
        file.unlink(missing_ok=True)
    chance = Random(SEED)
    windows: dict[str, list[tuple[int, int]]] = {}
    more = f"--status {status} --until {enough} --turns 1"
    with bench.node() as node, bench.started(case, node, more) as running:
        assert running.program is not None
        running.imported()
        running.begin()
        wait_for_step(running, status, 20)
        for kind in TARGETS:
            windows[kind] = []
            for _ in range(INJECTIONS):
                before = warm_server(running, preloaded=not bench.rehearsal)
                if before is None:
                    break
                time.sleep(chance.uniform(0, 0.3))  # anywhere between two snapshots
                first = step(status)
                inject(running, bench, kind, before)
                if not replaced(running, before):
                    break
                last = step(status)
                wait_for_step(running, status, last + AFTER)
                windows[kind].append((first, last))
        enough.touch()
        outcome = running.finish()
    blocks, usual = outcome.result["blocks_s"], outcome.result["step_s"]
    warmup = len(outcome.result["losses"]) - len(blocks)
    done = [r for r in outcome.recoveries if r["resumed_ms"] is not None]
    for kind, (middle, worst) in TARGETS.items():
        stalls = [
            max(blocks[max(0, first - BEFORE - warmup) : last + AFTER - warmup], default=0.0) - usual
            for first, last in windows[kind]
        ]
        recovered, done = done[: len(stalls)], done[len(stalls) :]
        if len(stalls) < INJECTIONS or len(recovered) < len(stalls):
            raise Failed(f"of {INJECTIONS} injections ({kind}) {len(recovered)} led to a recovery")
        reported = (
            f"{case.reported}; {len(stalls)} injections anywhere in a step, less a median step of {1000 * usual:.1f} "
            "ms; "
            f"all: {', '.join(f'{1000 * stall:.0f}' for stall in sorted(stalls))} ms; recoveries, medians: "
            f"{phases_of(recovered)}; {median(r['records'] or 0 for r in recovered):.0f} records replayed"
        )
        yield Row(
            name=f"{case.name}, {kind}: stall, median", value=round(median(stalls), 3), unit="s", target=middle,
            better="lower", conditions=reported,
        )  # fmt: skip
        yield Row(
            name=f"{case.name}, {kind}: stall, worst of {INJECTIONS}", value=round(max(stalls), 3), unit="s",
            target=worst, better="lower", conditions=f"{case.reported}; the slowest recovery: "
            f"{phases_of([max(recovered, key=lambda r: float(r['resumed_ms']))])}",
        )  # fmt: skip
    inexact = [r for r in outcome.recoveries if r["exact"] is False]
    if case.deterministic:
        yield Row(
            name=f"{case.name}: replays not exact", value=len(inexact), unit="in all", target=0, better="lower",
            conditions=f"of {len(outcome.recoveries)} recoveries",
        )  # fmt: skip


def inject(running: Running, bench: Bench, kind: str, server: int) -> None:
    """Kill its server, or have a kernel store to nowhere beside the program's next one."""
    assert running.program is not None
    if kind == "kill":
        with contextlib.suppress(ProcessLookupError):
            os.kill(server, signal.SIGKILL)
    else:
        running.program.inject("fault", point="record" if bench.rehearsal else "kernel", error=700)


def snapshots(bench: Bench, case: Case) -> Iterator[Row]:
    """A training's step beside a native one, what snapshots take of its time, one of them against what memory can."""
    native, xmig, _ = in_turn(bench, case)
    usual = median([snapshot["live_bytes"] for snapshot in xmig.snapshots] or [0])
    # The first has to make its places; before, there was less to preserve.
    full = sorted(
        (snapshot for snapshot in xmig.snapshots if snapshot["live_bytes"] > usual / 2), key=itemgetter("number")
    )[1:]
    # Of the time since the one before. More than that passes while the native program has its turn.
    gaps = [later["at"] - earlier["at"] for earlier, later in pairwise(full)]
    during = [(gap, snapshot["ms"]) for gap, snapshot in zip(gaps, full[1:], strict=True) if gap < LONGEST_GAP]
    if not during:
        raise Failed(f"{len(xmig.snapshots)} snapshots say nothing")
    took = [snapshot["ms"] for snapshot in full]
    live = median(snapshot["live_bytes"] for snapshot in full)
    seconds = sum(gap for gap, _ in during)
    yield Row(
        name=f"{case.name}: step", value=round(xmig.result["step_s"] / native.result["step_s"], 4), unit="× native",
        target=1, better="lower",
        conditions=f"{case.reported}; in turns, native {quarters(native)} ms, xMIG {quarters(xmig)} ms",
    )  # fmt: skip
    yield Row(
        name=f"{case.name}: cost of snapshots", value=round(sum(ms for _, ms in during) / 10 / seconds, 2),
        unit="% of time", target=1, better="lower",
        conditions=f"{case.reported}; {len(during)} snapshots of {median(took):.1f} ms, the slowest "
        f"{max(took):.1f}, in {seconds:.1f} s; {live / 1e9:.2f} GB live",
    )  # fmt: skip
    can = bench.can(64 if bench.rehearsal else 12288)
    copied, hashed = can["copy_and_hash_gb_s"] * 1e9, can["hash_gb_s"] * 1e9
    floors = [1000 * (snapshot["copied_bytes"] / copied + snapshot["live_bytes"] / hashed) for snapshot in full]
    yield Row(
        name=f"{case.name}: snapshot against its floor", unit="×", target=1.5, better="lower",
        value=round(median(snapshot["ms"] / max(floor, 1e-6) for snapshot, floor in zip(full, floors, strict=True)), 2),
        conditions=f"medians: {median(took):.2f} ms against {median(floors):.2f} ms, which "
        f"{median(snapshot['copied_bytes'] for snapshot in full) / 1e9:.2f} GB that changed take at "
        f"{copied / 1e9:.0f} GB/s, each byte read and written, and "
        f"{live / 1e9:.2f} GB live to be hashed at {hashed / 1e9:.0f} GB/s",
    )  # fmt: skip
