"""What happened since the daemon started, counted. Labels are jobs and kinds, never pids: a pid is used again."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from xmigd.ipc.messages import Snapshot
from xmigd.process.events import FaultRecord, RecoveryRecord

BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Counts:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._faults = Counter("xmigd_faults", "Faults of GPU servers and devices", ["kind"], registry=self.registry)
        self._recoveries = Counter("xmigd_recoveries", "Recoveries that are over", ["outcome"], registry=self.registry)
        self._seconds = Histogram(
            "xmigd_recovery_seconds", "From the fault to the moment the program goes on", buckets=BUCKETS,
            registry=self.registry,
        )  # fmt: skip
        self._snapshots = Counter("xmigd_snapshots", "Snapshots taken", ["job"], registry=self.registry)
        self._snapshot_bytes = Counter(
            "xmigd_snapshot_copied_bytes", "Bytes that snapshots copied into shadows", ["job"], registry=self.registry
        )
        self._jobs: set[str] = set()  # that have snapshots
        self._counted: dict[str, int] = {}  # process → its last recovery that is counted

    def fault(self, fault: FaultRecord) -> None:
        self._faults.labels(fault.kind).inc()

    def recovery(self, process: str, recovery: RecoveryRecord) -> None:
        """Called whenever more is known of it; counted once, when it is over."""
        if recovery.outcome == "running" or self._counted.get(process, 0) >= recovery.number:
            return
        self._counted[process] = recovery.number
        self._recoveries.labels(recovery.outcome).inc()
        if recovery.resumed is not None:
            self._seconds.observe((recovery.resumed - recovery.occurred) / 1e9)

    def snapshot(self, job: str, snapshot: Snapshot) -> None:
        self._jobs.add(job)
        self._snapshots.labels(job).inc()
        self._snapshot_bytes.labels(job).inc(snapshot.copied_bytes)

    def process_over(self, process: str) -> None:
        self._counted.pop(process, None)

    def job_over(self, job: str) -> None:
        """Its series end: jobs come and go for ever."""
        if job in self._jobs:
            self._jobs.discard(job)
            for counter in (self._snapshots, self._snapshot_bytes):
                counter.remove(job)
