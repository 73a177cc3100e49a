"""What a plan that was applied has left to undo, and what has changed since so that it cannot be. Without I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from xmigd.consolidation.plan import Seen, why_not_device
from xmigd.operations.repository import OperationRow

Part = dict[str, Any]
# Moves that were made; likewise, as a restarted daemon found them; that could not be undone.
MOVED = ("succeeded", "moved", "stays")


def left_to_undo(row: OperationRow) -> list[Part]:
    """Of a consolidation, or of an undo that was not complete: the moves as they were made, each once more to undo."""
    parts = (row.result or row.progress or {}).get("parts", [])
    names = ("process", "job", "job_name", "source", "target")
    return [{name: part[name] for name in names} | {"state": "succeeded"} for part in parts if part["state"] in MOVED]


def obstacles(parts: Sequence[Part], now: Seen) -> list[str]:
    """Moves of processes that live; empty: each has room to go back, the last first."""
    found = [why for part in _last_of_each(parts) if (why := _cannot_leave(part, now))]
    for device in dict.fromkeys(part["source"] for part in parts):
        place = now.places.get(device)
        why = "the node does not have it any more" if place is None else why_not_device(place)
        if why:
            found.append(f"nothing may come to {device}: {why}")
    return found or _without_room(parts, now)


def _last_of_each(parts: Iterable[Part]) -> list[Part]:
    """One that made a detour has several."""
    return list({part["process"]: part for part in parts}.values())


def _cannot_leave(part: Part, now: Seen) -> str:
    name = part["process"]
    process = now.processes[name]
    if process.row.device != part["target"]:
        return f"process {name[:12]} of job {process.job.name} is on {process.row.device}, not on {part['target']}"
    why = now.why_not[name]
    return "" if why is None else f"process {name[:12]} of job {process.job.name} cannot move now: {why.text}"


def _without_room(parts: Sequence[Part], now: Seen) -> list[str]:
    used = {device: _used(device, now.held) for device in {part["source"] for part in parts}}
    for part in reversed(parts):
        name, device = part["process"], part["source"]
        size, capacity = now.held[name].get(now.processes[name].row.device, 0), now.capacity(device)
        if capacity is None:
            return [f"the memory of {device} is unknown"]
        used[device] += size
        if used[device] > capacity:
            return [
                f"{device} has no room any more for process {name[:12]} of job {part['job_name']}: it needs "
                f"{size >> 20} MiB, and {max(0, capacity - used[device] + size) >> 20} MiB are left"
            ]
        if part["target"] in used:
            used[part["target"]] -= size
    return []


def _used(device: str, held: Mapping[str, Mapping[str, int]]) -> int:
    return sum(each.get(device, 0) for each in held.values())
