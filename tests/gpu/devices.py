"""Programs of two GPUs: results as natively, undisturbed, across kills, faults, moves and suspension."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator

from tests.gpu.bench import Bench, Failed, Running
from tests.gpu.cases import SPLIT, Case
from tests.gpu.compare import differences
from tests.gpu.injections import Injection, arm
from tests.gpu.kills import warm_server
from tests.gpu.moves import Moving
from xmigd.measurements import Row

KILLS = 4
FAULTS = 6  # of whichever device has the next kernel or copy
STEADY = 0.3  # seconds of work between two disturbances


def ways(bench: Bench, case: Case) -> Iterator[Row]:
    """What the program finds on two devices, natively and under xMIG."""
    native = bench.native(case).result
    with bench.node(devices=bench.two_devices()) as node:
        xmig = bench.under(node, case).result
    found = differences(native, xmig)
    # A null device holds nothing.
    wrong = [] if bench.rehearsal else [f"{name}: {text}" for name, text in xmig["failed"].items()]
    reported = [case.reported, f"{len(xmig['digests'])} results"]
    reported += [f"left out: {xmig['digests']['left out']}"] if "left out" in xmig["digests"] else []
    reported += [f"different: {', '.join(found[:4])}"] if found else []
    reported += [f"not as NumPy says: {', '.join(wrong[:3])}"] if wrong else []
    yield Row(
        name=f"{case.name}: differences", value=len(set(found) | set(wrong)), unit="in all", target=0, better="lower",
        conditions="; ".join(reported).replace("|", "/"),
    )  # fmt: skip


def training(bench: Bench) -> Iterator[Row]:
    """A model split over both, which is left alone, then loses its server, then moves."""
    native = bench.native(SPLIT).result
    disturbances: tuple[tuple[str, Callable[[Bench, Running], str]], ...] = (
        ("undisturbed", lambda _, running: "nothing done to it"), ("kills and faults", injected), ("moves", carried),
    )  # fmt: skip
    for name, disturb in disturbances:
        with bench.node(devices=bench.two_devices()) as node, bench.started(SPLIT, node) as running:
            assert running.program is not None
            running.program.until("running")
            done = disturb(bench, running)
            outcome = running.finish()
        found = differences(native, outcome.result)
        inexact = sum(r["exact"] is False for r in outcome.recoveries)
        yield Row(
            name=f"{SPLIT.name}, {name}: differences", value=len(found), unit="in all", target=0, better="lower",
            conditions=f"{SPLIT.reported}; {done}; {len(outcome.recoveries)} recoveries, {inexact} not exact"
            f"{'; different: ' if found else ''}{', '.join(found[:4])}",
        )  # fmt: skip


def injected(bench: Bench, running: Running) -> str:
    """The server is killed, and work of either device ends in an illegal address."""
    assert running.program is not None
    killed, pid = 0, None
    for _ in range(KILLS):
        pid = warm_server(running, pid)
        if pid is None:
            break
        time.sleep(STEADY)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            killed += 1
    faults = 0
    for number in range(FAULTS):
        pid = warm_server(running, pid)
        if pid is None:
            break
        time.sleep(STEADY)
        arm(running.program, [Injection("fault", 700, ("kernel", "copy")[number % 2], 0)])
        faults += 1
    if not killed or not faults:
        raise Failed("the program was over too soon")
    return f"{killed} kills of the server, {faults} illegal addresses"


def carried(bench: Bench, running: Running) -> str:
    """To the same devices in the other order, into host memory and back, and to the first order again."""
    kind = bench.kind
    moving = Moving(running, (f"{kind}:0,1", f"{kind}:1,0"))
    moving.move()
    time.sleep(STEADY)
    moving.suspend()
    moving.resume()
    time.sleep(STEADY)
    moving.move()
    return "devices swapped, suspended, resumed, swapped back"
