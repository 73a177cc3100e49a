"""What bodies about jobs say. Times are Unix seconds; *_ms are milliseconds; what is not known is null."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from xmigd.checkpoints.movable import Code, Stops
from xmigd.process.events import InjectKind, InjectPoint
from xmigd.records import LogLevel, LogSource, Priority, ReplicaPolicy
from xmigd.schemas import EXACT, Answer, written
from xmigd.text import VISIBLE

MOST_LABELS = 32  # of a job
MOST_WALLTIME = 366 * 86400.0  # seconds
QUOTA_LEAST = 2 << 20  # bytes: memory comes in pieces of this size
LABEL_KEY = r"^[A-Za-z0-9]([A-Za-z0-9._/-]{0,61}[A-Za-z0-9])?$"
LABEL_WORDS = "a label's key has 1 to 63 of A-Z a-z 0-9 . _ / - and begins and ends with a letter or a digit"
LabelKey = Annotated[str, Field(pattern=LABEL_KEY), written(LABEL_KEY, LABEL_WORDS)]
LabelValue = Annotated[str, Field(max_length=255, pattern=VISIBLE)]
ExternalId = Annotated[
    str, Field(min_length=1, max_length=255, pattern=VISIBLE, description="what its scheduler calls it: slurm:4711")
]


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
    replica_policy: ReplicaPolicy | None = Field(
        default=None, description="when a rank's memory differs from its replicas'; null: the daemon's setting"
    )
    watch: bool = Field(
        default=False, description="the caller becomes or starts the job's program: with it the job ends (local only)"
    )
    strict: bool = Field(default=False, description="end the job when one of its processes is not protected")
    nodes: Annotated[
        list[Annotated[str, Field(pattern=r"^[a-z0-9.-]{1,64}$")]],
        Field(max_length=48, description="that its ranks are on, this one among them; the first leads. None: this one"),
    ] = []
    network: bool = Field(
        default=False,
        description="make a network of the job's own that leads to its parts on `nodes`. The caller is root, and its "
        "programs enter it (local only, with `watch`)",
    )
    labels: Annotated[
        dict[LabelKey, LabelValue], Field(max_length=MOST_LABELS, description="by which the job is found again")
    ] = {}
    external_id: ExternalId | None = None
    priority: Priority = Field(
        default="normal",
        description="its class: critical (needs a grant), normal, best-effort. Kernels of a best-effort job wait while "
        "a critical one on the device has work",
    )
    memory_quota: Annotated[
        int,
        Field(
            ge=QUOTA_LEAST, le=EXACT,
            description="device memory that its programs have together, and each sees, of each of its devices; null: "
            "all. The same is reserved, unless `reserve_bytes` says less",
        ),
    ] | None = None  # fmt: skip
    sm_share: Annotated[
        int,
        Field(
            ge=1, le=100,
            description="percent of its device's multiprocessors that each of its programs has at most, where the "
            "device is shared through MPS; null: all. Without `device` it gets one that is",
        ),
    ] | None = None  # fmt: skip
    walltime_s: Annotated[
        float,
        Field(
            gt=0, le=MOST_WALLTIME, allow_inf_nan=False,
            description="seconds that it takes at most, as its user or its scheduler expects; predictions begin with "
            "it. It does not end the job",
        ),
    ] | None = None  # fmt: skip
    reserve_bytes: Annotated[
        int,
        Field(
            ge=1, le=EXACT,
            description="device memory that it will need on each of its devices; refused if that is not free; null: "
            "nothing is reserved",
        ),
    ] | None = None  # fmt: skip


class JobChange(BaseModel):
    """What is left out stays."""

    model_config = ConfigDict(extra="forbid")

    labels: Annotated[
        dict[LabelKey, LabelValue | None],
        Field(max_length=2 * MOST_LABELS, description="those that change, by their keys; null removes one"),
    ] = {}
    external_id: ExternalId | None = Field(default=None, description="null removes it")


JobState = Literal["created", "running", "suspended", "ended", "stopped", "lost"]  # in this order with sort=state


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
    device: str | None = Field(description="that it names; null: none, xMIG has chosen")
    devices: list[str] = Field(
        default=[], description="that its processes have; of a job that is over, those that they had last"
    )
    registered: bool
    hang_timeout: float | None = Field(description="seconds; null: the daemon's setting")
    replica_policy: ReplicaPolicy | None = Field(
        default=None, description="when a rank's memory differs from its replicas'; null: the daemon's setting"
    )
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
    nodes: list[str] = Field(default=[], description="that its ranks are on, the one that leads first; none: this one")
    unprotected: int = Field(
        description="processes that have, or had, the genuine driver beside or instead of the shim"
    )
    faults: int
    recoveries: int
    labels: dict[str, str] = Field(default={})
    external_id: str | None = Field(default=None, description="what its scheduler calls it")
    priority: Priority = "normal"
    reserved_bytes: int | None = Field(default=None, description="device memory, on each of its devices")
    memory_quota: int | None = Field(
        default=None, description="device memory that its programs have together of each of its devices; null: all"
    )
    sm_share: int | None = Field(
        default=None, description="percent of its device's multiprocessors, where that is shared through MPS; null: all"
    )
    walltime_s: float | None = Field(
        default=None, description="seconds that it takes at most, as its user or its scheduler expects"
    )
    restored_from: str | None = Field(default=None, description="the job whose checkpoint it was restored from")
    version: int = Field(default=1, description="its ETag's")
    memory_bytes: int | None = Field(
        default=None,
        description="device memory of its programs and their snapshots, when one job is requested or with "
        "sort=memory; null otherwise",
    )
    expected_stall_ms: float | None = Field(
        default=None, description="of its process with the longest, when one job is requested; null: not known"
    )


class JobMade(JobInfo):
    """What a program needs to belong to the job: set these, and preload the shims."""

    environment: dict[str, str]
    defaults: dict[str, str] = Field(
        description="variables, where its user has not set them: allocators that say what they free"
    )
    network: str | None = Field(
        default=None, description="the network namespace that its programs are to enter; null: it has none of its own"
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


class ObstacleInfo(Answer):
    code: Code
    pid: int
    what: str = Field(description="a descriptor, a mapping or a setting, and what it is of")
    why: str
    hint: str = Field(description="what to do")
    stops: Stops = Field(
        description="here: the dump; elsewhere: the restoration on another node; depends: it is restored where the "
        "other node has the same"
    )


class ProgramMovable(Answer):
    """A process of the job with those that descend from it: they are dumped together."""

    process_id: str
    pid: int
    pids: list[int] = Field(description="it and those that descend from it")
    dumpable: bool = Field(description="nothing stops the dump")
    movable: bool = Field(description="nothing stops the restoration on another node, either")
    obstacles: list[ObstacleInfo] = Field(description="that which stops most first; at most 1000")


class JobMovable(Answer):
    job: str
    dumpable: bool = Field(description="all of its programs are")
    movable: bool = Field(description="all of its programs are")
    programs: list[ProgramMovable] = Field(description="on this node, without those that descend from another one")


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
    address: Annotated[
        int, Field(ge=0, le=EXACT, description="of a flip: device memory; null: where replicas are compared")
    ] | None = None  # fmt: skip


class Armed(Answer):
    process: str
    injection: int
