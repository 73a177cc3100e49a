"""Two tenants of one GPU: a decoder at a rate of requests, beside a training.

The same pair in one run: each alone, both natively as two processes (time slices of the driver), under MPS, as two
streams of one process; and under xMIG, both of the class normal, and as critical and best-effort.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tests.gpu.bench import Bench, Failed, Running
from tests.gpu.cases import Case
from xmigd.demo.node import Node
from xmigd.measurements import Row

SECONDS = 20.0
MPS = "nvidia-cuda-mps-control"
P99, KEPT = 1.15, 0.7  # of the critical job: times alone; of the best-effort one: of what plain sharing gives it
MOST_ALONE = 50.0  # ms, half of the requests: that is when the next one comes, on average
TINY = "--width 64 --layers 2 --tokens 2 --training-width 64 --batch 8 --rate 20 --seconds 1"
DECODER = Case(
    "shared-decoder", "shared", "a decoder of 24 layers, 20 requests a second of 8 tokens", "--role decoder", TINY
)
TRAINING = Case("shared-training", "shared", "an MLP in training, B=4096, Adam", "--role training", TINY)
BOTH = Case("shared-both", "shared", "both in one process, a stream each", "--role both", TINY)


@dataclass(frozen=True)
class Pair:
    """What came of one way to share."""

    p50: float  # ms
    p99: float
    requests: float  # a second
    steps: float  # a second


def measure(bench: Bench) -> Iterator[Row]:
    more = "" if bench.rehearsal else f"--seconds {SECONDS:g}"
    with bench.started(DECODER, None, more) as decoder, quietly(decoder):
        alone = of(decoder, None)
    if not bench.rehearsal and alone.p50 > MOST_ALONE:
        raise Failed(f"alone, the decoder does not keep up with its requests: half of them take {alone.p50:.0f} ms")
    with bench.started(TRAINING, None, more) as training, quietly(training):
        trained = of(None, training)
    ways: dict[str, Pair] = {}
    if not bench.rehearsal:  # a rehearsal has a node of its own for each native program
        with bench.started(DECODER, None, more) as decoder, bench.started(TRAINING, None, more) as training:
            ways["time slices of the driver"] = together(decoder, training)
        with contextlib.suppress(Failed):
            ways["MPS"] = under_mps(bench, more)
    with bench.started(BOTH, None, more) as both, quietly(both):
        ways["streams of one process"] = of(both, both)
    with bench.node() as node:
        ways["xMIG, both normal"] = under(bench, node, more, {}, {})
        ways["xMIG, critical and best-effort"] = under(
            bench, node, more, {"priority": "critical"}, {"priority": "best-effort"}
        )
    conditions = f"{DECODER.reported} (Poisson), beside {TRAINING.reported}; {SECONDS:g} s each, one run"
    yield Row(name="decoder alone, P99", value=round(alone.p99, 2), unit="ms", better="lower", conditions=conditions)
    yield Row(
        name="training alone", value=round(trained.steps, 2), unit="steps/s", better="higher", conditions=conditions
    )
    for way, pair in ways.items():
        ours = way.startswith("xMIG, critical")
        plain = ways.get("time slices of the driver", ways["xMIG, both normal"])
        yield Row(
            name=f"decoder's P99, {way}", value=round(pair.p99 / alone.p99, 2), unit="× alone", better="lower",
            target=P99 if ours else None, conditions=f"P50 {pair.p50:.2f}, P99 {pair.p99:.2f} ms; {conditions}",
        )  # fmt: skip
        yield Row(
            name=f"training, {way}", value=round(pair.steps / max(plain.steps, 1e-9), 2), unit="× time slices",
            better="higher", target=KEPT if ours else None, conditions=f"{pair.steps:.2f} steps/s; {conditions}",
        )  # fmt: skip
        throughput = pair.requests / max(alone.requests, 1e-9) + pair.steps / max(trained.steps, 1e-9)
        mps = ways.get("MPS")
        least = None if mps is None else mps.requests / alone.requests + mps.steps / trained.steps
        yield Row(
            name=f"throughput of both, {way}", value=round(throughput, 2), unit="× alone", better="higher",
            target=round(least, 2) if ours and least is not None else None,
            conditions="the sum of both, each by its own when it is alone; the target is MPS's",
        )  # fmt: skip


def of(decoder: Running | None, training: Running | None) -> Pair:
    """From their results, once they have ended."""
    p50 = p99 = requests = steps = 0.0
    if decoder is not None:
        result = decoder.finish().result
        latencies = sorted(result["latencies_ms"])
        if not latencies:
            raise Failed("no request came")
        p50, p99 = latencies[len(latencies) // 2], latencies[min(len(latencies) - 1, int(len(latencies) * 0.99))]
        requests = len(latencies) / result["seconds"]
    if training is not None:
        result = training.finish().result
        steps = result["steps"] / result["seconds"]
    return Pair(p50, p99, requests, steps)


@contextlib.contextmanager
def quietly(program: Running) -> Iterator[None]:
    """It is alone."""
    program.ready()
    program.go()
    yield


def together(decoder: Running, training: Running) -> Pair:
    for program in (training, decoder):
        program.ready()
    for program in (training, decoder):
        program.go()
    return of(decoder, training)


def under(bench: Bench, node: Node, more: str, decoder: Mapping[str, object], training: Mapping[str, object]) -> Pair:
    with (
        bench.started(DECODER, node, more, request=decoder) as first,
        bench.started(TRAINING, node, more, request=training) as second,
    ):
        return together(first, second)


def under_mps(bench: Bench, more: str) -> Pair:
    """Raises Failed: it is not here."""
    if shutil.which(MPS) is None:
        raise Failed(f"there is no {MPS}")
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        here = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        subprocess.run([MPS, "-d"], env=os.environ | here, check=True, timeout=30)
        before, bench.environment = bench.environment, {**bench.environment, **here}
        try:
            with bench.started(DECODER, None, more) as decoder, bench.started(TRAINING, None, more) as training:
                return together(decoder, training)
        finally:
            bench.environment = before
            subprocess.run([MPS], input="quit\n", text=True, env=os.environ | here, check=False, timeout=30)
