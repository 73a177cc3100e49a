"""Recoveries of single ranks, put together to those of all ranks. Pure.

Ranks of a group recover together: none goes on before the servers of all have ended. So recoveries that overlap are
parts of the same one, and the next begins when all run again.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

Row = Mapping[str, Any]
PHASES = ("detected_ms", "standby_ready_ms", "mapped_ms", "restored_ms", "replayed_ms", "resumed_ms")


def together(rows: Iterable[Row], recovering: Collection[str]) -> list[list[Row]]:
    """Newest first; of each, the recoveries in the order in which they began. `recovering`: processes that do now; what
    another daemon has left unfinished is over."""
    found: list[list[Row]] = []
    until = -math.inf
    for row in sorted(rows, key=lambda row: (row["at"], row["id"])):
        if row["at"] > until:
            found.append([])
        found[-1].append(row)
        runs = row["outcome"] == "running" and row["process_id"] in recovering
        until = max(until, math.inf if runs else row["at"] + _lasted(row) / 1e3)
    return found[::-1]


def _lasted(row: Row) -> float:
    """Milliseconds, as far as it is known."""
    return max(row[phase] or 0.0 for phase in PHASES)


def outcome(rows: Iterable[Row]) -> str:
    """Of all: the worst."""
    outcomes = {row["outcome"] for row in rows}
    return next(one for one in ("lost", "running", "interrupted", "resumed", "abandoned") if one in outcomes)
