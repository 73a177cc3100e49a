"""The stall of trainings on a busy machine: two of them on its cores, their servers killed every few seconds."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from tests.bench.lives import Wrong
from tests.bench.native import Failed, Programs
from xmigd.demo import training as demo
from xmigd.demo.node import Node, Program
from xmigd.measurements import Row

BETWEEN_KILLS = 4.0  # seconds, of both trainings together
EPOCHS = 100_000  # more than there is time for


@dataclass
class Seen:
    """What was seen of one training."""

    name: str
    program: Program
    output: Path
    kills: list[float] = field(default_factory=list)  # times of day
    snapshots: dict[int, dict[str, Any]] = field(default_factory=dict)

    def look(self) -> None:
        """The database keeps the last ones only."""
        info = self.program.info()
        if info is None:
            return
        found = self.program.node.client.get(f"/v1/processes/{info['id']}/segments", limit=500)
        self.snapshots |= {each["number"]: each for each in found}

    def kill(self) -> bool:
        info = self.program.info()
        if info is None or info["state"] != "running" or info["server_pid"] is None:
            return False
        at = time.time()
        with contextlib.suppress(ProcessLookupError):
            os.kill(info["server_pid"], signal.SIGKILL)
            self.kills.append(at)
            return True
        return False

    def stalls(self) -> list[tuple[float, float | None]]:
        """From each kill until the program went on, and what was expected, ms."""
        found = []
        recoveries = self.program.recoveries()
        for at in self.kills:
            its = next((r for r in recoveries if abs(r["at"] - at) < BETWEEN_KILLS / 2), None)
            if its is None or its["resumed_ms"] is None:
                raise Failed(f"{self.name}: a kill was followed by no recovery")
            if not its["exact"]:
                raise Wrong(f"{self.name}: a recovery was not exact: {its['differing']} replies differ")
            found.append((1000 * (its["at"] - at) + its["resumed_ms"], its["expected_ms"]))
        return found

    def gaps(self) -> list[float]:
        """Between two snapshots, seconds."""
        listed = [self.snapshots[number] for number in sorted(self.snapshots)]
        return [after["at"] - before["at"] for before, after in pairwise(listed)]

    def losses(self) -> list[str]:
        whole = self.output.read_text().rpartition("\n")[0]
        return [loss for line in whole.splitlines() for loss in json.loads(line).get("losses", ())]


def measure(programs: Programs, seconds: float) -> Iterator[Row]:
    """Rows for the stall of two trainings."""
    with programs.node("cpu:0,cpu:1") as node:
        yield from two_trainings(node, seconds)


def two_trainings(node: Node, seconds: float) -> Iterator[Row]:
    trainings = [Seen(name, demo.start(node, name, EPOCHS), node.folder / f"{name}.out") for name in ("one", "other")]
    for each in trainings:
        each.program.until("running")
    time.sleep(BETWEEN_KILLS)
    began = time.monotonic()
    count = 0
    while time.monotonic() - began < seconds:
        injected = trainings[count % 2]
        if not injected.kill():
            raise Failed(f"{injected.name} was not running when its server was to be killed")
        count += 1
        time.sleep(BETWEEN_KILLS)
        for each in trainings:
            each.look()
    stalls = [stall for each in trainings for stall in each.stalls()]
    gaps = [gap for each in trainings for gap in each.gaps()]
    spent = sum(snapshot["ms"] for each in trainings for snapshot in each.snapshots.values()) / 1000
    for each in trainings:
        each.program.process.kill()
        each.program.process.wait()
    first, second = (each.losses() for each in trainings)
    compared = min(len(first), len(second))
    if compared == 0 or first[:compared] != second[:compared]:
        raise Wrong(f"the trainings' losses differ, of {compared}")
    shared = (
        f"two trainings on {os.cpu_count()} cores, cpu devices, a kill every {BETWEEN_KILLS:g} s, {len(stalls)} kills"
    )
    took = [stall for stall, _ in stalls]
    expected = [value for _, value in stalls if value is not None]
    rows: list[tuple[str, float, str, float | None, str]] = [
        ("two trainings, kill: stall, median", median(took), "ms", None, shared),
        ("two trainings, kill: stall, worst", max(took), "ms", 1000, shared),
        ("two trainings, kill: expected stall, worst", max(expected), "ms", None, f"expected at the kill; {shared}"),
        ("two trainings: gap between snapshots, longest", max(gaps), "s", 2, f"of {len(gaps)}; {shared}"),
        ("two trainings: cost of snapshots", 100 * spent / sum(gaps), "% of time", None,
         f"the processors are shared with the trainings; {shared}"),
        ("two trainings: losses that differ", 0, "in all", 0, f"of {compared}, between the two; {shared}"),
    ]  # fmt: skip
    for name, value, unit, target, conditions in rows:
        yield Row(name=name, value=round(value, 3), unit=unit, target=target, better="lower", conditions=conditions)
