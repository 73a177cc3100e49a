"""What bodies about migrations say. Times are Unix seconds; *_ms are milliseconds; what is not known is null."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from xmigd.published import MOST_PORTS
from xmigd.records import Priority
from xmigd.schemas import Answer
from xmigd.text import VISIBLE

Engine = Literal["proxy", "driver"]
TARGET = 1024  # characters of a node and its devices


class Request(BaseModel):
    model_config = ConfigDict(extra="forbid")


LeaveAllocation = Annotated[
    bool,
    Field(
        description="to another device of this node also if the job is one of Slurm's or Kubernetes', which know "
        "nothing of it, and may give that device to somebody else"
    ),
]


class PlanRequest(Request):
    process: Annotated[str, Field(max_length=64)]
    engine: Engine = "proxy"
    leave_allocation: LeaveAllocation = False
    node: Annotated[
        str | None,
        Field(
            max_length=TARGET,
            description="a peer, as `NODE` or `NODE/DEVICES`: for all processes of the job, in the place of this "
            "node's devices; for operators",
        ),
    ] = None


class ReasonInfo(Answer):
    code: str
    text: str


class TargetInfo(Answer):
    device: str
    allowed: bool
    reasons: list[ReasonInfo]
    room_bytes: int | None
    expected_downtime_ms: float | None = Field(default=None, description="how long the program would stand still")
    expected_downtime_basis: str | None = Field(default=None, description="what that is estimated from")


class PlaceInfo(Answer):
    process: str
    source: str = Field(description="its device")
    device: str | None = Field(description="that it would get; null: there is none for it")
    reasons: list[ReasonInfo] = Field(description="what prevents that")


class PlanInfo(Answer):
    process: str
    engine: str
    source: str = Field(description="its device; of a suspended process host or file")
    live_bytes: int | None = Field(description="that its last snapshot holds: what is copied")
    held_bytes: int = Field(description="device memory that it has")
    free_bytes: int | None = Field(description="of that, what it does not use now: not copied")
    targets: list[TargetInfo]
    places: list[PlaceInfo] = Field(
        default=[], description="to another node: of each process of the job, in the order in which they began"
    )
    becomes: Priority | None = Field(
        default=None, description="to another node: the class that the job has there, if that node gives it another one"
    )


class MoveRequest(Request):
    process: Annotated[str, Field(max_length=64)]
    target: Annotated[
        str,
        Field(
            max_length=TARGET,
            description="a device; `NODE` or `NODE/DEVICES`: another node, to which all processes of the job go, which "
            "get these devices in turn, in the order in which they began; for operators",
        ),
    ]
    engine: Engine = "proxy"
    max_downtime_ms: Annotated[float | None, Field(gt=0, le=3_600_000)] = None
    leave_allocation: LeaveAllocation = False
    publish: Annotated[
        list[Annotated[str, Field(max_length=64)]],
        Field(
            max_length=MOST_PORTS,
            description="with another node: ports there that lead to the job's private network: PORT, PORT:INNER or "
            "ADDRESS:PORT:INNER",
        ),
    ] = []


class SuspendRequest(Request):
    to: Literal["host", "file"] = "host"


class ResumeRequest(Request):
    device: Annotated[str | None, Field(max_length=64)] = None
    devices: Annotated[
        list[Annotated[str, Field(max_length=64)]],
        Field(
            max_length=1024,
            description="in the place of `device`: the processes get these in turn, in the order in which they began",
        ),
    ] = []
    leave_allocation: LeaveAllocation = False

    @property
    def chosen(self) -> list[str]:
        return self.devices if self.device is None else [self.device]


Otherwise = Literal["stay", "suspend", "checkpoint", "either"]


class DrainWays(Request):
    """What a drain may do beside moves to other devices of this node."""

    nodes: Annotated[
        list[Annotated[str, Field(max_length=64)]],
        Field(
            max_length=64,
            description="peers to which a job moves that no other device of this node takes: to the first that has a "
            "place for it; `*`: all peers",
        ),
    ] = []
    otherwise: Otherwise = Field(
        default="stay",
        description="what becomes of a job that cannot move, or whose move fails: it stays; or it is preempted: "
        "suspended to host memory, ended as a checkpoint, or either: what is possible first",
    )


class DrainRequest(DrainWays):
    reason: Annotated[
        str,
        Field(max_length=500, pattern=VISIBLE, description="empty: that of the cordon, or `drained` if there is none"),
    ] = ""

    within_seconds: Annotated[
        float | None,
        Field(ge=0.1, le=604_800, description="what is not moved by then stays, and is reported; null: no limit"),
    ] = None


class DrainPlanRequest(DrainWays):
    devices: Annotated[list[Annotated[str, Field(max_length=64)]], Field(min_length=1, max_length=64)]


class DrainStep(Answer):
    """What a drain would do with a process."""

    process: str
    job_id: str
    job_name: str
    source: str
    how: Literal["move", "transfer", "host", "file", "checkpoint", "stuck"] = Field(
        description="moved to another device, transferred to another node, suspended to host memory or to files, ended "
        "as a checkpoint; stuck: it stays"
    )
    target: str | None = Field(description="the device, of another node with its name; null: it is not moved")
    needed_bytes: int = Field(description="device memory that the target would need for it")
    expected_downtime_ms: float | None
    reasons: list[ReasonInfo] = Field(description="why it is stuck, or not moved")


class DrainPlanInfo(Answer):
    """One process after the other, each with the room that those before it would leave."""

    devices: list[str]
    moves: int = Field(description="to other devices and other nodes")
    preempted: int
    stuck: int
    steps: list[DrainStep]


class PhaseInfo(Answer):
    name: str
    at: float
    ms: float | None


class IterationInfo(Answer):
    n: int
    copied_bytes: int
    dirty_bytes: int
    ms: float
    loading_ms: float | None = Field(
        default=None, description="of the program's code, after copying; not known of moves by earlier versions"
    )


class MigrationInfo(Answer):
    """A move, a suspension or a resumption. What is not known is null."""

    id: str
    operation_id: str | None
    process_id: str
    job_id: str
    job_name: str
    engine: str
    kind: Literal["move", "suspend", "resume"]
    source: str
    target: str
    state: Literal["running", "done", "failed", "cancelled"]
    phase: str
    phases: list[PhaseInfo]
    iterations: list[IterationInfo]
    total_bytes: int | None
    processed_bytes: int | None
    remaining_bytes: int | None
    bytes_per_s: float | None
    dirty_bytes_per_s: float | None
    max_downtime_ms: float | None
    expected_downtime_ms: float | None
    expected_downtime_basis: str | None
    downtime_ms: float | None
    setup_ms: float | None
    path: Literal["peer", "host"] | None = Field(
        description="of a move: from device to device, or through host memory where they cannot reach each other"
    )
    code: str | None
    error: str | None
    process_location: str
    started_at: float
    ended_at: float | None
