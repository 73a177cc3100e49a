"""What is measured of each job while it runs: its peak of device memory, its first minute, and its steps.

Looked at every second; a job that is shorter has no profile. Written when there is news, and for a job at most every
few seconds.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from xmigd import log
from xmigd.database.writer import Writer
from xmigd.devices.inventory import held_bytes
from xmigd.devices.names import devices_of
from xmigd.metrics.series import Sampler
from xmigd.prediction import repository
from xmigd.prediction.features import FIRST_MINUTE
from xmigd.supervisor.process import Process

logger = log.get("prediction")

EVERY = 1.0  # seconds
WRITTEN_EVERY = 5.0  # seconds, of one job
STEPS_OF = 60.0  # seconds, of which the median step counts
NEWS = 0.02  # share by which a step must have changed, to be written again
OfProcess = Callable[[str, float], float | None]  # in the last so many seconds


@dataclass(kw_only=True)
class Profile:
    job_id: str
    devices: int = 1
    peak_bytes: int = 0
    minute_bytes: int | None = None
    minute_calls: float | None = None
    step_devices: int | None = None  # on which the step was measured
    step_ms: float | None = None
    collectives: float | None = None  # share of the time in which its devices were in one


class FirstMinutes:
    """Lives in the event loop's thread."""

    def __init__(
        self, *, processes: Mapping[str, Process], sampler: Sampler, writer: Writer, step_ms: OfProcess,
        collectives: OfProcess,
    ) -> None:  # fmt: skip
        self._processes = processes
        self._sampler = sampler
        self._writer = writer
        self._step_ms = step_ms
        self._collectives = collectives
        self._of: dict[str, Profile] = {}
        self._written: dict[str, tuple[float, dict[str, Any]]] = {}  # when, and what

    def of(self, job: str) -> Profile | None:
        return self._of.get(job)

    async def run(self, started_at: Callable[[Iterable[str]], dict[str, float]]) -> None:
        """Until it is cancelled. `started_at`: when jobs began, Unix seconds; called in a thread."""
        begun: dict[str, float] = {}
        while True:
            try:
                jobs = {process.job.id for process in self._processes.values()}
                if new := jobs - begun.keys():
                    begun |= await asyncio.to_thread(started_at, new)
                begun = {job: at for job, at in begun.items() if job in jobs}
                self.look(begun)
            except Exception:
                logger.exception("jobs were not measured")
            await asyncio.sleep(EVERY)

    def look(self, begun: Mapping[str, float]) -> None:
        """`begun`: jobs that there are, and since when."""
        there: dict[str, list[Process]] = {}
        for process in list(self._processes.values()):
            if process.job.id in begun:
                there.setdefault(process.job.id, []).append(process)
        for job, processes in there.items():
            self._measure(job, processes, time.time() - begun[job])
        gone = self._of.keys() - there.keys()
        self._write(gone)
        for job in gone:
            del self._of[job]
            self._written.pop(job, None)

    def _measure(self, job: str, processes: list[Process], age: float) -> None:
        profile = self._of.setdefault(job, Profile(job_id=job))
        held = held_bytes([process for process in processes if process.state != "suspended"])
        most = max(held.values(), default=0)
        profile.peak_bytes = max(profile.peak_bytes, most)
        profile.devices = max(profile.devices, sum(bytes > 0 for bytes in held.values()))
        self._measure_steps(profile, [process for process in processes if process.state != "suspended"])
        if profile.minute_bytes is None and FIRST_MINUTE <= age < 2 * FIRST_MINUTE:  # later: a restarted daemon
            profile.minute_bytes = profile.peak_bytes
            profile.minute_calls = self._calls([process.row.id for process in processes])

    def _measure_steps(self, profile: Profile, processes: list[Process]) -> None:
        """Where all of the job is here, each process has steps, and none shares a device with another. A device
        counts that a process has memory on: ranks are often given all of them, and use one each."""
        devices = [name for process in processes for name in _used(process)]
        steps = [self._step_ms(process.row.id, STEPS_OF) for process in processes]
        known = [each for each in steps if each is not None]
        elsewhere = any(process.job.nodes for process in processes)
        if not devices or not known or len(known) < len(steps) or len(set(devices)) < len(devices) or elsewhere:
            return
        step = statistics.median(known)
        before = profile.step_ms if profile.step_devices == len(devices) else None
        if before is not None and abs(step - before) <= NEWS * before:
            return
        shares = [self._collectives(process.row.id, STEPS_OF) for process in processes]
        there = [each for each in shares if each is not None]
        profile.step_devices, profile.step_ms = len(devices), step
        profile.collectives = statistics.fmean(there) if len(there) == len(shares) else None

    def _calls(self, processes: list[str]) -> float | None:
        """Per second, all of them together, in the last minute."""
        since, rates = time.time() - FIRST_MINUTE, []
        for process in processes:
            known = [each for each in self._sampler.of_process(process).columns(since)["calls_per_s"]
                     if each is not None]  # fmt: skip
            if known:
                rates.append(sum(known) / len(known))
        return sum(rates) if rates else None

    def _write(self, gone: Iterable[str]) -> None:
        """Of those that are gone what is new, of others not too often."""
        now, over = time.monotonic(), set(gone)
        rows = []
        for job, profile in self._of.items():
            row = asdict(profile)
            at, written = self._written.get(job, (-WRITTEN_EVERY, {}))
            if profile.peak_bytes and row != written and (job in over or now - at >= WRITTEN_EVERY):
                rows.append(row)
                self._written[job] = now, row
        if rows:
            self._writer.record("prediction.profiles", lambda session: repository.save(session, rows))


def _used(process: Process) -> set[str]:
    names = devices_of(process.row.device)
    ordinals = {handle.ordinal for handle in list(process.handles.values()) if handle.kind == "device"}
    return {names[ordinal] for ordinal in ordinals if ordinal < len(names)}
