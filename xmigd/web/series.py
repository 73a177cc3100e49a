"""What the charts of a process show: its last minutes while it runs, and its snapshots when it is over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MOST = 150  # samples
STEP = 2.0  # seconds between two samples of the API


@dataclass(frozen=True, slots=True)
class Sample:
    """Unknown is None."""

    at: float
    live_bytes: float | None  # what the program uses
    held_bytes: float | None  # that, its shadow and its module images
    utilisation: float | None  # of its device, 0 to 1
    calls_per_s: float | None
    journal_bytes: float | None
    snapshot_ms: float | None
    snapshot_share: float | None  # of its time, 0 to 1
    expected_stall_ms: float | None = None  # what it would wait if its server died
    stall_bound_ms: float | None = None
    step_ms: float | None = None
    idle_share: float | None = None  # of its devices, 0 to 1
    peak_bytes: float | None = None  # that the program used at most
    link_bytes_per_s: float | None = None  # to other devices


def of_series(process: dict[str, list[Any]], device: dict[str, list[Any]]) -> list[Sample]:
    """The API's series of a process and of its device, oldest first."""
    busy = {
        round(at / STEP): value for at, value in zip(device.get("at", []), device.get("utilisation", []), strict=True)
    }
    columns = (
        "live_bytes", "held_bytes", "calls_per_s", "journal_bytes", "snapshot_ms", "snapshot_share",
        "expected_stall_ms", "stall_bound_ms", "step_ms", "idle_share", "peak_bytes", "link_bytes_per_s",
    )  # fmt: skip
    nothing = [None] * len(process["at"])  # a daemon of an earlier version
    rows = zip(process["at"], *(process.get(name, nothing) for name in columns), strict=True)
    return [
        Sample(at=at, utilisation=busy.get(round(at / STEP)), **dict(zip(columns, values, strict=True)))
        for at, *values in rows
    ][-MOST:]


def of_snapshots(snapshots: Sequence[dict[str, Any]]) -> list[Sample]:
    """Oldest first, from the API's newest first. Rates and shares are over the time since the snapshot before."""
    made: list[Sample] = []
    before: dict[str, Any] | None = None
    for snapshot in reversed(snapshots[:MOST]):
        between = snapshot["at"] - before["at"] if before is not None else 0.0
        forward = snapshot["sequence"] - before["sequence"] if before is not None else 0
        made.append(Sample(
            at=snapshot["at"], live_bytes=snapshot["live_bytes"], held_bytes=None, utilisation=None,
            calls_per_s=forward / between if between > 0 and forward >= 0 else None,
            journal_bytes=snapshot["journal_bytes"], snapshot_ms=snapshot["ms"],
            snapshot_share=min(snapshot["ms"] / between / 1000, 1.0) if between > 0 else None,
        ))  # fmt: skip
        before = snapshot
    return made


@dataclass(frozen=True, slots=True)
class Chart:
    name: str
    title: str
    columns: str  # of the table of samples; the first is the time
    unit: str


CHARTS = (
    (Chart("stall", "Expected stall if its server died (line), bound (dashes)", "8,9", "ms"), "expected_stall_ms"),
    (Chart("memory", "Device memory: used (line), held (dashes)", "1,2", "bytes"), "live_bytes"),
    (Chart("step", "A step, by what its launches repeat", "10", "ms"), "step_ms"),
    (Chart("idle", "Idle share of its devices (estimated)", "11", "percent"), "idle_share"),
    (Chart("links", "To other devices per second", "13", "bytes"), "link_bytes_per_s"),
    (Chart("calls", "Calls executed per second", "4", "count"), "calls_per_s"),
    (Chart("journal", "Journal", "5", "bytes"), "journal_bytes"),
    (Chart("cost", "What snapshots cost, share of its time", "7", "percent"), "snapshot_share"),
    (Chart("snapshot", "What a snapshot takes", "6", "ms"), "snapshot_ms"),
    (Chart("busy", "Utilisation of its device", "3", "percent"), "utilisation"),
)


def charts(samples: Sequence[Sample]) -> list[Chart]:
    """Those of which something is known."""
    return [chart for chart, field in CHARTS if any(getattr(sample, field) is not None for sample in samples)]
