"""A data-parallel step that is captured in a graph, with the collective in it, whose servers are killed while it runs;
beside a native run of as many replays."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from tests.gpu import collectives, kills
from tests.gpu.bench import Bench
from tests.gpu.collectives import RANKS
from tests.gpu.rank_faults import Injected, at_work, stalls_of
from tests.gpu.rank_losses import Found, attempt
from xmigd.demo.node import Program
from xmigd.errors import XmigError
from xmigd.measurements import Row

REPLAYS = 200  # undisturbed, of which the median step is
SETTLED = 10  # of these, not looked at
KILLS = 5
LASTS = 50.0  # seconds from the part's start in which servers are killed
AFTERWARDS = 45.0  # for the end and the native run
PROGRAM = "graph_ranks.py"
SMALL = ["--width", "64", "--batch", "4", "--layers", "2"]


def measure(bench: Bench) -> Iterator[Row]:
    """First under xMIG: replays that are not disturbed, then with kills. Natively as many afterwards."""
    began = time.monotonic()
    end = began + LASTS if bench.rehearsal else min(began + LASTS, bench.end - AFTERWARDS)
    replays = 20 if bench.rehearsal else REPLAYS
    where = collectives.place(bench)
    words = ["--deterministic", *(SMALL if bench.rehearsal else [])]
    words += ["--shared"] if collectives.shares(bench) else []
    found = Found()
    with bench.node(devices=collectives.devices(bench)) as node:
        disturb = partial(kill_some, replays, 2 if bench.rehearsal else KILLS, end, found)
        ran = attempt(bench, node, found, words, disturb, PROGRAM, ["--steps", str(replays)])
        recovered = [one for one in node.client.get("/v1/recoveries", limit=1000) if one["outcome"] == "resumed"]
    native: list[dict[str, Any]] | None = None
    wrong = [error[:80] for error in found.errors[:1]]
    if ran is None:
        wrong = wrong or ["the program did not get to its end"]
    elif not bench.rehearsal:
        try:
            native = collectives.run(bench, None, [*words, "--steps", str(len(ran[0]["times_s"]))], PROGRAM)
            wrong += collectives.different(native, ran, "with kills")
        except XmigError as error:
            wrong.append(f"not compared, natively: {error}")
    about = f"{where}; a step of 4 linear layers in a graph of PyTorch's, with one all-reduce of 64 MiB"
    errors = f"; error: {'; '.join(found.errors[:2])[:500]}" if found.errors else ""
    yield Row(
        name="graphs with collectives: differences", value=len(wrong), unit="in all", target=0, better="lower",
        conditions=f"{about}; {0 if ran is None else len(ran[0]['times_s'])} replays, {len(found.injected)} servers "
        f"killed, of one rank after the other; {len(recovered)} recoveries of ranks; different: "
        f"{', '.join(wrong[:4]) or 'none'}{errors}",
    )  # fmt: skip
    if ran is None:
        return
    step = max(undisturbed(rank, replays) for rank in ran)
    if native is not None:
        beside = max(undisturbed(rank, replays) for rank in native)
        yield Row(
            name="graphs with collectives: step", value=round(step / beside, 3), unit="× native", target=1.0,
            better="lower", conditions=f"{about}; {1e3 * step:.4g} ms, natively {1e3 * beside:.4g}; median of "
            f"{replays - SETTLED} replays, snapshots taken",
        )  # fmt: skip
    if values := stalls_of(ran[0], found.injected, step).get("kill"):
        yield Row(
            name="graphs with collectives, kill: stall, median", value=round(median(values), 3), unit="s",
            better="lower", conditions=f"{about}; of {len(values)}, worst {max(values):.3g} s; beyond a step of "
            f"{1e3 * step:.4g} ms",
        )  # fmt: skip


def undisturbed(rank: dict[str, Any], replays: int) -> float:
    return float(median(rank["times_s"][SETTLED:replays]))


def kill_some(replays: int, count: int, end: float, found: Found, status: Path, program: Program) -> None:
    """Servers, of one rank after the other, each once all have done replays since the last and have warm standbys."""
    chance = random.Random(1)
    files = [status.with_suffix(f".{rank}") for rank in range(RANKS)]
    steps = replays + SETTLED
    for number in range(count):
        listed = at_work(program, files, steps)
        if listed is None or (number > 0 and time.monotonic() > end):
            return
        time.sleep(chance.uniform(0, 0.04))
        steps = max(kills.step(file) for file in files)
        with contextlib.suppress(ProcessLookupError):
            os.kill(listed[number % RANKS]["server_pid"], signal.SIGKILL)
            found.injected.append(Injected("kill", time.monotonic()))
            found.survived += 1
    at_work(program, files, steps)  # it has to go on after the last one, too
