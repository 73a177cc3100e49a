"""SIGKILL of the server in every phase of a step: the program's results are those of an undisturbed native run."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import struct
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.gpu import resumption
from tests.gpu.bench import Bench, Failed, Running, wait_until
from tests.gpu.cases import Case
from tests.gpu.compare import differences, spread
from tests.gpu.programs.workload import PHASES
from xmigd.measurements import Row

KILLS = 8
NATIVE_RUNS = 3  # in default mode: how far they are from each other is what counts
SEED = 20


def measure(bench: Bench, case: Case) -> Iterator[Row]:
    status = bench.logs / f"{case.name}.status"
    # First natively: a repair that shares the GPU with another program is not this one's time.
    with ThreadPoolExecutor(NATIVE_RUNS) as pool:
        natively = [pool.submit(bench.native, case) for _ in range(1 if case.deterministic else NATIVE_RUNS)]
        native = [run.result() for run in natively]
    with bench.node() as node, bench.started(case, node, f"--status {status}") as running:
        injected = Counter(injections(running, status, KILLS, random.Random(SEED), standing=bench.rehearsal))
        outcome = running.finish()
    where = ", ".join(f"{count} in {phase}" for phase, count in sorted(injected.items()))
    done = [r for r in outcome.recoveries if r["resumed_ms"] is not None]
    inexact = [str(r["first_difference"]) for r in outcome.recoveries if r["exact"] is False]
    reported = (
        f"{case.reported}; {len(native[0].result['losses'])} steps, kills: {where or 'none'}; {len(done)} recoveries, "
        f"{len(inexact)} not exact{', from record ' if inexact else ''}{', '.join(inexact)}"
    )
    if case.deterministic:
        found = differences(native[0].result, outcome.result)
        yield Row(
            name=f"{case.name}: differences",
            value=len(found),
            unit="in all",
            target=0,
            better="lower",
            conditions=reported,
        )
    else:
        yield spread(case, native, outcome, reported)
    if not done:
        raise Failed("no server was killed: the program was over too soon")
    yield from resumption.rows(f"{case.name}: kill", done, case.reported)


def injections(
    running: Running, status: Path, count: int, chance: random.Random, *, preloaded: bool = False,
    standing: bool = False,
) -> Iterator[str]:  # fmt: skip
    """Kill its server `count` times, each time in another phase of a step; the phases in which they died.

    `preloaded`: not before the standby has loaded what it will need. `standing`: the program stands until there is one;
    it has too few steps to go on meanwhile, wherever a server takes long to start.
    """
    phases: list[str] = []
    pid: int | None = None
    if standing:
        program = running.program
        assert program is not None
        wait_until(lambda: (program.info() or {}).get("standby") is not None, "it has made its context")
    for _ in range(count):
        with stopped(running) if standing else contextlib.nullcontext():
            pid = warm_server(running, pid, preloaded=preloaded)
        if pid is None:
            return
        if not phases:
            phases = phases_of(running, status)
            chance.shuffle(phases)
        wanted = phases.pop()
        while (now := phase(status)) != wanted and now != "end" and running.process.poll() is None:
            pass  # phases are shorter than a sleep
        if now == "end" or running.process.poll() is not None:
            return
        time.sleep(chance.uniform(0, 0.002))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            yield phase(status)


@contextlib.contextmanager
def stopped(running: Running) -> Iterator[None]:
    """The program does nothing."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(running.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(running.process.pid, signal.SIGCONT)


def warm_server(running: Running, killed: int | None = None, *, preloaded: bool = False) -> int | None:
    """The server's process, another than `killed`, with a standby beside it; None when the program has ended."""
    assert running.program is not None
    while running.process.poll() is None:
        info = running.program.info()
        warm = info is not None and info["state"] == "running" and info["standby"] == "warm"
        warm = warm and info is not None and (not preloaded or info["standby_preloaded"])
        if info is not None and warm and info["server_pid"] != killed:
            return int(info["server_pid"])
        if info is not None and info["state"] in ("losing", "lost"):
            return None
        time.sleep(0.005)
    return None


def phases_of(running: Running, status: Path) -> list[str]:
    """The phases that the program goes through, seen for some steps: one at least, if it does not end before."""
    seen: set[str] = set()
    first = step(status)
    while (step(status) < first + 3 or not seen) and running.process.poll() is None:
        seen |= {phase(status)} - {"start", "end"}  # it may have begun between two looks
    return sorted(seen) or ["end"]


def step(status: Path) -> int:
    return _read(status)[0]


def phase(status: Path) -> str:
    return PHASES[_read(status)[1]]


def _read(status: Path) -> tuple[int, int]:
    try:
        with status.open("rb") as file:
            number, name = struct.unpack("<II", file.read(8))
            return number, name
    except (FileNotFoundError, struct.error):
        return 0, 0
