"""Jobs of one GPU at the same time, through MPS: what their servers do as its clients, and what that gains.

Each step reports alone: one that fails has a row that says why, and the next one is measured.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tests.gpu.bench import Bench, Failed, Outcome, Running, wait_until
from tests.gpu.cases import BUGS, PATIENCE_FOR_FAULTS, TINY_GPT, Case
from tests.gpu.compare import differences
from tests.gpu.kills import step
from tests.gpu.sharing import DECODER, MPS, TRAINING, Pair, of, quietly, together, under, under_mps
from xmigd.demo.node import Node
from xmigd.errors import XmigError
from xmigd.measurements import Row

SECONDS = 6.0  # of each pair
SHARE = 40  # percent of the multiprocessors, for the training beside the decoder
P99 = 1.15  # times alone, of the critical job
PATIENCE = 300.0  # seconds until a program has begun
BEGUN = 20  # steps after which something is done to a program
TOGETHER = Case(
    "mps-training", "gpt2", "GPT-2, 4 layers of 512",
    "--batch 2 --context 128 --layers 4 --width 512 --heads 8 --warmup 0 --steps 2000 --deterministic",
    f"{TINY_GPT} --warmup 0 --steps 400", patience=PATIENCE_FOR_FAULTS,
)  # fmt: skip
STANDIN = Path(__file__).parent.parent / "mps" / "bin"


def faults(bench: Bench) -> Iterator[Row]:
    """What is done to one of two trainings; one step that fails hides no other one."""
    acts = {
        "a server killed": kill_server, "an illegal address": illegal_address, "the MPS server killed": kill_mps
    }  # fmt: skip
    native = bench.native(TOGETHER)
    for name, act in acts.items():
        try:
            with rehearsed(bench):
                yield from beside(bench, native, name, act)
        except (XmigError, OSError, TimeoutError) as error:
            yield Row(name=f"MPS, {name}: failed", value=1, unit="steps", target=0, better="lower",
                      conditions=str(error)[:400].replace("|", "/"))  # fmt: skip


@contextlib.contextmanager
def rehearsed(bench: Bench) -> Iterator[None]:
    """A rehearsal has no MPS but a stand-in."""
    before = os.environ["PATH"]
    if bench.rehearsal:
        os.environ["PATH"] = f"{STANDIN}:{before}"
    try:
        yield
    finally:
        os.environ["PATH"] = before


@contextlib.contextmanager
def shared_node(bench: Bench) -> Iterator[Node]:
    """Raises Failed: its device is not shared through MPS."""
    with bench.node(mps_devices=f"{bench.kind}:{bench.gpu}") as node:
        yield node


def is_client(running: Running) -> dict[str, Any]:
    """Raises Failed: its server is no client of MPS."""
    assert running.program is not None
    program = running.program
    (found,) = program.node.client.get(f"/v1/jobs/{program.job}/sharing")["processes"]
    if not found["mps"]:
        (device,) = program.node.client.get("/v1/devices")
        raise Failed(f"its server is no client of MPS: {found['without_mps']}; {device['mps']} {device['mps_why']}")
    return dict(found)


def beside(bench: Bench, native: Outcome, name: str, act: Callable[[Running, Running], None]) -> Iterator[Row]:
    """Two trainings at the same time. Something is done to the first; both end as natively."""
    with shared_node(bench) as node, contextlib.ExitStack() as stack:
        status = [bench.logs / f"mps-{name.replace(' ', '-')}-{number}.status" for number in range(2)]
        both = [stack.enter_context(bench.started(TOGETHER, node, f"--turns 1 --status {each}")) for each in status]
        for running in both:
            running.imported()
        for running in both:
            running.begin()
        for running, file in zip(both, status, strict=True):
            wait_until(partial(has_begun, running, file), "both have begun", PATIENCE)
            is_client(running)
        act(*both)
        outcomes = [running.finish() for running in both]
        faults = [f"{fault['kind']}: {fault['text']}" for outcome in outcomes for fault in outcome.faults]
        yield from rows(name, native, outcomes, "; ".join(faults))


def rows(name: str, native: Outcome, outcomes: list[Outcome], reported: str) -> Iterator[Row]:
    """Of the first, to which something was done, and of those beside it."""
    for who, outcome in zip(("it", "its neighbour"), outcomes, strict=True):
        found = differences(native.result, outcome.result)
        done = [r for r in outcome.recoveries if r["resumed_ms"] is not None]
        inexact = sum(r["exact"] is False for r in done)
        yield Row(
            name=f"MPS, {name}: differences of {who}", value=len(found), unit="in all", target=0, better="lower",
            conditions=f"{len(done)} recoveries, {inexact} not exact; {reported[:300]}".replace("|", "/"),
        )  # fmt: skip
        if done:
            slowest = max(done, key=lambda r: float(r["resumed_ms"]))
            yield Row(
                name=f"MPS, {name}: longest recovery of {who}", value=round(float(slowest["resumed_ms"]), 1), unit="ms",
                better="lower", conditions=f"{slowest['cause']}; standby {slowest['standby']}".replace("|", "/"),
            )  # fmt: skip


def has_begun(running: Running, status: Path) -> bool:
    if running.process.poll() is not None:
        running.finish()
        raise Failed("it was over too soon")
    info = None if running.program is None else running.program.info()
    return info is not None and info["standby"] == "warm" and step(status) >= BEGUN


def kill_server(first: Running, _: Running) -> None:
    assert first.program is not None
    os.kill(first.program.until("running")["server_pid"], signal.SIGKILL)


def illegal_address(first: Running, _: Running) -> None:
    assert first.program is not None
    first.program.inject("fault", point="record", error=700)


def kill_mps(first: Running, _: Running) -> None:
    """The one of the servers, not of the standbys: it is older."""
    assert first.program is not None
    folder = first.program.node.folder / "mps"
    identity = min(folder.glob("*.json"), key=lambda each: int(each.stem.rpartition(".")[2]))
    _, *servers = json.loads(identity.read_text())
    if not servers:
        raise Failed("no MPS server is known")
    os.kill(int(servers[0]), signal.SIGKILL)


def own_bugs(bench: Bench) -> Iterator[Row]:
    """A program whose kernels fault, by its own mistake, beside a training."""
    native, expected = bench.native(TOGETHER), bench.native(BUGS)
    with rehearsed(bench), shared_node(bench) as node, contextlib.ExitStack() as stack:
        status = bench.logs / "mps-neighbour.status"
        neighbour = stack.enter_context(bench.started(TOGETHER, node, f"--status {status}"))
        wait_until(lambda: has_begun(neighbour, status), "it has begun", PATIENCE)
        is_client(neighbour)
        bugs = bench.under(node, BUGS)
        outcome = neighbour.finish()
    found = differences(expected.result, bugs.result)
    yield Row(
        name="MPS, a program's own bugs: differences of it", value=len(found), unit="in all", target=0, better="lower",
        conditions=f"{BUGS.reported}; {'; '.join(found[:3])}".replace("|", "/"),
    )  # fmt: skip
    differing = differences(native.result, outcome.result)
    done = [float(r["resumed_ms"]) for r in outcome.recoveries if r["resumed_ms"] is not None]
    yield Row(
        name="MPS, a program's own bugs: differences of its neighbour", value=len(differing), unit="in all", target=0,
        better="lower", conditions=f"{len(done)} recoveries, the longest {max(done, default=0):.0f} ms",
    )  # fmt: skip


def pairs(bench: Bench) -> Iterator[Row]:
    """A decoder beside a training, as in `sharing`: xMIG through MPS against MPS alone."""
    more = "" if bench.rehearsal else f"--seconds {SECONDS:g}"
    with bench.started(DECODER, None, more) as decoder, quietly(decoder):
        alone = of(decoder, None)
    with bench.started(TRAINING, None, more) as training, quietly(training):
        trained = of(None, training)
    ways: dict[str, Pair] = {}
    if not bench.rehearsal:
        try:
            ways["MPS"] = under_mps(bench, more)
        except Failed as error:
            raise Failed(f"{MPS} cannot be used here: {error}") from None
    with rehearsed(bench), shared_node(bench) as node:
        with bench.started(DECODER, node, more) as first, bench.started(TRAINING, node, more) as second:
            for running in (second, first):
                running.ready()
            is_client(first)
            ways["xMIG through MPS"] = together(first, second)
        classes = {"priority": "critical"}, {"priority": "best-effort"}
        ways["xMIG through MPS, critical and best-effort"] = under(bench, node, more, *classes)
        ways[f"xMIG through MPS, training with {SHARE} % of the SMs"] = under(
            bench, node, more, {}, {"sm_share": SHARE}
        )
    conditions = f"{DECODER.reported} (Poisson), beside {TRAINING.reported}; {SECONDS:g} s each, one run"
    mps = ways.get("MPS")
    for way, pair in ways.items():
        ours = way == "xMIG through MPS"
        throughput = pair.requests / max(alone.requests, 1e-9) + pair.steps / max(trained.steps, 1e-9)
        least = None if mps is None else mps.requests / alone.requests + mps.steps / trained.steps
        yield Row(
            name=f"MPS, throughput of both, {way}", value=round(throughput, 2), unit="× alone", better="higher",
            target=round(least, 2) if ours and least is not None else None,
            conditions=f"{pair.steps:.2f} steps/s of {trained.steps:.2f}; {conditions}",
        )  # fmt: skip
        yield Row(
            name=f"MPS, decoder's P99, {way}", value=round(pair.p99 / alone.p99, 2), unit="× alone", better="lower",
            target=P99 if ours else None,
            conditions=f"P50 {pair.p50:.2f}, P99 {pair.p99:.2f} ms, alone {alone.p99:.2f} ms; {conditions}",
        )  # fmt: skip
