"""How times and the ends of programs are written for people, on the command line and in the dashboard. JSON has
numbers."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any


def milliseconds(value: float) -> str:
    """The unit that leaves one to four digits: 0.8 ms, 94 ms, 4.3 s, 2 min 5 s."""
    if value < 9.95:
        return f"{value:.1f} ms"
    if value < 999.5:
        return f"{value:.0f} ms"
    return duration(value / 1000)


def duration(seconds: float) -> str:
    """0.4 s, 43 s, 2 min 5 s, 3 h 20 min, 4 d 2 h."""
    seconds = max(seconds, 0.0)
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 9.95 and round(seconds, 1) % 1 else f"{seconds:.0f} s"
    whole = round(seconds)
    days, hours, minutes, rest = whole // 86400, whole // 3600 % 24, whole // 60 % 60, whole % 60
    if days:
        return f"{days} d {hours} h" if hours else f"{days} d"
    if hours:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    return f"{minutes} min {rest} s" if rest else f"{minutes} min"


def exit_text(row: Mapping[str, Any]) -> str | None:
    """With what something ended: an exit code, or the signal's name with the code that a shell shows for it."""
    if row.get("exit_signal") is not None:
        number = int(row["exit_signal"])
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = f"signal {number}"
        return f"{name} ({128 + number})"
    return None if row.get("exit_code") is None else str(row["exit_code"])
