"""Faults of random kind at random places, the same for the same seed: armed in a program before they are due."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from xmigd.demo.node import Program

# What injections (with the CUresult of a fault), and where. A fault is a kernel that really does that.
KINDS = (("kill", 0), ("fault", 700), ("fault", 710), ("fault", 716), ("fault", 719))
POINTS = ("record", "kernel", "copy")


@dataclass(frozen=True)
class Injection:
    kind: str
    error: int
    point: str
    sequence: int  # it is injected at the first fitting record from here on

    @property
    def reported(self) -> int:
        """The error of the fault that it is; 0: the server is just gone."""
        return {"kill": 0, "hang": 702}.get(self.kind, self.error)

    @property
    def name(self) -> str:
        return f"{self.error or self.kind} {self.point}"


def schedule(count: int, first: int, last: int, seed: int, points: Sequence[str] = POINTS) -> list[Injection]:
    """`count` injections between two records of the journal: every kind at every place in turn, in random order."""
    chance = random.Random(seed)
    places = [(kind, error, point) for kind, error in KINDS for point in points]
    chosen = [places[i % len(places)] for i in range(count)]
    chance.shuffle(chosen)
    records = sorted(chance.randint(first, last) for _ in range(count))
    return [Injection(*what, sequence) for what, sequence in zip(chosen, records, strict=True)]


def arm(program: Program, injections: Sequence[Injection]) -> None:
    for one in injections:
        program.inject(one.kind, point=one.point, sequence=one.sequence, error=one.error or 700)
