"""Moves between two nodes with faults injected at random: daemons are killed at any place, links are down and slow.
After each one the program lives on exactly one node."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from tests.harness import wait_until
from tests.migration.moves import OVER as ENDED
from tests.transfers.nodes import TransferNode, wait_for_lines
from xmigd.client import Refused
from xmigd.errors import XmigError
from xmigd.failpoints import Moment, Write
from xmigd.transfers.repository import OVER

SETTLED_WITHIN = 180.0  # seconds after a fault is over, on a loaded machine
WRITES = [write for write in get_args(Write) if write.startswith("transfers.")]
PLACES = [f"{moment} {write}" for write in WRITES for moment in get_args(Moment)]
FAULTS = {
    "none": 3,
    "killed at a write": 3,
    "killed": 2,
    "unplugged": 2,
    "unplugged for long": 1,
    "slow": 1,
}  # how often
# Who dies at which write, and whether the program has moved when all are back.
SOURCE, TARGET = 0, 1
DEATHS = [
    (SOURCE, "write.begun transfers.committed", False),
    (SOURCE, "write.committed transfers.committed", True),
    (TARGET, "write.committed transfers.prepared", False),
    (TARGET, "write.committed transfers.going", True),
]


@dataclass
class Storm:
    nodes: list[TransferNode]
    random: random.Random
    programs: int = 1  # of the job
    moved: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def attempt(self, output: Path) -> None:
        """One move of the program that writes this, and what is done to it."""
        here = self.where()
        source = self.nodes[here]
        target = self.nodes[1 - here]
        fault = self.random.choices([*FAULTS], [*FAULTS.values()])[0]
        before = len(output.read_text().splitlines())
        refused = ""
        with self.fault(fault):
            try:
                job = source.lives()[0]["job_id"]
                operation = source.move(job, target.name)
                source.client.get(f"/v1/operations/{operation['id']}/wait", timeout=self.random.uniform(1, 20))
            except (Refused, XmigError, OSError) as error:
                refused = str(error)
        self.settle()
        after = self.where()
        self.moved += after != here
        assert fault != "none" or after != here, f"{refused} {self.describe()}"
        self.outcomes[f"{fault}: {'moved' if after != here else 'stayed'}"] += 1
        wait_for_lines(output, before + 2)  # it goes on

    @contextlib.contextmanager
    def fault(self, kind: str) -> Iterator[None]:
        victim = self.random.choice(self.nodes)
        delay = self.random.uniform(0, 2.5)
        if kind == "killed at a write":
            victim.dies_at(self.random.choice(PLACES))
        timer: threading.Timer | None = None
        if kind == "killed":
            timer = threading.Timer(delay, victim.process.kill)  # type: ignore[union-attr]
        elif kind.startswith("unplugged"):
            timer = threading.Timer(delay, victim.network.unplug)
        elif kind == "slow":
            victim.network.slow(self.random.choice((2000, 20000)))
        if timer is not None:
            timer.start()
        try:
            yield
        finally:
            if timer is not None:
                timer.join()
            time.sleep(self.random.uniform(0, 12) if kind == "unplugged for long" else self.random.uniform(0, 1))
            if kind.startswith("unplugged"):
                victim.network.plug()
            elif kind == "slow":
                victim.network.fast()
            for node in self.nodes:
                (node.folder / "point").unlink(missing_ok=True)
            time.sleep(0.05)
            for node in self.nodes:
                if kind == "killed" and node is victim:
                    node.process.wait(60)  # type: ignore[union-attr]
                if node.has_died():
                    node.starts_again()

    def one_dies(self, who: int, point: str, moves: bool) -> None:
        """As one of `DEATHS` has it."""
        here = self.where()
        source, target = self.nodes[here], self.nodes[1 - here]
        victim = source if who == SOURCE else target
        victim.dies_at(point)
        with contextlib.suppress(Refused, XmigError, OSError):
            source.move(source.lives()[0]["job_id"], target.name)
        wait_until(victim.has_died, f"it comes to {point}")
        victim.starts_again()
        self.settle()
        assert (self.where() != here) is moves, f"{point}: {self.describe()}"

    def settle(self) -> None:
        """Nothing is under way any more, and the program runs on one node."""

        def settled() -> bool:
            with contextlib.suppress(Refused, XmigError, OSError):
                rows = [row for node in self.nodes for row in node.transfers()]
                begun = [row for node in self.nodes for row in node.client.get("/v1/operations")]
                over = all(row["state"] in OVER for row in rows) and all(row["state"] in ENDED for row in begun)
                count = sum(len(node.lives()) for node in self.nodes)
                return over and count == self.programs and self._runs()
            return False

        try:
            wait_until(settled, "it is settled", SETTLED_WITHIN)
        except (AssertionError, TimeoutError):
            raise AssertionError(f"not settled: {self.describe()}") from None

    def describe(self) -> Any:
        return [(node.name, node.transfers()[:2], node.lives()) for node in self.nodes]

    def _runs(self) -> bool:
        return all(each["state"] == "running" for node in self.nodes for each in node.lives())

    def where(self) -> int:
        found = [number for number, node in enumerate(self.nodes) if node.lives()]
        assert len(found) == 1, self.describe()
        return found[0]


def compared(nodes: list[TransferNode], native_dir: Path, output: Path, folder: Path) -> int:
    """Lines of what the program has written that differ from those of a run that nobody disturbs."""
    written = output.read_text().splitlines()
    undisturbed = folder / "undisturbed"
    undisturbed.with_suffix(".go").touch()
    assert (
        nodes[0].start_program(native_dir, undisturbed, 0, steps=len(written)).process.wait(120 + len(written) / 50)
        == 0
    )
    expected = undisturbed.read_text().splitlines()
    return abs(len(written) - len(expected)) + sum(a != b for a, b in zip(written, expected, strict=False))


def family_ends(nodes: list[TransferNode], native_dir: Path, output: Path) -> None:
    """What family.py has started: each has written to the end what it should, and they could talk all the time."""
    output.with_suffix(".stop").touch()  # that of both
    wait_until(lambda: not any(node.lives() for node in nodes), "the program has ended")
    wait_until(Path(f"{output}.talk").exists, "it has written how it went")
    assert Path(f"{output}.talk").read_text() == "True 0 (0, 0)"
    for each in (output, Path(f"{output}.child")):
        (apart := output.parent / f"as-{each.name}").mkdir()
        assert compared(nodes, native_dir, each, apart) == 0
