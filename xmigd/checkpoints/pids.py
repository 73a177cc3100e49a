"""Programs by the ids of their processes: what belongs to one, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from xmigd.checkpoints.movable import processes_of
from xmigd.errors import NotFound

GONE_WITHIN = 5.0  # seconds in which a parent takes note of the end of a program


def tree(pid: int) -> list[int]:
    """The process and all that descend from it; none: it has ended."""
    with contextlib.suppress(NotFound):
        return processes_of(pid)
    return []


def kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


async def end(pids: Iterable[int]) -> None:
    """Kill them, and wait until whoever started them knows that: until then nobody else can have their pids."""
    pids = list(pids)
    kill(pids)
    deadline = time.monotonic() + GONE_WITHIN
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        await asyncio.sleep(0.005)


def stopped(pid: int) -> bool:
    """By SIGSTOP. Raises OSError: there is no such process."""
    return pid > 0 and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
