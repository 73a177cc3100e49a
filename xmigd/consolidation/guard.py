"""After the moves: is a job slower than was promised? Its steps say so, where they are known (xmigd/profiling). What is
known of every process: records per second, and the time for which there was work for the server or its device.

Records or steps per second alone say little: a program that evaluates, or waits for data, has less of them, wherever it
runs. What packing makes longer is the work itself. So a process is slower if it gets fewer records (steps) done than
promised *and* the work for one takes so much longer: slow-down 1 - b + b * (time per record after / before), with its
busy share `b` before.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from xmigd.devices.header import counters
from xmigd.events.bus import Bus
from xmigd.operations.operation import Operation
from xmigd.supervisor.process import Process

StepMs = Callable[[str, float], float | None]  # of a process, the median of its steps in the last so many seconds
LOOK_EVERY = 0.5  # seconds
SETTLING = 1.0  # seconds after the last move, in which snapshot copies follow
LEAST = 20  # records in a window that can be judged


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Of a process in a window of time."""

    seconds: float
    records: int
    busy_s: float | None
    step_ms: float | None = None  # median of the steps that lie in it

    @property
    def per_s(self) -> float:
        return self.records / self.seconds

    @property
    def share(self) -> float | None:
        return None if self.busy_s is None else min(1.0, self.busy_s / self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Of a process. What is not known is None."""

    process: str
    job: str
    records_per_s_before: float | None
    records_per_s_after: float | None
    busy_share_before: float | None
    busy_share_after: float | None
    step_ms_before: float | None
    step_ms_after: float | None
    slow_down: float | None  # measured
    slower: bool  # than promised
    why: str  # it cannot be judged; empty: it was


def judge(process: str, job: str, before: Rate | None, after: Rate | None, promised: float) -> Verdict:
    slowed: float | None = None
    why = ""
    fewer = before is not None and after is not None and after.per_s * promised < before.per_s
    if before is None or after is None:
        why = "it was not there all the time"
    elif before.step_ms and after.step_ms:
        fewer = after.step_ms > promised * before.step_ms
        slowed = _by_steps(before, after)
    elif before.records < LEAST or after.records < LEAST:
        why = f"fewer than {LEAST} calls"
    elif before.busy_s is None or after.busy_s is None or before.busy_s <= 0:
        why = "its server reports no work"
    else:
        share = before.share or 0.0
        slowed = 1 - share + share * (after.busy_s / after.records) / (before.busy_s / before.records)
    return Verdict(
        process=process, job=job,
        records_per_s_before=None if before is None else before.per_s,
        records_per_s_after=None if after is None else after.per_s,
        busy_share_before=None if before is None else before.share,
        busy_share_after=None if after is None else after.share,
        step_ms_before=None if before is None else before.step_ms,
        step_ms_after=None if after is None else after.step_ms,
        slow_down=slowed, slower=slowed is not None and fewer and slowed > promised, why=why,
    )  # fmt: skip


def _by_steps(before: Rate, after: Rate) -> float:
    """As by records, with steps in their place: a step is the same work, however many records it has."""
    assert before.step_ms
    assert after.step_ms
    if before.share and after.share is not None:
        share = before.share
        return 1 - share + share * (after.share * after.step_ms) / (before.share * before.step_ms)
    return after.step_ms / before.step_ms


@dataclass(frozen=True, slots=True)
class _Reading:
    at: float
    records: int
    busy_ns: int | None

    @classmethod
    def of(cls, process: Process) -> _Reading | None:
        if process.memory is None:
            return None
        with contextlib.suppress(OSError, ValueError):
            found = counters(process.memory.journal.fileno())
            if found is not None:
                return cls(time.monotonic(), found.records, process.busy_ns())
        return None

    def until(self, later: _Reading | None) -> Rate | None:
        if later is None or later.at <= self.at or later.records < self.records:
            return None
        known = self.busy_ns is not None and later.busy_ns is not None
        busy = (later.busy_ns or 0) - (self.busy_ns or 0)
        return Rate(
            seconds=later.at - self.at, records=later.records - self.records, busy_s=busy / 1e9 if known else None
        )


class Guard:
    def __init__(
        self,
        *,
        jobs: Mapping[str, str],
        devices: Mapping[str, str],
        before: Mapping[str, Rate | None],
        promised: float,
        seconds: float,
        find: Callable[[str], Process | None],
        step_ms: StepMs,
        bus: Bus,
    ) -> None:
        """`jobs`: of the processes that are watched; `devices`: where they are then; `before`: how fast they were."""
        self._step_ms = step_ms
        self._jobs = jobs
        self._devices = devices
        self._before = before
        self._promised = promised
        self._seconds = seconds
        self._find = find
        self._bus = bus
        self._operation = ""

    async def watch(self, operation: Operation) -> list[Verdict]:
        """Raises Cancelled."""
        self._operation = operation.id
        operation.progress("watching", **(operation.row.progress or {}), seconds=self._seconds)
        await self._pass(operation, SETTLING)
        began = {name: self._read(name) for name in self._jobs}
        await self._pass(operation, self._seconds)
        verdicts = []
        for name, job in self._jobs.items():
            first = began[name]
            after = None if first is None else first.until(self._read(name))
            if after is not None:
                after = replace(after, step_ms=self._step_ms(name, self._seconds))
            verdicts.append(judge(name, job, self._before.get(name), after, self._promised))
        return verdicts

    def slower(self, verdicts: Iterable[Verdict]) -> list[str]:
        """Jobs."""
        return list(dict.fromkeys(verdict.job for verdict in verdicts if verdict.slower))

    def to_undo(self, verdicts: Iterable[Verdict], parts: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Moves of the jobs that are slower; of one that was not moved, those of the jobs that came to its device."""
        parts = list(parts)
        verdicts = list(verdicts)
        moved = {part["job"] for part in parts if part["state"] == "succeeded"}
        jobs: set[str] = set()
        for job in self.slower(verdicts):
            if job in moved:
                jobs.add(job)
                continue
            crowded = {self._devices[v.process] for v in verdicts if v.slower and v.job == job}
            jobs |= {part["job"] for part in parts if part["target"] in crowded}
        return [part for part in parts if part["job"] in jobs]

    def publish(self, verdicts: Iterable[Verdict], undone: Iterable[dict[str, Any]]) -> None:
        """An event for each job that was moved back. It says nothing of other jobs: its owner reads it."""
        own = {verdict.process: verdict for verdict in verdicts}
        by_job: dict[str, list[dict[str, Any]]] = {}
        for part in undone:
            by_job.setdefault(part["job"], []).append(part)
        for job, parts in by_job.items():
            measured = [own[part["process"]] for part in parts if part["process"] in own]
            slowed = [verdict.slow_down for verdict in measured if verdict.slow_down is not None]
            data = {
                "operation": self._operation, "promised_slow_down": self._promised,
                "slow_down": max(slowed, default=None), "slower_itself": any(verdict.slower for verdict in measured),
                "processes": [
                    {name: part.get(name) for name in ("process", "source", "target", "state", "why")} for part in parts
                ],
            }  # fmt: skip
            self._bus.publish("consolidation.undone", "job", job, job, data)

    def result(self, verdicts: Iterable[Verdict], undone: Iterable[dict[str, Any]]) -> dict[str, Any]:
        return {
            "seconds": self._seconds, "promised_slow_down": self._promised,
            "processes": [asdict(verdict) for verdict in verdicts],
            "undone": list(dict.fromkeys(part["job"] for part in undone)),
        }  # fmt: skip

    def _read(self, process: str) -> _Reading | None:
        found = self._find(process)
        return None if found is None else _Reading.of(found)

    async def _pass(self, operation: Operation, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            operation.check_cancelled()
            await asyncio.sleep(min(left, LOOK_EVERY))
        operation.check_cancelled()
