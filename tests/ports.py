"""Ports of this machine that nobody else is given: for what has to know its port before it listens, or again after.

A port that the kernel has chosen for a listener which is then closed is free for every connection and every other
listener that the kernel chooses one for. So those here are of none that it chooses, and each process of tests takes
them from a part of its own.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import socket
from collections.abc import Iterator
from pathlib import Path

CHOSEN = Path("/proc/sys/net/ipv4/ip_local_port_range")  # by the kernel: first and last
FIRST, LAST = 10_000, 65_535  # where nobody listens by habit
PART = 200


@functools.cache
def _ports() -> Iterator[int]:
    """Of this process's part, again and again. Nobody else has it as long as this process has the name that belongs to
    it; with the process it ends."""
    low, high = map(int, CHOSEN.read_text().split())
    for first in (*range(FIRST, low - PART, PART), *range(high + 1, LAST - PART, PART)):
        name = socket.socket(socket.AF_UNIX)
        try:
            name.bind(f"\0xmig tests, ports from {first}")
        except OSError:
            name.close()
            continue
        atexit.register(name.close)
        return itertools.cycle(range(first, first + PART))
    raise OSError(f"the kernel chooses ports from {low} to {high}, and others have the rest")


def free_port() -> int:
    """One that nobody has now. No other is the same before this process has been given all of its part."""
    for port in itertools.islice(_ports(), PART):
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:  # whoever has it, for example one who was given it long ago
            continue
        return port
    raise OSError(f"no port is free among {PART}")
