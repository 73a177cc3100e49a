"""Bodies of requests and answers. Times are Unix seconds; *_ms are milliseconds; what is not known is null."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from xmigd.recovery.events import InjectKind, InjectPoint


class Problem(BaseModel):
    """RFC 9457."""

    type: str = "about:blank"
    title: str
    status: int
    code: str
    detail: str
    hint: str = ""


class Answer(BaseModel):
    model_config = ConfigDict(from_attributes=True)


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
    configured: bool
    memory_bytes: int | None
    processes: int


class JobRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(max_length=255, pattern=r"^[^\x00-\x1f\x7f]*$")] = ""
    command: Annotated[str, Field(max_length=4096)] = ""
    device: Annotated[str, Field(max_length=64, pattern=r"^[a-z]+:[0-9]+(,[0-9]+)*$")] | None = None
    hang_timeout: Annotated[
        float, Field(ge=0, le=1e9, description="seconds without progress after which its kernel hangs; 0: never")
    ] | None = None  # fmt: skip


JobState = Literal["created", "running", "ended", "stopped", "lost"]


class JobInfo(Answer):
    id: str
    name: str
    command: str
    uid: int
    device: str | None
    registered: bool
    hang_timeout: float | None = Field(description="seconds; null: the daemon's setting")
    created_at: float
    state: JobState
    processes: int
    faults: int
    recoveries: int


class JobMade(JobInfo):
    """What a program needs to belong to the job: set these, and preload the shims."""

    environment: dict[str, str]
    preload: str = Field(description="what LD_PRELOAD begins with")


class StopAnswer(Answer):
    job: str
    signalled: int = Field(description="programs that were sent SIGTERM")


class InjectRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    point: InjectPoint = "record"
    kind: InjectKind = "kill"
    sequence: Annotated[int, Field(ge=0, lt=1 << 63, description="first record it applies to")] = 0
    error: Annotated[int, Field(ge=1, le=999, description="CUresult of a fault")] = 700
    process: Annotated[str, Field(max_length=32)] | None = None


class Armed(Answer):
    process: str
    injection: int


class ProcessInfo(Answer):
    id: str
    job_id: str
    job_name: str
    pid: int
    uid: int
    command: str
    device: str
    state: str
    why: str
    server_pid: int | None
    standby: str | None = None
    generation: int
    started_at: float
    ended_at: float | None
    cuts: int | None = None
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
    ms: float
    reason: str
    at: float


class FaultInfo(Answer):
    id: int
    process_id: str
    job_id: str
    number: int
    kind: str
    text: str
    sequence: int | None
    op: str | None
    error: int | None
    injection: int | None
    at: float


class RecoveryInfo(Answer):
    id: int
    process_id: str
    job_id: str
    number: int
    cause: str
    fault: int | None
    outcome: str
    attempts: int
    standby: str
    cut: int
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
    status: Literal["ok", "failing"]
    detail: str = ""
