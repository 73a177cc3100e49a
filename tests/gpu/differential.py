"""Random programs of the driver's calls, natively and under xMIG: both read what they mean (tests/differential)."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.differential.batch import run
from tests.differential.generator import FEATURES
from tests.differential.runs import HERE, Place, compile_kernels
from tests.gpu.bench import Bench, gpus
from xmigd.measurements import Row

PROGRAMS = 10_000
REHEARSED = 40
SECONDS = 420.0
# What some programs that have it fail in natively, too, and tell nothing then: a second context on a device (a launch
# failure); launches of one executable graph in several streams that only the driver would order.
LEFT_OUT = frozenset({"contexts", "launch-order"})


def measure(bench: Bench) -> Iterator[Row]:
    """On two GPUs if there are two. In a rehearsal on cpu devices, and not natively."""
    kind = "cpu" if bench.rehearsal else "cuda"
    count = 2 if bench.rehearsal or gpus() > 1 else 1
    processes = 1 if bench.rehearsal else max(2, (os.cpu_count() or 1) * 3 // 4)
    names = [f"{kind}:{ordinal}" for ordinal in range(count)]
    end = min(bench.end, time.monotonic() + SECONDS)
    with (
        tempfile.TemporaryDirectory(prefix="xmig-kernels-") as folder,
        bench.node(devices=",".join(names)) as node,
    ):
        kernels = compile_kernels(Path(folder)) if bench.rehearsal else HERE / "kernels.ptx"
        devices = f"{kind}:{','.join(str(ordinal) for ordinal in range(count))}"
        places = [] if bench.rehearsal else [Place(kernels, python=bench.python, processes=processes)]
        places.append(Place(kernels, node, devices, bench.python, processes))
        programs = REHEARSED if bench.rehearsal else PROGRAMS
        outcomes = [outcome for _, outcome in run(places, 0, programs, count, FEATURES - LEFT_OUT, end=end)]
    found = [
        (outcome is outcomes[-1], difference) for outcome in outcomes for difference in outcome.differences
    ]  # fmt: skip
    for _, difference in found:
        (bench.logs / f"differential-{difference.program.seed}.json").write_text(difference.program.text())
    said = [f"{'under xMIG' if xmig else 'natively'} {difference}"[:200] for xmig, difference in found[:3]]
    without = ", ".join(sorted(LEFT_OUT))
    where = f"programs on {count} {'GPU' if count == 1 else 'GPUs'}, {processes} processes each; without {without}"
    yield Row(
        name="differential: differences", value=len(found), unit="in all", target=0, better="lower",
        conditions="; ".join([where, *said]).replace("|", "/"),
    )  # fmt: skip
    yield Row(
        name="differential: programs", value=min(outcome.programs for outcome in outcomes), unit="in all",
        target=programs, better="higher",
        conditions="; ".join(f"{outcome.programs} in {outcome.seconds:.0f} s" for outcome in outcomes),
    )  # fmt: skip
