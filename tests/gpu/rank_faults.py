"""A data-parallel training of two ranks that loses servers and the daemon, of any rank at any moment, 100 times."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from tests.gpu import collectives, kills
from tests.gpu.bench import Bench, Failed
from tests.gpu.collectives import RANKS, TINY, ready
from xmigd.demo.node import Program
from xmigd.errors import XmigError
from xmigd.measurements import Row

# Of a hundred. A fault is a kernel that really does that; what hangs takes HANG_TIMEOUT to be noticed.
KINDS = {"kill": 45, "illegal address": 32, "both killed": 12, "daemon": 5, "misaligned": 3, "hang": 3}
ERRORS = {"illegal address": 700, "misaligned": 716}
NAMES = {"kill": "kill among other faults"}  # kills alone are another part's
HANG_TIMEOUT = 5.0  # seconds; longer than a rank waits for another that is being recovered
STEPS = 100_000  # more than there is time for
SMALL = ["--batch", "4", "--context", "512"]
PATIENCE = 30.0  # until all ranks have gone on and have standbys
REST = 1.0  # seconds behind every sixteenth step: what is done while standbys start, the native run has to do again
AT_WORK = range(2, 9)  # of the sixteen: a fault falls into one of these, or a few later, and not into the rest
RESERVED = 20.0  # seconds at the end for the native run, and one more for each fault


@dataclass(frozen=True)
class Injected:
    kind: str
    at: float  # time.monotonic()


def measure(bench: Bench) -> Iterator[Row]:
    """First under xMIG, until all faults are injected; then as many steps natively. A rehearsal has none: a null device
    returns nothing that a second step could use."""
    shared = collectives.shares(bench)
    where = collectives.place(bench)
    words = [
        "--deterministic",
        "--warmup",
        "0",
        *(TINY if bench.rehearsal else SMALL),
        *(["--shared"] if shared else []),
    ]
    until, status = bench.scratch / "faults.until", bench.scratch / "faults.status"
    planned = plan(bench.faults, bench.seed)
    injected: list[Injected] = []
    steps = 1 if bench.kind == "null" else STEPS
    under = [*words, "--rest", str(REST), "--steps", str(steps), "--until", str(until), "--status", str(status)]
    with bench.node(devices=collectives.devices(bench), hang_timeout=HANG_TIMEOUT) as node:
        disturb = partial(inject, bench, planned, injected, status, until)
        disturbed = collectives.run(bench, node, under, "ddp.py", disturb, patience=bench.end - time.monotonic())
        found = node.client.get("/v1/recoveries", limit=1000)
        reported = [fault for fault in node.client.get("/v1/faults", limit=1000) if fault["injection"] is not None]
    times = disturbed[0]["times_s"]
    kinds = Counter(one.kind for one in injected)
    about = ", ".join(f"{count} × {kind}" for kind, count in kinds.most_common()) or "nothing"
    about = f"{where}; seed {bench.seed}; {about}; {len(found)} recoveries of ranks, {len(reported)} faults of kernels"
    wrong: list[str] = []
    if not bench.rehearsal:
        native = collectives.run(bench, None, [*words, "--steps", str(len(times))], "ddp.py")
        wrong = collectives.different(native, disturbed, "with faults")
    yield Row(
        name="faults: differences", value=len(wrong), unit="in all", target=0, better="lower",
        conditions=f"{about}; {len(times)} steps of GPT-2 with DDP; different: {', '.join(wrong[:4]) or 'none'}",
    )  # fmt: skip
    yield Row(
        name="faults: survived", value=len(injected), unit="faults", target=len(planned), better="higher",
        conditions=f"{where}; planned: {len(planned)}",
    )  # fmt: skip
    step = median(times)
    stalls = stalls_of(disturbed[0], injected, step)
    for kind in ("kill", "illegal address", "both killed", "hang"):
        if values := stalls.get(kind):
            for name, value in (("median", median(values)), ("worst", max(values))):
                yield Row(
                    name=f"job recovery, {NAMES.get(kind, kind)}: stall, {name}", value=round(value, 3), unit="s",
                    better="lower",
                    conditions=f"{where}; {len(values)} of them; a step takes {1e3 * step:.4g} ms; GPT-2-small, DDP",
                )  # fmt: skip


def plan(count: int, seed: int) -> list[str]:
    """Kinds in the proportions of KINDS, in random order."""
    parts = sum(KINDS.values())
    planned = [kind for kind, part in KINDS.items() for _ in range(max(1, round(count * part / parts)))]
    random.Random(seed).shuffle(planned)
    return planned[:count]


def inject(
    bench: Bench, planned: list[str], injected: list[Injected], status: Path, until: Path, program: Program
) -> None:
    """One after the other, each when all ranks run with warm standbys; then the program is to end."""
    chance = random.Random(bench.seed)
    files = [status.with_suffix(f".{rank}") for rank in range(RANKS)]
    steps = 0
    reserved = RESERVED + bench.faults
    try:
        for kind in planned:
            listed = at_work(program, files, steps)
            if listed is None or (not bench.rehearsal and time.monotonic() > bench.end - reserved):
                return
            while not bench.rehearsal and kills.step(files[0]) % 16 not in AT_WORK and program.process.poll() is None:
                time.sleep(0.001)
            time.sleep(chance.uniform(0, 0.1))
            steps = max(kills.step(file) for file in files)
            at = time.monotonic()
            inject_one(program, kind, listed, chance)
            injected.append(Injected(kind, at))
        at_work(program, files, steps)  # what it was not sent in time would be no fault that it survived
    except (XmigError, OSError, TimeoutError) as error:
        (bench.logs / "faults.injected").write_text(f"{len(injected)} injected, then: {error}\n")
    finally:
        until.touch()


def inject_one(program: Program, kind: str, ranks: list[dict[str, Any]], chance: random.Random) -> None:
    one = chance.choice(ranks)
    if kind == "daemon":
        program.node.kill()
        program.node.start()
    elif kind in ("kill", "both killed"):
        for each in ranks if kind == "both killed" else [one]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each["server_pid"], signal.SIGKILL)
    else:
        body = {"kind": "hang" if kind == "hang" else "fault", "point": "record" if kind != "hang" else "kernel",
                "sequence": 0, "error": ERRORS.get(kind, 700), "process": one["id"]}  # fmt: skip
        program.node.client.post(f"/v1/jobs/{program.job}/faults:inject", body)


def at_work(program: Program, files: list[Path], steps: int) -> list[dict[str, Any]] | None:
    """The ranks' processes, once all have done steps since the last fault, and have warm standbys. None: it has ended.
    Raises Failed."""
    end = time.monotonic() + PATIENCE
    while program.process.poll() is None:
        if min(kills.step(file) for file in files) > steps + 1:
            with contextlib.suppress(XmigError):  # a daemon that has just come
                if (listed := ready(program, RANKS)) is not None:
                    return listed
        if time.monotonic() > end:
            raise Failed(f"after a fault at step {steps} the ranks do not go on within {PATIENCE:.0f} s")
        time.sleep(0.005)
    return None


def stalls_of(rank: dict[str, Any], injected: list[Injected], step: float) -> dict[str, list[float]]:
    """By kind: by how much the longest step after each fault was longer than usual."""
    found: dict[str, list[float]] = {}
    for one, following in pairwise([*injected, Injected("", float("inf"))]):
        longest = max(
            (
                time_s
                for time_s, ended in zip(rank["times_s"], rank["ends"], strict=True)
                if one.at < ended < following.at
            ),
            default=step,
        )
        found.setdefault(one.kind, []).append(max(0.0, longest - step))
    return found
