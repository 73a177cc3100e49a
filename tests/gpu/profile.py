"""Where the microseconds of a launch go: the driver's own cost, the client's, and the server's, side by side.

The null device executes records and calls no driver: what a record costs there in a row is journal and decoding.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from tests.bench.calls import rested, resting
from tests.bench.native import cuda_include
from tests.gpu.bench import Bench, Failed
from tests.gpu.cases import PROGRAMS
from xmigd.demo.node import Node
from xmigd.measurements import Row
from xmigd.native import find_native_dir

RUNS = 3
CALLS = {
    "launch_ns": "cuLaunchKernel with 8 parameters, its caller's thread",
    "launch_3072_bytes_ns": "cuLaunchKernel with a parameter of 3072 bytes, its caller's thread",
    "event_ns": "cuEventRecord, its caller's thread",
    "memset_ns": "cuMemsetD8Async of 4 KiB, its caller's thread",
    "copy_4096_ns": "cuMemcpyHtoDAsync of 4 KiB of pageable memory, its caller's thread",
    "sustained_ns": "cuLaunchKernel with 8 parameters, 200,000 in a row until all are executed",
    "launch_and_wait_ns": "a launch and cuStreamSynchronize, both awake",
    "from_idle_ns": "a launch and cuStreamSynchronize after 20 ms of rest, median of 100",
}


def measure(bench: Bench) -> Iterator[Row]:
    program = built(bench)
    sides: dict[str, dict[str, float]] = {}
    if not bench.rehearsal:
        sides["native"] = typical([run([program], bench) for _ in range(RUNS)])
        with subprocess.Popen(
            [program], env=bench.natively(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as alone:
            at_rest(alone)
            yield rested("idle program, native", alone.pid)
        with bench.node() as node:
            sides["xMIG"] = typical([run([program], node) for _ in range(RUNS)])
            yield from idle(program, node)
    with bench.node(devices="null:0") as node:
        module = find_native_dir(None) / "xmig_kernels.so"
        sides["null device"] = typical([run([program, module], node) for _ in range(RUNS)])
    for key, reported in CALLS.items():
        for side, figures in sides.items():
            if key in figures:  # the null device has no kernel with a large parameter
                name = f"{key.removesuffix('_ns').replace('_', ' ')}, {side}"
                yield Row(name=name, value=figures[key], unit="ns", better="lower", conditions=reported)
    if "native" in sides:
        woken = {side: figures["from_idle_ns"] for side, figures in sides.items()}
        yield Row(
            name="launch and wait, from idle", value=round(woken["xMIG"] / woken["native"], 2), unit="× native",
            target=2, better="lower", conditions=f"{CALLS['from_idle_ns']}; natively {woken['native'] / 1e3:.0f} µs",
        )  # fmt: skip


def idle(program: Path, node: Node) -> Iterator[Row]:
    """What the program and its server take of a processor when it has done its calls and only its process is left."""
    running = node.program([program], name="rests", stdin=subprocess.PIPE)
    at_rest(running.process)
    yield from resting(running)
    running.process.communicate("")


def at_rest(program: subprocess.Popen[str]) -> None:
    assert program.stdout is not None
    if not program.stdout.readline():
        raise Failed("launches ended instead of resting")


def typical(runs: list[dict[str, float]]) -> dict[str, float]:
    return {key: median(run[key] for run in runs) for key in runs[0]}


def built(bench: Bench) -> Path:
    """The program: as it was carried here, or built now."""
    carried = PROGRAMS / "launches"
    if carried.exists():
        return carried
    program = bench.scratch / "launches"
    compiler = os.environ.get("CC", "cc")
    command = [compiler, "-O2", f"-I{cuda_include()}", str(PROGRAMS / "launches.c"), "-o", str(program), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Failed(f"launches.c does not build: {done.stderr.strip()[-300:]}")
    return program


def run(command: list[Path], where: Node | Bench) -> dict[str, float]:
    """Once, under xMIG or natively."""
    if isinstance(where, Node):
        code, output = where.program(command, name="launches").finish(60)
    else:
        environment = where.natively()
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=60
        )
        code, output = done.returncode, done.stdout
    if code != 0:
        raise Failed(f"launches ended with exit code {code}")
    figures: dict[str, float] = json.loads(output)
    return figures
