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
