"""What the supervisor wants remembered, as plain data. The database implements it; tests may too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from xmigd.ipc.exits import End
from xmigd.ipc.messages import Snapshot
from xmigd.process.events import FaultRecord, RecoveryRecord
from xmigd.process.migration_events import MigrationRecord

LogSource = Literal["program", "server", "xmigd"]
LogLevel = Literal["debug", "info", "warning", "error"]
ReplicaPolicy = Literal[
    "report", "restore", "stop"
]  # what is done about a rank whose memory differs from that of its replicas


Priority = Literal["critical", "normal", "best-effort"]
PRIORITIES: tuple[Priority, ...] = ("critical", "normal", "best-effort")  # the highest first


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    id: str
    name: str
    command: str
    uid: int
    device: str | None
    registered: bool  # by `xmigctl run`; otherwise made for a process that came by itself
    token_hash: str | None
    hang_timeout: float | None = None  # seconds; None: the daemon's setting
    replica_policy: ReplicaPolicy | None = None  # None: the daemon's setting
    strict: bool = False  # it ends when one of its processes is not protected
    runner_pid: int | None = None  # the program with which it ends: `xmigctl run`, or what that became
    nodes: str | None = None  # names, separated by commas, if it has ranks on several: the first leads
    runner_start: int | None = None  # clock ticks since boot: with the pid, which process
    external_id: str | None = None  # what its scheduler calls it
    priority: Priority = "normal"
    reserved_bytes: int | None = None  # on each of its devices; None: it has reserved nothing
    restored_from: str | None = None  # the job whose checkpoint it was restored from
    memory_quota: int | None = None  # bytes that all of its programs have of each device at most; None: all
    sm_share: int | None = None  # percent of its device's SMs, where that is shared through MPS; None: all
    walltime_s: float | None = None  # that it takes at most, as its user or scheduler expects; None: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRow:
    id: str
    job: str
    pid: int
    start_time: int
    uid: int
    gid: int
    command: str
    device: str
    origin: str | None = None  # restored from a checkpoint: the process as its program knows it


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveProcess:
    """A process that was alive when the last daemon wrote for the last time."""

    row: ProcessRow
    job: JobRow
    state: str
    server_pid: int | None
    server_start_time: int | None
    faults: int
    recoveries: int
    why: str = ""  # it is in that state
    migration: MigrationRecord | None = None  # one that was under way
    recovery: RecoveryRecord | None = None  # likewise


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    job: str
    process: str | None
    at: float  # Unix seconds
    source: LogSource
    level: LogLevel
    text: str


class Records(Protocol):
    """None of these waits, and none fails: what cannot be written now is kept and written later."""

    def job_made(self, job: JobRow) -> None: ...
    def job_ended(self, job: str, end: End, at: float) -> None:
        """The program that `xmigctl run` started has ended; `at`: the time of day. What was reported before stays."""

    def process_ended(self, process: str, end: End) -> None:
        """With what its program ended, as far as that is known."""

    def log_line(self, line: LogLine) -> None: ...
    def process_started(self, process: ProcessRow) -> None: ...
    def unprotected_process(self, process: ProcessRow, why: str) -> None:
        """One that has never come to the daemon. `process_state` tells its end."""

    def process_unprotected(self, process: ProcessRow, why: str) -> None:
        """One that has."""

    def job_stopped(self, job: str) -> None: ...
    def process_moved(self, process: str, pid: int, start_time: int) -> None: ...
    def process_device(self, process: str, device: str) -> None:
        """It goes on there, for its device was lost."""

    def process_state(self, process: str, state: str, why: str) -> None: ...
    def server_assigned(self, process: str, pid: int, start_time: int, generation: int) -> None: ...
    def snapshot(self, process: str, snapshot: Snapshot) -> None: ...
    def fault(self, process: str, fault: FaultRecord) -> None: ...
    def recovery(self, process: str, recovery: RecoveryRecord) -> None: ...
    def migration(self, record: MigrationRecord) -> None:
        """With where the process lives, in one transaction."""

    def migration_intent(self, record: MigrationRecord, done: Callable[[str | None], None]) -> None:
        """The same; `done` is called once it is on the disk, with None, or cannot be written, with the reason."""
