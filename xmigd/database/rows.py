"""Between rows and what is made of them."""

from __future__ import annotations

import time
from typing import Any


def columns(row: Any) -> dict[str, Any]:
    """A row's values by their columns' names."""
    return {column.key: getattr(row, column.key) for column in row.__table__.columns}


def wall(monotonic_ns: int) -> float:
    """The time of day of a moment of CLOCK_MONOTONIC."""
    return time.time() - (time.monotonic_ns() - monotonic_ns) / 1e9


def monotonic(at: float) -> int:
    """And back, nanoseconds; less than 0 for what was before the machine's start."""
    return time.monotonic_ns() - round((time.time() - at) * 1e9)
