"""Recoveries: how long they take, what snapshots cost, and what is left after hundreds of kills."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

from tests import harness
from tests.bench.native import Failed, Programs
from xmigd.demo import training as demo
from xmigd.demo.node import Node, Program
from xmigd.measurements import Row

LIVE_MIB = 256
STEP_MS = 2
EPOCHS = 150


class Wrong(Exception):
    """A result was wrong."""


def measure(programs: Programs, runs: int, kills: int) -> Iterator[Row]:
    """Rows for recoveries."""
    yield from first_results(programs, runs)
    with programs.node("cpu:0,cpu:1") as node:
        yield from storm(node, kills)


def first_results(programs: Programs, runs: int) -> Iterator[Row]:
    """From SIGKILL to the first result that the program gets after it."""
    chance = random.Random(1)
    delays: list[float] = []
    with programs.node("cpu:0", device_memory=1 << 30) as node:
        for _ in range(runs):
            words = [programs.built("steps"), programs.kernels, LIVE_MIB, 12, STEP_MS]
            program = node.program([str(word) for word in words], name="steps")
            injected = list(injections(node, program, chance))
            _, output = program.finish()
            if program.process.returncode != 0:
                raise Wrong("a result of the stepping program was wrong after a recovery")
            slow = json.loads(output)[:-1]
            for at in injected:
                first = next((end for begin, end in slow if begin <= at < end or begin >= at), None)
                if first is not None:
                    delays.append(first - at)
    if not delays:
        raise Failed("no recovery fell into a step")
    yield Row(
        name="recovery, SIGKILL to first new result", value=round(1000 * median(delays), 1), unit="ms", target=100,
        better="lower", conditions=f"{LIVE_MIB} MiB live, warm standby, a step every {STEP_MS} ms changes 256 KiB; "
        f"median of {len(delays)}, slowest {1000 * max(delays):.0f} ms",
    )  # fmt: skip


def injections(node: Node, program: Program, chance: random.Random) -> Iterator[float]:
    """Kill its server now and then while it runs; when, in CLOCK_MONOTONIC seconds."""
    program.until("running")
    time.sleep(2)
    while program.process.poll() is None:
        info = program.info()
        if info is None or info["state"] != "running" or info["standby"] != "warm":
            time.sleep(0.005)
            continue
        at = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            os.kill(info["server_pid"], signal.SIGKILL)
            yield at
        time.sleep(chance.uniform(0.8, 1.8))


def storm(node: Node, kills: int) -> Iterator[Row]:
    """One training run with hundreds of kills, beside one without."""
    quiet_program = demo.start(node, "quiet", EPOCHS)
    quiet = demo.finish(node, quiet_program, "quiet")
    yield snapshot_cost(node, quiet_program, quiet)
    harness.wait_until(lambda: harness.held(node).servers == 0, "the servers of the quiet run are gone")
    before = harness.held_at_rest(node)

    chance = random.Random(2)
    program = demo.start(node, "storm", EPOCHS)
    program.until("running")
    done = 0
    while done < kills and program.process.poll() is None:
        info = program.until("running", "ended")
        time.sleep(chance.uniform(0, 1.6) * quiet.seconds / kills)
        if info["state"] == "running" and info["server_pid"] is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(info["server_pid"], signal.SIGKILL)
                done += 1
            wait_for_recovery(program, info)
    try:
        injected = demo.finish(node, program, "storm")
    except subprocess.TimeoutExpired:
        raise Failed("the training run under kills did not end") from None
    differences = sum(a != b for a, b in zip(quiet.losses, injected.losses, strict=True))
    differences += quiet.result["weights"] != injected.result["weights"]
    with contextlib.suppress(AssertionError):
        harness.wait_until(lambda: harness.held(node) == before, "nothing is left", 15)
    after = harness.held(node)
    recoveries = program.recoveries()
    inexact = sum(r["exact"] is False for r in recoveries)
    conditions = f"{done} kills at random moments in one training run of {quiet.result['steps']} steps"
    rows: list[tuple[str, float, str]] = [
        ("differences after the kills", differences, f"losses and weights; {conditions}"),
        ("recoveries that were not exact", inexact, f"of {len(recoveries)}; {conditions}"),
        ("leaked processes", after.servers - before.servers, conditions),
        ("leaked file descriptors", after.descriptors - before.descriptors, f"of the daemon; {conditions}"),
        ("leaked memfds", after.memfds - before.memfds, f"of the daemon and servers; {conditions}"),
    ]
    if done < kills:
        raise Failed(f"the training run was over after {done} kills")
    for name, value, reported in rows:
        yield Row(name=name, value=value, unit="in all", target=0, better="lower", conditions=reported)


def wait_for_recovery(program: Program, before: dict[str, Any]) -> None:
    """Until another server has it, or it has ended."""
    while program.process.poll() is None:
        info = program.info()
        if info is not None and info["state"] == "running" and info["server_pid"] != before["server_pid"]:
            return
        time.sleep(0.002)


def snapshot_cost(node: Node, program: Program, quiet: demo.Training) -> Row:
    """The share of an undisturbed run's time that its snapshots took."""
    info = program.info()
    assert info is not None
    segments = node.client.get(f"/v1/processes/{info['id']}/segments", limit=1000)
    share = sum(s["ms"] for s in segments) / 1000 / quiet.seconds
    return Row(
        name="cost of snapshots", value=round(100 * share, 3), unit="% of time", target=1, better="lower",
        conditions=f"{len(segments)} snapshots in a training run of {quiet.seconds:.1f} s",
    )  # fmt: skip
