"""Bodies of requests and answers. Times are Unix seconds; *_ms are milliseconds; what is not known is null."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from xmigd.errors import ProcessLocation
from xmigd.operations.repository import OperationState
from xmigd.process.events import InjectKind, InjectPoint
from xmigd.records import LogLevel, LogSource
from xmigd.security.callers import Scope
from xmigd.text import VISIBLE


class Problem(BaseModel):
    """RFC 9457."""

    type: str = "about:blank"
    title: str
    status: int
    code: str
    detail: str
    hint: str = ""
    phase: str | None = Field(default=None, description="of the operation, in which it failed")
    operation: str | None = Field(default=None, description="the operation that it is about")
    process_location: ProcessLocation | None = Field(default=None, description="where the process lives now")


EXACT = (1 << 53) - 1  # the largest of the whole numbers that every JSON reader reads as they are


class Answer(BaseModel):
    model_config = ConfigDict(from_attributes=True)


class CallerInfo(Answer):
    name: str
    scope: Scope
    uid: int | None = Field(description="whose programs they may start; null: a token of the node's")
    operator: bool
    sees_everything: bool = Field(description="not only what belongs to their user")


class NodeInfo(Answer):
    version: str
    pid: int
    uid: int
    started_at: float
    runtime_dir: str
    database: str
    tcp_address: str | None
    devices: list[str]
    processes: int
    database_failure: str | None


class DeviceInfo(Answer):
    id: str
    kind: str
    ordinal: int
    configured: bool = Field(description="false: an earlier configuration had it")
    uuid: str | None = Field(description="as its programs see it; null until one has")
    name: str | None
    state: Literal["ready", "cordoned", "unhealthy"]
    why: str = Field(description="of the state")
    memory_bytes: int | None
    used_bytes: int | None
    free_bytes: int | None
    utilisation: float | None = Field(description="share of time in which a kernel ran, 0 to 1; null: not known")
    held_bytes: int = Field(description="of used_bytes, by xMIG: programs' memory, shadows, servers' contexts")
    cordoned: bool
    cordon_reason: str
    processes: int
    process_ids: list[str]
    version: int = Field(description="its ETag's")


class DeviceChange(BaseModel):
    model_config = ConfigDict(extra="forbid")

    cordoned: bool | None = Field(default=None, description="a cordoned device gets no new process")
    reason: Annotated[str, Field(max_length=255, pattern=VISIBLE)] | None = None


class JobRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(max_length=255, pattern=VISIBLE)] = ""
    command: Annotated[str, Field(max_length=4096)] = ""
    device: Annotated[str, Field(max_length=64, pattern=r"^[a-z]+:[0-9]+(,[0-9]+)*$")] | None = None
    visible_devices: Annotated[
        str, Field(max_length=507, pattern=VISIBLE, description="as in CUDA_VISIBLE_DEVICES; not with `device`")
    ] | None = None  # fmt: skip
    hang_timeout: Annotated[
        float, Field(ge=0, le=1e9, description="seconds without progress after which its kernel hangs; 0: never")
    ] | None = None  # fmt: skip
    watch: bool = Field(
        default=False, description="the caller becomes or starts the job's program: with it the job ends (local only)"
    )
    strict: bool = Field(default=False, description="end the job when one of its processes is not protected")


JobState = Literal["created", "running", "suspended", "ended", "stopped", "lost"]


class JobExit(BaseModel):
    """One of both."""

    model_config = ConfigDict(extra="forbid")

    exit_code: Annotated[int, Field(ge=0, le=255)] | None = None
    exit_signal: Annotated[int, Field(ge=1, le=64, description="the signal that ended it")] | None = None


class JobInfo(Answer):
    id: str
    name: str
    command: str
    uid: int
    user: str = Field(default="", description="what the daemon's machine calls them")
    device: str | None
    registered: bool
    hang_timeout: float | None = Field(description="seconds; null: the daemon's setting")
    created_at: float
    ended_at: float | None = Field(default=None, description="null: it has not ended, or nobody saw when")
    duration_s: float | None = Field(default=None, description="seconds from its beginning to its end")
    exit_code: int | None = Field(
        default=None, description="of the program that `xmigctl run` started; null: not known, or a signal ended it"
    )
    exit_signal: int | None = Field(default=None, description="the signal that ended it")
    state: JobState
    processes: int = Field(description="that live")
    suspended: int = Field(default=0, description="of these")
    strict: bool = Field(description="it ends when one of its processes is not protected")
    unprotected: int = Field(
        description="processes that have, or had, the genuine driver beside or instead of the shim"
    )
    faults: int
    recoveries: int
    expected_stall_ms: float | None = Field(
        default=None, description="of its process with the longest, when one job is asked for; null: not known"
    )


class JobMade(JobInfo):
    """What a program needs to belong to the job: set these, and preload the shims."""

    environment: dict[str, str]
    defaults: dict[str, str] = Field(
        description="variables, where its user has not set them: allocators that say what they free"
    )
    preload: str = Field(description="what LD_PRELOAD begins with")
    library_path: str = Field(
        description="what LD_LIBRARY_PATH begins with: a folder with nothing but the shims' names"
    )
    watched: bool = Field(
        default=False,
        description="the daemon sees the caller's end, with its exit code; otherwise it is to be reported",
    )


class StopAnswer(Answer):
    job: str
    signalled: int = Field(description="programs that were sent SIGTERM")


class LogLineInfo(Answer):
    id: int
    process_id: str | None
    at: float
    source: LogSource = Field(description="program: the shim, in the program")
    level: LogLevel
    text: str = Field(description="one line; what a terminal or a browser would act upon is escaped")


class InjectRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    point: InjectPoint = "record"
    kind: InjectKind = "kill"
    sequence: Annotated[int, Field(ge=0, le=EXACT, description="first record it applies to")] = 0
    error: Annotated[int, Field(ge=1, le=999, description="CUresult of a fault")] = 700
    process: Annotated[str, Field(max_length=32)] | None = None


class Armed(Answer):
    process: str
    injection: int


class ProcessInfo(Answer):
    """Of one in state `unprotected` nothing is known but what /proc says: it has never come to xMIG."""

    id: str
    job_id: str
    job_name: str
    pid: int
    uid: int
    user: str = Field(default="", description="what the daemon's machine calls them")
    command: str
    device: str
    state: str
    why: str
    protected: bool = Field(
        default=True, description="false: it has loaded the genuine driver, or opened a device itself"
    )
    unprotected: str = Field(description="why it is not protected; empty: it is")
    server_pid: int | None
    standby: str | None = None
    standby_preloaded: bool = Field(default=False, description="has it loaded the modules that a recovery will need?")
    location: str = Field(default="device", description="of its state: device, moving, host, file or lost")
    suspended: bool = False
    generation: int
    started_at: float
    ended_at: float | None
    exit_code: int | None = Field(default=None, description="null: not known, or a signal ended it")
    exit_signal: int | None = None
    cuts: int | None = None
    expected_stall_ms: float | None = Field(
        default=None, description="what the program would wait if its server died now; null: no server tells"
    )
    stall_bound_ms: float | None = Field(default=None, description="what snapshots are to keep that below")
    snapshots_ms: float | None = Field(default=None, description="what snapshots have cost it since it began")
    live_bytes: int | None = None
    held_bytes: int | None = Field(default=None, description="the program's memory, shadow and module images")
    shadow_bytes: int | None = Field(default=None, description="device memory that holds the last cut")
    server_bytes: int | None = Field(default=None, description="device memory of its servers' contexts, about")
    faults: int
    recoveries: int


class RebindRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    pid: Annotated[int, Field(ge=1, lt=1 << 31, description="the process in which the program was restored")]


class Position(Answer):
    position: int = Field(description="byte of the journal before which everything is executed")


class SegmentInfo(Answer):
    number: int
    position: int
    sequence: int
    journal_bytes: int
    live_bytes: int
    copied_bytes: int
    chunks: int
    objects: int
    ms: float = Field(description="in which nothing was executed and the device had nothing to do")
    waited_ms: float = Field(description="before that, until the device had finished what it had")
    hash_ms: float = Field(description="of ms, for hashing live memory where it is")
    copy_ms: float = Field(description="of ms, for copying what has changed, and its hashes")
    hashed_bytes: int = Field(description="where they are; what is copied is hashed with it")
    reason: str
    at: float
    kept_bytes: int | None = Field(default=None, description="in the store, compressed; null: this cut was not kept")
    images: int | None = Field(default=None, description="module images that are kept with it")


class FaultInfo(Answer):
    id: int
    process_id: str
    job_id: str
    job_name: str
    number: int
    kind: str
    text: str
    sequence: int | None
    op: str | None
    error: int | None
    injection: int | None
    at: float
    acknowledged_at: float | None = Field(description="null: nobody has acknowledged it")
    acknowledged_by: str | None


class RecoveryInfo(Answer):
    id: int
    process_id: str
    job_id: str
    job_name: str
    number: int
    cause: str
    fault: int | None
    outcome: str
    attempts: int
    standby: str
    cut: int
    expected_ms: float | None = Field(description="the stall that was expected when it occurred; null: not known")
    detected_ms: float
    standby_ready_ms: float | None
    mapped_ms: float | None
    restored_ms: float | None
    redone_ms: float | None
    resumed_ms: float | None
    records: int | None
    compared: int | None
    differing: int | None
    first_difference: int | None
    exact: bool | None = Field(description="every reply that the program had was the same in the redo")
    delivered_sequence: int | None
    delivered_error: int | None
    story: list[str]
    at: float


class Health(Answer):
    status: Literal["ok"] = "ok"


class Subject(Answer):
    type: str
    id: str


class OperationInfo(Answer):
    """Long work, and how far it is."""

    id: str
    kind: str
    state: OperationState
    phase: str
    subject: Subject
    job_id: str | None
    requestor: str
    created_at: float
    started_at: float | None
    ended_at: float | None
    may_cancel: bool
    may_cancel_why: str = Field(description="why it cannot be cancelled")
    progress: dict[str, Any] | None
    result: dict[str, Any] | None
    error: Problem | None


class EventInfo(Answer):
    id: int | None = Field(description="its place in the sequence; null: a sample, which is not kept")
    type: str
    subject: Subject
    job_id: str | None
    at: float
    data: dict[str, Any]


class TokenRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(min_length=1, max_length=64, pattern=VISIBLE)]
    scope: Scope = "read"
    uid: Annotated[int, Field(ge=0, lt=(1 << 32) - 1)] | None = Field(
        default=None, description="whose jobs it is for; null: the node's"
    )
    lifetime: Annotated[float, Field(ge=1, le=1e9)] | None = Field(
        default=30 * 86_400.0, description="seconds until it expires; null: never"
    )


class TokenInfo(Answer):
    id: str
    name: str
    scope: Scope
    uid: int | None
    user: str | None = Field(default=None, description="what the daemon's machine calls them; null: the node's")
    created_by: str
    created_at: float
    last_used_at: float | None = Field(default=None, description="to a minute; null: never")
    expires_at: float | None
    revoked_at: float | None


class TokenMade(TokenInfo):
    token: str = Field(description="for `Authorization: Bearer`; never shown again")


class AuditInfo(Answer):
    id: int
    at: float
    entry: Literal["intent", "outcome"]
    intent_id: int | None = Field(description="of an outcome")
    request_id: str
    requestor: str
    uid: int | None
    via: str
    action: str
    detail: dict[str, Any]
    outcome: str | None = Field(description="done, or the error's code")
    status: int | None


class PolicyInfo(Answer):
    name: str
    description: str
    version: int = Field(description="its ETag's; 0: nobody has changed it")
    settings: dict[str, float | int] = Field(description="what applies")
    defaults: dict[str, float | int] = Field(description="what the settings say")
    units: dict[str, str] = Field(description="what each value is measured in, or counts: seconds, share, faults…")
    updated_at: float | None
    updated_by: str | None


class AutomaticAction(Answer):
    at: float
    action: str
    subject: Subject
    why: str


class BreakerInfo(Answer):
    state: Literal["closed", "open"] = Field(description="open: automation is stopped until it is reset")
    why: str
    changed_at: float | None
    actions: list[AutomaticAction] = Field(description="that count now, oldest first")
    max_actions: int
    window_seconds: float


class SeriesInfo(Answer):
    interval_s: float
    samples: dict[str, list[float | None]] = Field(description="a list for each value; `at` has the times")
