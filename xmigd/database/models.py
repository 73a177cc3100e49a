"""The tables. Times of day are Unix seconds (float, UTC); durations are milliseconds."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, ForeignKey, Index, MetaData, String, Text, UniqueConstraint, false, true
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    "pk": "pk_%(table_name)s",
}


class Base(DeclarativeBase):
    metadata = MetaData(naming_convention=NAMING)


class Device(Base):
    """A device of this node, as the settings name it: `cpu:0`."""

    __tablename__ = "devices"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    kind: Mapped[str] = mapped_column(String(16))
    ordinal: Mapped[int]
    configured: Mapped[bool]  # False: an earlier configuration had it
    memory_bytes: Mapped[int | None]
    seen_at: Mapped[float]
    uuid: Mapped[str | None] = mapped_column(String(64))  # as its programs see it; null: nobody has used it yet
    name: Mapped[str | None] = mapped_column(String(128))
    cordoned: Mapped[bool] = mapped_column(default=False, server_default=false())  # it gets no new process
    cordon_reason: Mapped[str] = mapped_column(Text, default="", server_default="")
    version: Mapped[int] = mapped_column(default=1, server_default="1")  # of what PATCH changes: its ETag


class Finding(Base):
    """Something is wrong with a device."""

    __tablename__ = "findings"

    id: Mapped[int] = mapped_column(primary_key=True)
    device: Mapped[str] = mapped_column(String(64), index=True)
    code: Mapped[str] = mapped_column(String(64))
    text: Mapped[str] = mapped_column(Text)
    rung: Mapped[str] = mapped_column(String(8))  # of the answer that helps: report, cordon, drain, lose
    source: Mapped[str] = mapped_column(String(255))
    first_at: Mapped[float]
    last_at: Mapped[float]
    count: Mapped[int]
    answer: Mapped[str | None] = mapped_column(Text)  # null: it is being decided
    closed_at: Mapped[float | None] = mapped_column(index=True)  # null: it is open
    closed_by: Mapped[str | None] = mapped_column(String(255))


class Job(Base):
    """What one `xmigctl run` started, or one process that came by itself."""

    __tablename__ = "jobs"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    name: Mapped[str] = mapped_column(String(255))
    command: Mapped[str] = mapped_column(Text)
    uid: Mapped[int]
    device: Mapped[str | None] = mapped_column(String(64))
    registered: Mapped[bool]
    token_hash: Mapped[str | None] = mapped_column(String(64))
    hang_timeout: Mapped[float | None]  # seconds; null: the daemon's setting
    replica_policy: Mapped[str | None] = mapped_column(String(16))  # null: the daemon's setting
    strict: Mapped[bool] = mapped_column(default=False, server_default=false())  # it ends when it is not protected
    stopped: Mapped[bool] = mapped_column(default=False)
    created_at: Mapped[float]
    nodes: Mapped[str | None]  # names, separated by commas; null: it has ranks on this one only
    runner_pid: Mapped[int | None]  # the program with which it ends; null: it ends with the last of its processes
    runner_start: Mapped[int | None]  # clock ticks since boot: with the pid, which process
    ended_at: Mapped[float | None]  # of the runner
    exit_code: Mapped[int | None]  # of the runner; null: not known, or a signal ended it
    exit_signal: Mapped[int | None]
    external_id: Mapped[str | None] = mapped_column(String(255), index=True)  # what its scheduler calls it
    priority: Mapped[str] = mapped_column(String(16), default="normal", server_default="normal")
    reserved_bytes: Mapped[int | None]  # device memory on each of its devices
    memory_quota: Mapped[int | None]  # bytes that all of its programs have of each device at most; null: all
    sm_share: Mapped[int | None]  # percent of its device's SMs, where that is shared through MPS; null: all
    walltime_s: Mapped[float | None]  # that it takes at most, as its user or scheduler expects; null: not known
    restored_from: Mapped[str | None] = mapped_column(String(32))  # the job whose checkpoint it was restored from
    version: Mapped[int] = mapped_column(default=1, server_default="1")  # of what PATCH changes: its ETag


class JobLabel(Base):
    """A word of whoever started a job, by which they find it again."""

    __tablename__ = "job_labels"
    __table_args__ = (Index(None, "key", "value"),)

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    key: Mapped[str] = mapped_column(String(63), primary_key=True)
    value: Mapped[str] = mapped_column(String(255))


class JobProfile(Base):
    """What was measured of a job while it ran; xmigd.prediction."""

    __tablename__ = "job_profiles"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    devices: Mapped[int]  # that it was on at once, the most
    peak_bytes: Mapped[int]  # of device memory, on the device where it had most
    minute_bytes: Mapped[int | None]  # the same after its first minute
    minute_calls: Mapped[float | None]  # driver calls per second in its first minute
    step_devices: Mapped[int | None]  # on which the last step was measured
    step_ms: Mapped[float | None]
    collectives: Mapped[float | None]  # share of the time in which its devices were in one


class Process(Base):
    """One program and its chain of servers."""

    __tablename__ = "processes"
    __table_args__ = (Index(None, "state"),)

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), index=True)
    pid: Mapped[int]
    start_time: Mapped[int]  # clock ticks since boot: with the pid, the process's identity
    uid: Mapped[int]
    gid: Mapped[int]
    command: Mapped[str] = mapped_column(Text)
    device: Mapped[str] = mapped_column(String(64))
    state: Mapped[str] = mapped_column(String(16))
    why: Mapped[str] = mapped_column(Text)
    server_pid: Mapped[int | None]
    server_start_time: Mapped[int | None]
    location: Mapped[str] = mapped_column(String(16), default="device")
    generation: Mapped[int] = mapped_column(default=0)
    unprotected: Mapped[str] = mapped_column(Text, default="", server_default="")  # why; empty: it is protected
    origin: Mapped[str | None] = mapped_column(String(32))  # restored: the process as its program knows it
    started_at: Mapped[float]
    ended_at: Mapped[float | None]
    exit_code: Mapped[int | None]  # null: not known, or a signal ended it
    exit_signal: Mapped[int | None]


class LogLine(Base):
    """What somebody has to say about a job; the newest of each job are kept."""

    __tablename__ = "log_lines"
    __table_args__ = (Index(None, "job_id", "id"), {"sqlite_autoincrement": True})

    id: Mapped[int] = mapped_column(primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"))
    process_id: Mapped[str | None] = mapped_column(String(32))
    at: Mapped[float]
    source: Mapped[str] = mapped_column(String(8))  # program, server, xmigd
    level: Mapped[str] = mapped_column(String(8))
    text: Mapped[str] = mapped_column(Text)  # harmless: xmigd.text


class JournalSegment(Base):
    """The part of a journal that a snapshot made unnecessary; a row for each snapshot, of each process the newest."""

    __tablename__ = "journal_segments"
    __table_args__ = (UniqueConstraint("process_id", "number"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    process_id: Mapped[str] = mapped_column(ForeignKey("processes.id", ondelete="CASCADE"))
    number: Mapped[int]
    position: Mapped[int]
    sequence: Mapped[int]
    journal_bytes: Mapped[int]
    live_bytes: Mapped[int]
    copied_bytes: Mapped[int]
    chunks: Mapped[int]
    objects: Mapped[int]
    ms: Mapped[float]  # in which nothing was executed and the device was idle
    waited_ms: Mapped[float] = mapped_column(default=0.0, server_default="0")  # before that, for the device to finish
    hash_ms: Mapped[float] = mapped_column(default=0.0, server_default="0")  # of ms
    copy_ms: Mapped[float] = mapped_column(default=0.0, server_default="0")  # of ms
    hashed_bytes: Mapped[int] = mapped_column(
        default=0, server_default="0"
    )  # in place; what is copied is hashed with it
    reason: Mapped[str] = mapped_column(Text)
    at: Mapped[float]


class StoredSnapshot(Base):
    """A snapshot that is in the store, with the journal before it; xmigd.store."""

    __tablename__ = "stored_snapshots"
    __table_args__ = (UniqueConstraint("process_id", "number"), Index(None, "at"))

    id: Mapped[int] = mapped_column(primary_key=True)
    process_id: Mapped[str] = mapped_column(ForeignKey("processes.id", ondelete="CASCADE"))
    number: Mapped[int]
    position: Mapped[int]
    sequence: Mapped[int]
    journal_from: Mapped[int | None]  # position at which the kept journal begins; null: none of it was there any more
    manifest: Mapped[str] = mapped_column(String(64))  # SHA-256 of the manifest's file
    at: Mapped[float]


class StoredPart(Base):
    """An object of the store that a stored snapshot needs. Objects that no row names are removed."""

    __tablename__ = "stored_parts"
    __table_args__ = (Index(None, "snapshot_id"), Index(None, "hash"))

    id: Mapped[int] = mapped_column(primary_key=True)
    snapshot_id: Mapped[int] = mapped_column(ForeignKey("stored_snapshots.id", ondelete="CASCADE"))
    kind: Mapped[str] = mapped_column(String(16))  # snapshot, journal, image
    name: Mapped[str] = mapped_column(String(255))
    hash: Mapped[str] = mapped_column(String(64))
    bytes: Mapped[int]
    stored_bytes: Mapped[int]


class Checkpoint(Base):
    """A job's whole state, kept apart from the job; xmigd.checkpoints. The job may be gone."""

    __tablename__ = "checkpoints"
    __table_args__ = (Index(None, "created_at"),)

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    job_id: Mapped[str] = mapped_column(String(32), index=True)
    job_name: Mapped[str] = mapped_column(String(255))
    uid: Mapped[int]  # whose job it was
    command: Mapped[str] = mapped_column(Text)
    device: Mapped[str] = mapped_column(String(64))  # that it was on
    programs: Mapped[int]
    content_bytes: Mapped[int]
    stored_bytes: Mapped[int]  # that no checkpoint had before
    manifest: Mapped[str] = mapped_column(String(64))  # SHA-256 of the document
    standstill_ms: Mapped[float | None]  # of the programs, while it was made
    created_at: Mapped[float]
    by_policy: Mapped[bool] = mapped_column(default=False, server_default=false())  # and removed by it, too
    mirrored_in: Mapped[str | None] = mapped_column(Text)  # the mirror that has all of it
    on_disk: Mapped[bool] = mapped_column(default=True, server_default=true())  # false: it is in host memory only
    nodes: Mapped[str | None] = mapped_column(Text)  # on which its job had ranks: it is one part of several
    whole: Mapped[bool] = mapped_column(default=True, server_default=true())  # false: not all parts are known to exist
    lossy: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))  # null: it is exact


class PartRemoval(Base):
    """A checkpoint of several nodes that was removed here, and whose part on that node is to be removed, too."""

    __tablename__ = "part_removals"

    checkpoint: Mapped[str] = mapped_column(String(32), primary_key=True)
    node: Mapped[str] = mapped_column(String(64), primary_key=True)


class Transfer(Base):
    """A job that moves to another node, or comes from one; xmigd.transfers. What both nodes have written here decides,
    after any fault, on which of them it goes on."""

    __tablename__ = "transfers"
    __table_args__ = (Index(None, "created_at"),)

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    direction: Mapped[str] = mapped_column(String(3))  # out, in
    peer: Mapped[str] = mapped_column(String(64))
    state: Mapped[str] = mapped_column(String(16))
    why: Mapped[str] = mapped_column(Text)
    job_id: Mapped[str | None] = mapped_column(String(32), index=True)  # here
    job_name: Mapped[str] = mapped_column(String(255))
    process_id: Mapped[str | None] = mapped_column(String(32))  # here
    uid: Mapped[int]
    command: Mapped[str] = mapped_column(Text)
    source: Mapped[str] = mapped_column(String(64))  # devices, by the names of their nodes
    target: Mapped[str] = mapped_column(String(64))
    pid: Mapped[int | None]  # from which all descend
    start_time: Mapped[int | None]  # with the pid, its identity
    processes: Mapped[list[str]] = mapped_column(JSON)  # here, all that have devices: process_id is the first
    devices: Mapped[list[str]] = mapped_column(JSON)  # here, of each of them
    pids: Mapped[list[list[int]]] = mapped_column(JSON)  # with start times: all that stand still here
    peer_job: Mapped[str | None] = mapped_column(String(32))
    peer_informed: Mapped[bool]  # of the outcome
    rounds: Mapped[list[dict[str, Any]]] = mapped_column(JSON)
    standstill_ms: Mapped[float | None]
    took: Mapped[dict[str, float]] = mapped_column(JSON)  # ms: what it stood still for
    content_bytes: Mapped[int | None]  # of device memory
    ahead_bytes: Mapped[int | None]  # of these: on the devices of its target before it stopped
    created_at: Mapped[float]
    ended_at: Mapped[float | None]


class UnmirroredCheckpoint(Base):
    """One that was removed, and is to be removed from the mirror, too."""

    __tablename__ = "unmirrored_checkpoints"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)


class CheckpointPolicy(Base):
    """When checkpoints of a job are made without a request. A job without one has what the settings say."""

    __tablename__ = "checkpoint_policies"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    version: Mapped[int]  # its ETag
    every_minutes: Mapped[float | None]  # null: none by the clock
    keep: Mapped[int]
    before_drain: Mapped[bool]
    keep_bits: Mapped[int | None]  # of optimizer state; null: they are exact
    updated_at: Mapped[float]
    updated_by: Mapped[str] = mapped_column(String(255))


class Fault(Base):
    __tablename__ = "faults"
    __table_args__ = (UniqueConstraint("process_id", "number"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    process_id: Mapped[str] = mapped_column(ForeignKey("processes.id", ondelete="CASCADE"))
    number: Mapped[int]
    kind: Mapped[str] = mapped_column(String(16))
    text: Mapped[str] = mapped_column(Text)
    sequence: Mapped[int | None]
    op: Mapped[str | None] = mapped_column(String(128))
    error: Mapped[int | None]
    injection: Mapped[int | None]
    at: Mapped[float] = mapped_column(index=True)
    acknowledged_at: Mapped[float | None]  # somebody has seen to it
    acknowledged_by: Mapped[str | None] = mapped_column(String(255))


class Recovery(Base):
    """From the first fault to the moment the program goes on. Phases: milliseconds since the fault occurred."""

    __tablename__ = "recoveries"
    __table_args__ = (UniqueConstraint("process_id", "number"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    process_id: Mapped[str] = mapped_column(ForeignKey("processes.id", ondelete="CASCADE"))
    number: Mapped[int]
    cause: Mapped[str] = mapped_column(Text)
    fault: Mapped[int | None]  # the number of the fault that began it
    outcome: Mapped[str] = mapped_column(String(16))
    attempts: Mapped[int]
    standby: Mapped[str] = mapped_column(String(16))
    snapshot: Mapped[int]
    expected_ms: Mapped[float | None]  # the stall that was expected when it occurred
    detected_ms: Mapped[float]
    standby_ready_ms: Mapped[float | None]
    mapped_ms: Mapped[float | None]
    restored_ms: Mapped[float | None]
    replayed_ms: Mapped[float | None]
    resumed_ms: Mapped[float | None]
    records: Mapped[int | None]
    compared: Mapped[int | None]
    differing: Mapped[int | None]
    first_difference: Mapped[int | None]
    delivered_sequence: Mapped[int | None]
    delivered_error: Mapped[int | None]
    story: Mapped[str] = mapped_column(Text)  # why each attempt was made, a line each
    at: Mapped[float] = mapped_column(index=True)


class Migration(Base):
    """A move, a suspension or a resumption. Changed in one transaction with where its process lives."""

    __tablename__ = "migrations"

    number: Mapped[int] = mapped_column(primary_key=True)  # the order in which they began
    id: Mapped[str] = mapped_column(String(32), unique=True)
    operation_id: Mapped[str | None] = mapped_column(String(32), index=True)
    process_id: Mapped[str] = mapped_column(ForeignKey("processes.id", ondelete="CASCADE"), index=True)
    kind: Mapped[str] = mapped_column(String(16))
    engine: Mapped[str] = mapped_column(String(16))
    source: Mapped[str] = mapped_column(String(64))  # a device, or host or file
    target: Mapped[str] = mapped_column(String(64))
    state: Mapped[str] = mapped_column(String(16), index=True)
    phase: Mapped[str] = mapped_column(String(32))
    phases: Mapped[list[dict[str, Any]]] = mapped_column(JSON)
    iterations: Mapped[list[dict[str, Any]]] = mapped_column(JSON)
    total_bytes: Mapped[int | None]
    processed_bytes: Mapped[int | None]
    bytes_per_s: Mapped[float | None]
    dirty_bytes_per_s: Mapped[float | None]
    max_downtime_ms: Mapped[float | None]
    expected_downtime_ms: Mapped[float | None]
    expected_downtime_basis: Mapped[str | None] = mapped_column(Text)
    downtime_ms: Mapped[float | None]
    setup_ms: Mapped[float | None]
    path: Mapped[str | None] = mapped_column(String(8))  # of a move: peer, or host
    code: Mapped[str | None] = mapped_column(String(64))
    error: Mapped[str | None] = mapped_column(Text)
    process_location: Mapped[str] = mapped_column(String(16))
    target_pid: Mapped[int | None]
    target_start_time: Mapped[int | None]
    started_at: Mapped[float]
    ended_at: Mapped[float | None]


class Operation(Base):
    """Long work. The row is on the disk before the work begins; what is unknown is null."""

    __tablename__ = "operations"
    __table_args__ = (Index(None, "subject_type", "subject_id"),)

    number: Mapped[int] = mapped_column(primary_key=True)  # the order in which they were requested
    id: Mapped[str] = mapped_column(String(32), unique=True)
    kind: Mapped[str] = mapped_column(String(32))
    state: Mapped[str] = mapped_column(String(16), index=True)
    phase: Mapped[str] = mapped_column(String(64))
    subject_type: Mapped[str] = mapped_column(String(32))
    subject_id: Mapped[str] = mapped_column(String(64))
    job_id: Mapped[str | None] = mapped_column(String(32), index=True)
    owner: Mapped[int | None]  # the user whose job it concerns; null: the node's
    requestor: Mapped[str] = mapped_column(String(255))
    request: Mapped[dict[str, Any]] = mapped_column(JSON)  # what was requested, for whoever resolves it after a restart
    created_at: Mapped[float]
    started_at: Mapped[float | None]
    ended_at: Mapped[float | None]
    may_cancel: Mapped[bool]
    may_cancel_why: Mapped[str] = mapped_column(Text)
    progress: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    result: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    error: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))


class Event(Base):
    """What happened, in the order of `id`. Ids are never used twice, not even after the rows have been trimmed."""

    __tablename__ = "events"
    __table_args__ = {"sqlite_autoincrement": True}  # noqa: RUF012

    id: Mapped[int] = mapped_column(primary_key=True)
    type: Mapped[str] = mapped_column(String(32))
    subject_type: Mapped[str] = mapped_column(String(32))
    subject_id: Mapped[str] = mapped_column(String(64))
    job_id: Mapped[str | None] = mapped_column(String(32))
    owner: Mapped[int | None]  # the user whose job it concerns; null: the node's
    at: Mapped[float]
    data: Mapped[dict[str, Any]] = mapped_column(JSON)


class Webhook(Base):
    """Where events are sent to."""

    __tablename__ = "webhooks"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    url: Mapped[str] = mapped_column(Text)
    secret: Mapped[str] = mapped_column(String(255))  # deliveries are signed with it; no answer has it
    types: Mapped[list[str]] = mapped_column(JSON)  # of events; empty: all but audit
    enabled: Mapped[bool]
    created_at: Mapped[float]
    created_by: Mapped[str] = mapped_column(String(255))
    version: Mapped[int]  # of what PATCH changes: its ETag
    position: Mapped[int]  # the event up to which everything was delivered, or is a dead letter
    delivered: Mapped[int]
    dropped: Mapped[int]  # dead letters that had to make room


class DeadLetter(Base):
    """An event that a webhook's target has not taken."""

    __tablename__ = "dead_letters"
    __table_args__ = (Index(None, "webhook_id", "number"), {"sqlite_autoincrement": True})

    number: Mapped[int] = mapped_column(primary_key=True)
    webhook_id: Mapped[str] = mapped_column(ForeignKey("webhooks.id", ondelete="CASCADE"))
    event_id: Mapped[int]
    event: Mapped[dict[str, Any]] = mapped_column(JSON)
    attempts: Mapped[int]
    error: Mapped[str] = mapped_column(Text)  # of the last attempt
    queued: Mapped[bool]  # it is to be sent again
    at: Mapped[float]


class AuditEntry(Base):
    """Who requested what, before its effect, and how it went, after it: two rows. The database itself (triggers)
    refuses to change or delete them."""

    __tablename__ = "audit"
    __table_args__ = {"sqlite_autoincrement": True}  # noqa: RUF012

    id: Mapped[int] = mapped_column(primary_key=True)
    at: Mapped[float]
    entry: Mapped[str] = mapped_column(String(8))  # intent, outcome
    intent_id: Mapped[int | None]  # of an outcome
    request_id: Mapped[str] = mapped_column(String(64))
    requestor: Mapped[str] = mapped_column(String(255))
    uid: Mapped[int | None]
    via: Mapped[str] = mapped_column(String(16))  # unix, network, xmigd
    action: Mapped[str] = mapped_column(String(255))
    detail: Mapped[dict[str, Any]] = mapped_column(JSON)
    outcome: Mapped[str | None] = mapped_column(String(64))  # done, or the error's code; null: an intent
    status: Mapped[int | None]  # HTTP's


class Token(Base):
    """A bearer token. What its holder has is not kept, only its hash."""

    __tablename__ = "tokens"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    name: Mapped[str] = mapped_column(String(64))
    hash: Mapped[str] = mapped_column(String(64), unique=True)
    scope: Mapped[str] = mapped_column(String(16))
    uid: Mapped[int | None]  # whose jobs it is for; null: the node's
    created_by: Mapped[str] = mapped_column(String(255))
    created_at: Mapped[float]
    expires_at: Mapped[float | None]
    last_used_at: Mapped[float | None]
    revoked_at: Mapped[float | None]


class IdempotencyKey(Base):
    """A request that is done once, and its answer."""

    __tablename__ = "idempotency_keys"

    caller: Mapped[str] = mapped_column(String(255), primary_key=True)
    key: Mapped[str] = mapped_column(String(255), primary_key=True)
    request: Mapped[str] = mapped_column(String(64))  # hash of method, path and body
    status: Mapped[int | None]  # null: it has not been answered
    headers: Mapped[dict[str, str]] = mapped_column(JSON)
    body: Mapped[str | None] = mapped_column(Text)  # null: it held a secret
    operation_id: Mapped[str | None] = mapped_column(String(32))  # that it began, written in the intent's transaction
    at: Mapped[float] = mapped_column(index=True)


class Policy(Base):
    """What operators have set; what is missing has its default."""

    __tablename__ = "policies"

    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    version: Mapped[int]
    settings: Mapped[dict[str, Any]] = mapped_column(JSON)
    updated_at: Mapped[float]
    updated_by: Mapped[str] = mapped_column(String(255))


class Breaker(Base):
    """The circuit breaker of automatic actions. It stays open across restarts."""

    __tablename__ = "breaker"

    id: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[str] = mapped_column(String(8))  # closed, open
    why: Mapped[str] = mapped_column(Text)
    changed_at: Mapped[float | None]
    actions: Mapped[list[dict[str, Any]]] = mapped_column(JSON)  # those of its window
