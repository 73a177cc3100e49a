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
SECONDS = 200.0  # on each side
MOST = 50  # differences, before it gives up
# What some programs that have it fail in on a GPU, and tell nothing then: a second context on a device and nodes that
# are left out of an executable graph (launch failures); launches of one such graph in several streams that only the
# driver would order (it does not always).
LEFT_OUT = frozenset({"contexts", "enable", "launch-order"})
# And natively alone: copies of page-locked memory that the legacy stream orders (docs/decisions/0037).
LEFT_OUT_NATIVELY = LEFT_OUT | {"legacy-order"}


def measure(bench: Bench) -> Iterator[Row]:
    """On two GPUs if there are two. In a rehearsal on cpu devices, and not natively."""
    kind = "cpu" if bench.rehearsal else "cuda"
    count = 2 if bench.rehearsal or gpus() > 1 else 1
    processes = 1 if bench.rehearsal else max(2, (os.cpu_count() or 1) * 3 // 4)
    names = [f"{kind}:{ordinal}" for ordinal in range(count)]
    with (
        tempfile.TemporaryDirectory(prefix="xmig-kernels-") as folder,
        bench.node(devices=",".join(names)) as node,
    ):
        kernels = compile_kernels(Path(folder)) if bench.rehearsal else HERE / "kernels.ptx"
        devices = f"{kind}:{','.join(str(ordinal) for ordinal in range(count))}"
        places = {} if bench.rehearsal else {"natively": Place(kernels, python=bench.python, processes=processes)}
        places["under xMIG"] = Place(kernels, node, devices, bench.python, processes)
        where = f"on {count} {'GPU' if count == 1 else 'GPUs'}, {processes} processes"
        for name, place in places.items():  # natively they take a fifth of the time when they are alone
            yield from rows(bench, name, place, count, where, LEFT_OUT_NATIVELY if name == "natively" else LEFT_OUT)


def rows(bench: Bench, name: str, place: Place, devices: int, where: str, without: frozenset[str]) -> Iterator[Row]:
    programs = REHEARSED if bench.rehearsal else PROGRAMS
    end = min(bench.end, time.monotonic() + SECONDS)
    ((_, outcome),) = run([place], 0, programs, devices, FEATURES - without, end=end, most=MOST)
    for difference in outcome.differences:
        text = difference.program.text()
        (bench.logs / f"differential-{name.replace(' ', '-')}-{difference.program.seed}.json").write_text(text)
        print(f"{name}, seed {difference.program.seed}: {difference}", flush=True)
    reported = [
        f"without {', '.join(sorted(without))}",
        *(" ".join(str(found).split())[:200] for found in outcome.differences[:3]),
    ]
    yield Row(
        name=f"differential, {name}: differences", value=len(outcome.differences), unit="in all", target=0,
        better="lower", conditions="; ".join(["from what the programs mean", where, *reported]).replace("|", "/"),
    )  # fmt: skip
    yield Row(
        name=f"differential, {name}: programs", value=outcome.programs, unit="in all", target=programs,
        better="higher", conditions=f"in {outcome.seconds:.0f} s",
    )  # fmt: skip
