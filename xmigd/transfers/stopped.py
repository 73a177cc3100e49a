"""Processes that a transfer has stopped, or made again and left so, as they are written down. The one from which all
descend may end before the others: somebody kills it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from xmigd.checkpoints.pids import tree
from xmigd.ipc import pidfd as pidfds


def written(pids: Iterable[int]) -> list[list[int]]:
    """Each with its start time: with the pid, its identity."""
    return [[pid, pidfds.start_time(pid)] for pid in pids]


def are_whole(row: dict[str, Any]) -> bool:
    """Are all still there?"""
    return is_root_there(row) and all(_is_same(pid, start) for pid, start in row["pids"])


def is_root_there(row: dict[str, Any]) -> bool:
    """The process from which all descend."""
    return row["pid"] is not None and _is_same(row["pid"], row["start_time"])


def left(row: dict[str, Any]) -> list[int]:
    """Who is there, with all that descend from them."""
    known = [pid for pid, start in row["pids"] if _is_same(pid, start)]
    return list(dict.fromkeys([*(tree(row["pid"]) if is_root_there(row) else []), *known]))


def _is_same(pid: int, start: int) -> bool:
    return pidfds.start_time(pid) == start != 0
