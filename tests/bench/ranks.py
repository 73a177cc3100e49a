"""How long all ranks of a job stand still when the server of one is killed, and what each further rank adds to that."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import signal
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import linear_regression, median
from typing import Any

from tests.bench.lives import Wrong
from tests.bench.native import Failed, Programs
from xmigd.demo.node import Node, Program
from xmigd.measurements import Row

RANKS = (2, 4, 8, 16, 32, 64)
DEVICES = "cpu:0,cpu:1"
PAUSE_MS = 20  # between two steps of a rank
PATIENCE = 120.0
KILLS = 9
STEPS = 8190  # of ranks.c


def measure(programs: Programs) -> Iterator[Row]:
    """One row: the slope over the numbers of ranks."""
    measured = {ranks: stalls(programs, ranks) for ranks in RANKS}
    medians = {ranks: 1000 * median(each) for ranks, each in measured.items()}
    slope, base = linear_regression(list(medians), list(medians.values()))
    each = ", ".join(f"{ranks}: {medians[ranks]:.0f} (worst {1000 * max(measured[ranks]):.0f})" for ranks in RANKS)
    yield Row(
        name="recovery by ranks", value=round(slope, 2), unit="ms per rank", better="lower",
        conditions=f"cpu devices, {os.cpu_count()} processors for all ranks and servers; from SIGKILL of one rank's "
        f"server until all ranks have gone on, a step every {PAUSE_MS} ms, median of {KILLS} kills, ms: {each}; "
        f"least squares, {base:.0f} ms without ranks",
    )  # fmt: skip


def stalls(programs: Programs, ranks: int) -> list[float]:
    """Of each kill: seconds until the last rank had gone on."""
    chance = random.Random(ranks)
    with programs.node(DEVICES, device_memory=1 << 28) as node, started(programs, node, ranks) as (program, done):
        found = []
        for _ in range(KILLS):
            listed = {one["pid"]: one for one in ready(node, program, ranks)}
            time.sleep(chance.uniform(0.2, 0.6))
            rank = chance.randrange(ranks)
            victim, count = listed[done.process(rank)], done.count(rank)
            at, now = time.monotonic(), time.time()
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim["server_pid"], signal.SIGKILL)
            # Its old server may have answered one more, of which the rank had not heard.
            while done.time(rank, count) < at + resumed(node, victim["id"], now) / 2:
                count += 1
            found.append(max(done.time(each, count) for each in range(ranks)) - at)
        return found


def resumed(node: Node, process: str, killed: float) -> float:
    """Seconds from the kill until the daemon knew that the process had a new server that was as far. Raises Failed."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        last = node.client.get("/v1/recoveries", process=process, limit=1)
        if last and last[0]["at"] >= killed and last[0]["resumed_ms"] is not None:
            return float(last[0]["at"] - killed + last[0]["resumed_ms"] / 1000)
        time.sleep(0.02)
    raise Failed("a kill was followed by no recovery")


@contextmanager
def started(programs: Programs, node: Node, ranks: int) -> Iterator[tuple[Program, Done]]:
    """The job, whose ranks are at work, and what they have done. Its sums were right, or it raises Wrong."""
    file = node.folder / "ranks"
    command: list[str | Path] = [programs.built("ranks"), str(ranks), file, str(PAUSE_MS)]
    program = node.program(command, name="ranks", stdin=subprocess.PIPE)
    ready(node, program, ranks)
    yield program, Done(file)
    code, output = program.finish(PATIENCE)  # it ends with its standard input
    if code != 0:
        raise Wrong(f"the sums of {ranks} ranks: exit code {code}: {output[-300:]}")


def ready(node: Node, program: Program, ranks: int) -> list[dict[str, Any]]:
    """The ranks' processes, once all run, each with a warm standby. Raises Failed."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and program.process.poll() is None:
        found = node.client.get("/v1/processes", job=program.job, limit=1000)
        if sum(one["state"] == "running" and one["standby"] == "warm" for one in found) == ranks:
            return list(found)
        time.sleep(0.05)
    raise Failed(f"of {ranks} ranks not all have a server and a standby; {program.lines()[-3:]}")


class Done:
    """What ranks.c writes down."""

    def __init__(self, file: Path) -> None:
        with file.open("rb") as opened:
            self._map = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)

    def process(self, rank: int) -> int:
        return self._number(rank, 0)

    def count(self, rank: int) -> int:
        """Steps that this rank has done."""
        return self._number(rank, 1)

    def time(self, rank: int, step: int) -> float:
        """When it was done with this step, from 0 on. Waits for it. Raises Failed."""
        end = time.monotonic() + PATIENCE
        while self.count(rank) <= step:
            if time.monotonic() > end:
                raise Failed(f"rank {rank} does not go on after step {step}")
            time.sleep(0.005)
        return float(struct.unpack_from("<d", self._map, self._at(rank, 2 + step % STEPS))[0])

    def _number(self, rank: int, field: int) -> int:
        return int(struct.unpack_from("<Q", self._map, self._at(rank, field))[0])

    def _at(self, rank: int, field: int) -> int:
        return 8 * (rank * (2 + STEPS) + field)
