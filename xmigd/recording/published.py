"""Records that are published as they are written: what the supervisor does becomes events here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict

from xmigd.events.bus import Bus
from xmigd.ipc.exits import End
from xmigd.ipc.messages import Snapshot
from xmigd.metrics.counts import Counts
from xmigd.policies.breaker import Breaker
from xmigd.process.events import FaultRecord, RecoveryRecord
from xmigd.process.migration_events import MigrationRecord
from xmigd.records import JobRow, LiveProcess, LogLine, ProcessRow, Records

BETWEEN_SNAPSHOTS = 1.0  # seconds between two events of one process's snapshots
BETWEEN_LINES = 0.5  # and of one job's log
OVER = ("lost", "ended")


class PublishingRecords:
    """xmigd.records.Records around another one."""

    def __init__(
        self,
        records: Records,
        bus: Bus,
        live: Iterable[LiveProcess] = (),
        *,
        counts: Counts,
        breaker: Breaker,
        device_faulted: Callable[[str], None],
        unprotected: Iterable[ProcessRow] = (),
    ) -> None:
        """`device_faulted`: a fault of this process was its device's; the program has come past it."""
        self._records = records
        self._bus = bus
        self._counts = counts
        self._breaker = breaker
        self._job_of = {each.row.id: each.row.job for each in live} | {row.id: row.job for row in unprotected}
        self._snapshot_at: dict[str, float] = {}
        self._logged_at: dict[str, float] = {}
        # Processes with a fault of their device's, and the record of it, until it turns out whose it was.
        self._of_device: dict[str, int] = {}
        self._device_faulted = device_faulted
        self._location: dict[str, tuple[str, str]] = {}

    def job_made(self, job: JobRow) -> None:
        self._records.job_made(job)
        publish_job(self._bus, job)

    def job_ended(self, job: str, end: End, at: float) -> None:
        self._records.job_ended(job, end, at)
        publish_job_end(self._bus, job, end)

    def process_ended(self, process: str, end: End) -> None:
        self._records.process_ended(process, end)

    def log_line(self, line: LogLine) -> None:
        self._records.log_line(line)
        now = time.monotonic()
        if now - self._logged_at.get(line.job, 0.0) >= BETWEEN_LINES:
            self._logged_at[line.job] = now
            data = {"source": line.source, "level": line.level, "text": line.text}
            self._bus.publish("log", "job", line.job, line.job, data, durable=False)

    def process_started(self, process: ProcessRow) -> None:
        self._records.process_started(process)
        self._job_of[process.id] = process.job
        self._publish_state(process.id, "starting", "a program has connected")

    def unprotected_process(self, process: ProcessRow, why: str) -> None:
        self._records.unprotected_process(process, why)
        self._job_of[process.id] = process.job
        self._publish_unprotected(process, why)

    def process_unprotected(self, process: ProcessRow, why: str) -> None:
        self._records.process_unprotected(process, why)
        self._publish_unprotected(process, why)

    def _publish_unprotected(self, process: ProcessRow, why: str) -> None:
        data = {"pid": process.pid, "command": process.command, "why": why}
        self._bus.publish("process.unprotected", "process", process.id, process.job, data)

    def job_stopped(self, job: str) -> None:
        self._records.job_stopped(job)

    def process_moved(self, process: str, pid: int, start_time: int) -> None:
        self._records.process_moved(process, pid, start_time)

    def process_device(self, process: str, device: str) -> None:
        self._records.process_device(process, device)
        data = {"location": "device", "device": device, "migration": None}
        self._location[process] = ("device", device)
        self._bus.publish("process.location", "process", process, self._job_of.get(process), data)

    def process_state(self, process: str, state: str, why: str) -> None:
        self._records.process_state(process, state, why)
        self._publish_state(process, state, why)
        if state == "lost" and process in self._job_of:
            self._breaker.acted("loss", "process", process, why)
        if state in OVER:
            self._counts.process_over(process)
            self._snapshot_at.pop(process, None)
            self._of_device.pop(process, None)
            self._location.pop(process, None)
        if state == "ended":
            job = self._job_of.pop(process, None)
            if job is not None and job not in self._job_of.values():
                self._counts.job_over(job)
                self._logged_at.pop(job, None)
                self._bus.publish("job.ended", "job", job, job, {"why": why})

    def server_assigned(self, process: str, pid: int, start_time: int, generation: int) -> None:
        self._records.server_assigned(process, pid, start_time, generation)

    def snapshot(self, process: str, snapshot: Snapshot) -> None:
        self._records.snapshot(process, snapshot)
        if (job := self._job_of.get(process)) is not None:
            self._counts.snapshot(job, snapshot)
        # Who has resumed may meet the fault again; a snapshot is taken when everything before it has been executed.
        if (sequence := self._of_device.get(process)) is not None and snapshot.sequence > sequence:
            del self._of_device[process]
            self._device_faulted(process)
        now = time.monotonic()
        if now - self._snapshot_at.get(process, 0.0) >= BETWEEN_SNAPSHOTS:
            self._snapshot_at[process] = now
            data = {
                "number": snapshot.number, "ms": snapshot.ms, "live_bytes": snapshot.live_bytes,
                "copied_bytes": snapshot.copied_bytes,
                "journal_bytes": snapshot.journal_bytes, "reason": snapshot.reason,
            }  # fmt: skip
            self._bus.publish("snapshot", "process", process, self._job_of.get(process), data, durable=False)

    def fault(self, process: str, fault: FaultRecord) -> None:
        self._records.fault(process, fault)
        self._counts.fault(fault)
        if fault.kind == "device":
            self._of_device[process] = fault.sequence or 0
        elif fault.kind == "program":
            self._of_device.pop(process, None)
        data = asdict(fault)
        del data["t"]
        self._bus.publish("fault", "process", process, self._job_of.get(process), data)

    def recovery(self, process: str, recovery: RecoveryRecord) -> None:
        self._records.recovery(process, recovery)
        self._counts.recovery(process, recovery)
        since = recovery.occurred
        moments = ("detected", "standby_ready", "mapped", "restored", "replayed", "resumed")
        reached = {f"{name}_ms": getattr(recovery, name) for name in moments}
        data = {
            "number": recovery.number, "cause": recovery.cause, "outcome": recovery.outcome,
            "attempts": recovery.attempts,
        } | {name: None if at is None else (at - since) / 1e6 for name, at in reached.items()}  # fmt: skip
        self._bus.publish("recovery", "process", process, self._job_of.get(process), data)

    def migration(self, record: MigrationRecord) -> None:
        self._records.migration(record)
        self._publish_location(record)

    def migration_intent(self, record: MigrationRecord, done: Callable[[str | None], None]) -> None:
        self._records.migration_intent(record, done)

    def _publish_location(self, record: MigrationRecord) -> None:
        place = (record.location, record.device)
        if self._location.get(record.process) != place:
            self._location[record.process] = place
            data = {"location": record.location, "device": record.device or None, "migration": record.id}
            self._bus.publish("process.location", "process", record.process, self._job_of.get(record.process), data)

    def _publish_state(self, process: str, state: str, why: str) -> None:
        self._bus.publish("process.state", "process", process, self._job_of.get(process), {"state": state, "why": why})


def publish_job(bus: Bus, job: JobRow) -> None:
    data = {"name": job.name, "command": job.command, "uid": job.uid}
    bus.publish("job.created", "job", job.id, job.id, data, owner=job.uid)


def publish_job_end(bus: Bus, job: str, end: End) -> None:
    bus.publish("job.exited", "job", job, job, {"exit_code": end.code, "exit_signal": end.signal})
