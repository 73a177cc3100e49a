"""The stall of a recovery with 10 GB of live memory, with and without a standby."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from tests.gpu.bench import Bench, Failed, Running
from tests.gpu.cases import RECOVERED
from tests.gpu.kills import injections, step, warm_server
from tests.gpu.resumption import phases_of
from xmigd.measurements import Row

INJECTIONS = 3  # of each kind
BETWEEN = 20  # steps: what was replayed is seen in them


def measure(bench: Bench) -> Iterator[Row]:
    """One run with a standby, and one without; both import what they need at the same time. Targets in seconds."""
    with started(bench, standby=True) as first, started(bench, standby=False) as second:
        for running in (first, second):
            running.imported()
        yield from stalls(bench, first, standby=True, targets={"kill": 0.5, "illegal address": 0.5})
        yield from stalls(bench, second, standby=False, targets={"kill": 1.5, "illegal address": 1.5})


def files(bench: Bench, *, standby: bool) -> tuple[Path, Path]:
    """Where it says how far it is, and what ends it."""
    name = "recovery" if standby else "recovery-cold"
    return bench.logs / f"{name}.status", bench.logs / f"{name}.enough"


@contextlib.contextmanager
def started(bench: Bench, *, standby: bool) -> Iterator[Running]:
    status, enough = files(bench, standby=standby)
    for file in (status, enough):
        file.unlink(missing_ok=True)
    more = f"--status {status} --until {enough} --turns 1"
    with bench.node(standby=standby) as node, bench.started(RECOVERED, node, more) as running:
        yield running


def stalls(bench: Bench, running: Running, *, standby: bool, targets: dict[str, float]) -> Iterator[Row]:
    """A run, which is injected by one kind after the other."""
    status, enough = files(bench, standby=standby)
    injected: dict[str, tuple[int, int, int]] = {}  # how often, and between which steps
    running.begin()
    assert running.program is not None
    wait_for_step(running, status, BETWEEN)
    for kind in targets:
        first = step(status)
        count = inject(running, bench, status, kind, standby=standby)
        wait_for_step(running, status, step(status) + BETWEEN)
        injected[kind] = count, first, step(status)
    info = running.program.info()
    enough.touch()
    outcome = running.finish()
    done = [r for r in outcome.recoveries if r["resumed_ms"] is not None]
    if len(done) < sum(count for count, _, _ in injected.values()) or not done:
        raise Failed(f"of {injected} injections {len(done)} led to a recovery")
    blocks = outcome.result["blocks_s"]
    warmup = len(outcome.result["losses"]) - len(blocks)
    snapshots = [float(snapshot["ms"]) for snapshot in outcome.snapshots]
    live = (info or {}).get("live_bytes") or 0
    for kind, (count, first, last) in injected.items():
        stall = max(blocks[first - warmup : last - warmup]) - outcome.result["step_s"]
        slowest = max(done[:count], key=lambda r: float(r["resumed_ms"]))
        del done[:count]
        yield Row(
            name=f"recovery of 10 GB {'with' if standby else 'without'} standby, {kind}: stall", value=round(stall, 3),
            unit="s", target=targets[kind], better="lower",
            conditions=f"the longest step of {count} injections less a median step, "
            f"{live / 1e9:.1f} GB live; {outcome.result['corrupted']} pieces of memory corrupted; "
            f"the slowest recovery: {phases_of([slowest])} ms; {slowest['records'] or 0} records replayed; "
            f"{len(snapshots)} snapshots of {median(snapshots) if snapshots else 0:.1f} ms",
        )  # fmt: skip
        if standby and kind != "kill":
            yield Row(
                name=f"recovery of 10 GB, {kind}: until the device reports it",
                value=round(max(0.0, stall - slowest["resumed_ms"] / 1e3), 3), unit="s", better="lower",
                conditions="of that stall, what passed before the server knew: the stall less the slowest recovery",
            )  # fmt: skip


def wait_for_step(running: Running, status: Path, wanted: int) -> None:
    while step(status) < wanted and running.process.poll() is None:
        time.sleep(0.01)


def inject(running: Running, bench: Bench, status: Path, kind: str, *, standby: bool) -> int:
    """Of one kind; how many injected."""
    if standby and kind == "kill":
        return len(list(injections(running, status, INJECTIONS, random.Random(5), preloaded=not bench.rehearsal)))
    return sum(inject_once(running, bench, kind, standby=standby) for _ in range(INJECTIONS))


def inject_once(running: Running, bench: Bench, kind: str, *, standby: bool) -> bool:
    """Kill its server, or have a kernel store to nowhere beside the program's next one; wait until another runs."""
    assert running.program is not None
    before = warm_server(running, preloaded=not bench.rehearsal) if standby else cold_server(running)
    if before is None:
        return False
    if kind == "kill":
        with contextlib.suppress(ProcessLookupError):
            os.kill(before, signal.SIGKILL)
    else:
        running.program.inject("fault", point="record" if bench.rehearsal else "kernel", error=700)
    return replaced(running, before)


def cold_server(running: Running) -> int | None:
    """The pid of its server; nothing if the program has ended."""
    assert running.program is not None
    info = running.program.until("running", "ended")
    if info["state"] == "ended":
        return None
    time.sleep(0.5)  # some steps between two injections; nothing depends on how many
    return int(info["server_pid"])


def replaced(running: Running, before: int) -> bool:
    """Wait until another server than this one runs."""
    assert running.program is not None
    while running.process.poll() is None:
        info = running.program.info()
        if info is not None and info["state"] == "running" and info["server_pid"] != before:
            return True
        time.sleep(0.005)
    return False
