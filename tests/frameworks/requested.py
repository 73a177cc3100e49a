"""What programs requested of the driver and did not get: docs/coverage.md says what counts."""

from __future__ import annotations

import re
from pathlib import Path

import table


def not_covered(requested: Path) -> list[str]:
    """The lines of an XMIG_REQUESTED file that name something which was requested in vain, and is missed."""
    return sorted(line for line in set(requested.read_text().splitlines()) if not _fine(line))


def _fine(line: str) -> bool:
    kind, _, name = line.partition(" ")
    if kind == "missing":
        return any(re.fullmatch(pattern, name) for pattern in table.UNKNOWN_NAMES)
    return kind == "called" or (kind == "table" and name in table.DENIED_TABLES)


def called(requested: Path) -> set[str]:
    """The exported functions that were called."""
    return {line.removeprefix("called ") for line in requested.read_text().splitlines() if line.startswith("called ")}
