"""Moves of programs between two nodes of this machine, with faults at random: what they leave wrong."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from tests.bench.lives import Wrong
from tests.harness import wait_until
from tests.transfers.nodes import pair, wait_for_lines
from tests.transfers.storm import Storm, compared
from xmigd.measurements import Row
from xmigd.native import find_native_dir

PAIRS = 2  # of nodes, at once: most of the time is spent waiting


@dataclass
class Seen:
    """Of all pairs."""

    moves: int  # that are wanted
    over: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    moved: int = 0
    attempts: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    differences: int = 0
    twice: int = 0
    stood: list[float] = field(default_factory=list)

    def note(self, storm: Storm, before: int) -> None:
        with self.lock:
            self.attempts += 1
            self.moved += storm.moved - before
            print(f"{self.attempts} attempts, {self.moved} moved", flush=True)
            if self.moved >= self.moves:
                self.over.set()


def measure(folder: Path, moves: int) -> Iterator[Row]:
    """Rows for checkpoints. SIGINT ends it early: the rows say how many there were. Raises Wrong: a program is lost, or
    something comes to no end."""
    native_dir, seed, began = find_native_dir(None), random.randrange(1 << 32), time.monotonic()
    seen = Seen(moves)
    signal.signal(signal.SIGINT, lambda *_: seen.over.set())

    def run(number: int) -> None:
        place = folder / str(number)
        place.mkdir()
        try:
            _one_pair(native_dir, place, seed + number, seen)
        finally:
            seen.over.set()

    with ThreadPoolExecutor(PAIRS) as pool:
        for done in [pool.submit(run, number) for number in range(PAIRS)]:
            done.result()
    outcomes = ", ".join(f"{what} {count}" for what, count in sorted(seen.outcomes.items()))
    easy = {what: seen.outcomes[f"{what}: moved"] for what in ("none", "slow")}
    hard = seen.moved - sum(easy.values())
    conditions = (
        f"{seen.moved} moves ({hard} with a daemon killed or a link unplugged, {easy['slow']} over a slow link, "
        f"{easy['none']} without a fault) in {seen.attempts} attempts of {PAIRS} small programs, no training, "
        f"{seen.steps} steps, "
        f"{time.monotonic() - began:.0f} s; {outcomes}; seed {seed}; cpu devices, nodes are namespaces of one machine, "
        "each with its own network, processes, mounts and daemon"
    )
    figures = {
        "differences": (seen.differences, "lines"),
        "double lives": (seen.twice, "steps that were written twice, or out of order"),
        "losses": (0, "attempts after which a program ran on no node; a run with one ends there, without rows"),
    }
    for name, (value, what) in figures.items():
        yield Row(name=f"moves between nodes with faults: {name}", value=value, unit="in all", target=0, better="lower",
                  conditions=f"{what}; {conditions}")  # fmt: skip
    if seen.stood:
        stood = f"median, slow links included; worst {max(seen.stood) / 1e3:.1f} s; 2 MB of device memory"
        yield Row(name="moves between nodes with faults: standstill", value=round(median(seen.stood) / 1e3, 3),
                  unit="s", better="lower",
                  conditions=f"{stood}, on a machine that does other work; {conditions}")  # fmt: skip


def _one_pair(native_dir: Path, folder: Path, seed: int, seen: Seen) -> None:
    """Until enough was seen. Raises Wrong."""
    output = folder / "steps"
    with pair(native_dir) as nodes:
        program = nodes[0].start_program(native_dir, output, 0.01, steps=100_000_000)
        wait_for_lines(output, 10)
        program.until("running")
        storm = Storm(nodes, random.Random(seed))
        try:
            while not seen.over.is_set():
                before = storm.moved
                storm.attempt(output)
                seen.note(storm, before)
        except AssertionError as error:
            logs = " | ".join(f"{node.name}: {node.log.read_text()[-6000:]}" for node in nodes)
            raise Wrong(f"seed {seed}: {error}; {logs}") from None
        output.with_suffix(".stop").touch()
        wait_until(lambda: not any(node.lives() for node in nodes), "the program has ended")
        steps = [int(line.split()[0]) for line in output.read_text().splitlines()]
        rows = [row for node in nodes for row in node.client.get("/v1/transfers", limit=1000)]
        differences = compared(nodes, native_dir, output, folder)
        with seen.lock:
            seen.outcomes += storm.outcomes
            seen.steps += len(steps)
            seen.twice += sum(step != place for place, step in enumerate(steps))
            seen.differences += differences
            seen.stood += [row["standstill_ms"] for row in rows if row["standstill_ms"] is not None]
