"""The host's memory."""

from __future__ import annotations

RESERVE = 256 << 20  # bytes that a suspension leaves to the others


def available_memory() -> int:
    """MemAvailable, in bytes: what can be had without swapping."""
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
