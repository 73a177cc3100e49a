"""A data-parallel training is suspended to host memory and resumed: where it was, packed onto one GPU, and apart."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from tests.gpu import kills
from tests.gpu.bench import Bench, Failed
from tests.gpu.collectives import RANKS
from tests.gpu.rank_faults import at_work
from tests.gpu.rank_losses import Found, attempt, compared, devices_of_two, wait_for, words_of
from xmigd.demo.node import Program
from xmigd.errors import XmigError
from xmigd.measurements import Row

TIMES = 3  # on the same devices
LASTS = 55.0  # seconds from the part's start in which it is suspended again
AFTERWARDS = 50.0
PATIENCE = 30.0  # for one of both
REST = 0.3  # seconds suspended


@dataclass
class Seen:
    """`operations`: verb, where to, and the daemon's answer, of those that succeeded."""

    operations: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)
    ways: list[str] = field(default_factory=list)  # of resumptions
    began: list[tuple[str, float]] = field(default_factory=list)  # of resumptions, time.monotonic()
    held: list[int] = field(default_factory=list)  # bytes on devices meanwhile


def measure(bench: Bench) -> Iterator[Row]:
    began = time.monotonic()
    devices = devices_of_two(bench)
    end = began + LASTS if bench.rehearsal else min(began + LASTS, bench.end - AFTERWARDS)
    words = words_of(bench)
    found, seen = Found(), Seen()
    plan: list[tuple[str, list[str]]] = [("the same devices", [])] * (1 if bench.rehearsal else TIMES)
    plan += [("one device", devices[:1]), ("a device each again", devices[:RANKS])]
    if len(devices) >= 2 * RANKS:
        plan.insert(TIMES, ("other devices", devices[RANKS : 2 * RANKS]))
    with bench.node(devices=",".join(devices)) as node:
        trained = attempt(bench, node, found, words, partial(in_turn, plan, end, devices, found, seen))
    wrong = compared(bench, words, trained, found.errors, "with suspensions")
    where = f"{RANKS} ranks, each on a GPU of its own, GPT-2-small with DDP; to host memory"
    done = list(dict.fromkeys(seen.ways))
    ways = ", ".join(f"{seen.ways.count(way)} × on {way}" for way in done) or "none"
    left = len(plan) - len(seen.ways)
    errors = f"; errors: {'; '.join([*found.errors, *found.notes][:3])[:500]}" if found.errors or found.notes else ""
    yield Row(
        name="job suspension: differences", value=len(wrong), unit="in all", target=0, better="lower",
        conditions=f"{where}; resumed: {ways}{f'; {left} left out' if left else ''}; "
        f"{0 if trained is None else len(trained[0]['times_s'])} steps; on devices meanwhile: "
        f"{max(seen.held, default=0) >> 20} MiB; different: {', '.join(wrong[:4]) or 'none'}{errors}",
    )  # fmt: skip
    suspended = [one for verb, _, one in seen.operations if verb == "suspend"]
    if suspended:
        sizes = [(one["result"]["total_bytes"] or 0) >> 20 for one in suspended]
        about = f"{where}; {len(suspended)} of them; all ranks together: {median(sizes):.0f} MiB (median)"
        yield times_of("job suspension: time", suspended, f"{about}; from the request to its end")
        stood = sorted(one["result"]["downtime_ms"] for one in suspended if one["result"]["downtime_ms"] is not None)
        if stood:
            yield Row(
                name="job suspension: standstill", value=round(median(stood), 1), unit="ms", better="lower",
                conditions=f"{about}; of the rank that stood longest until it was suspended; worst {stood[-1]:.0f} ms",
            )  # fmt: skip
    for way in done:
        resumed = [one for verb, to, one in seen.operations if (verb, to) == ("resume", way)]
        if not resumed:
            continue
        name = "job resumption: time" if way == plan[0][0] else f"job resumption on {way}: time"
        steps = [] if trained is None else [first_step(trained, at) for to, at in seen.began if to == way]
        until = [f"{each:.3g}" for each in steps if each is not None]
        yield times_of(
            name, resumed, f"{where}; {len(resumed)} of them, on {way}; from the request to its end; until a step was "
            f"done, s: {', '.join(until) or 'not known'}",
        )  # fmt: skip


def times_of(name: str, operations: list[dict[str, Any]], about: str) -> Row:
    times = sorted(one["ended_at"] - one["created_at"] for one in operations)
    return Row(
        name=name, value=round(median(times), 3), unit="s", better="lower",
        conditions=f"{about}; median, worst {times[-1]:.3g} s",
    )  # fmt: skip


def first_step(trained: list[dict[str, Any]], at: float) -> float | None:
    """Seconds from a moment until each rank has ended a step."""
    after = [next((end - at for end in rank["ends"] if end > at), None) for rank in trained]
    return max((each for each in after if each is not None), default=None)


def in_turn(
    plan: list[tuple[str, list[str]]],
    end: float,
    devices: list[str],
    found: Found,
    seen: Seen,
    status: Path,
    program: Program,
) -> None:
    """Suspend it, and resume it elsewhere, each time when it has gone on. Raises Failed."""
    client = program.node.client
    files = [status.with_suffix(f".{rank}") for rank in range(RANKS)]
    steps = 0
    for number, (way, on) in enumerate(plan):
        listed = at_work(program, files, steps)
        if listed is None:
            raise Failed("the job ended by itself")
        if number > 0 and time.monotonic() > end:
            return
        steps = max(kills.step(file) for file in files)
        # Where devices are named it is a rank that stands for all: torchrun's own process, which sees all devices, is
        # in the job, too, and cannot go to one.
        rank = next(one["id"] for one in listed if one["snapshots"] is not None)
        whom = f"/v1/processes/{rank}" if on else f"/v1/jobs/{program.job}"
        operation = wait_for(program, client.post(f"{whom}:suspend", {"to": "host"}), "a suspension", PATIENCE)
        seen.operations.append(("suspend", way, operation))
        time.sleep(REST)
        seen.held.append(sum(one["held_bytes"] for one in client.get("/v1/devices")))
        at = time.monotonic()
        try:
            operation = wait_for(program, client.post(f"{whom}:resume", {"devices": on}), "a resumption", PATIENCE)
        except XmigError as error:
            found.notes.append(f"not resumed on {way}: {' '.join(str(error).split())}")
            # It is as suspended as before, and can go on with a device for each rank.
            back = client.post(f"/v1/processes/{rank}:resume", {"devices": devices[:RANKS]})
            wait_for(program, back, "a resumption afterwards", PATIENCE)
            continue
        seen.operations.append(("resume", way, operation))
        seen.ways.append(way)
        seen.began.append((way, at))
    if at_work(program, files, steps) is None:
        raise Failed("the job ended by itself")
