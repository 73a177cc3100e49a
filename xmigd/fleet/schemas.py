"""What bodies about the fleet say, and what nodes send each other about themselves. Times are Unix seconds; *_ms are
milliseconds; what is not known is null.

What a peer sends is hostile: every number and text has a bound, and what is shown of it is made harmless.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from xmigd.peers.contract import NAME
from xmigd.schemas import EXACT, Answer
from xmigd.text import VISIBLE

MOST_JOBS = 1000  # of one node
MOST_PROCESSES = 1000  # of one node
MOST_OF_JOB = 64  # processes
MOST_DEVICES = 1024  # of one node
MOST_NODES = 1025

Name = Annotated[str, Field(max_length=255, pattern=VISIBLE)]
Short = Annotated[str, Field(max_length=64, pattern=VISIBLE)]
Words = Annotated[str, Field(max_length=300, pattern=VISIBLE)]
Bytes = Annotated[int, Field(ge=0, le=EXACT)]
Share = Annotated[float, Field(ge=0, le=1024, allow_inf_nan=False)]
Ms = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=EXACT)]
Uid = Annotated[int, Field(ge=0, lt=1 << 32)]
Time = Annotated[float, Field(ge=0, le=1e11, allow_inf_nan=False)]
Id = Annotated[str, Field(pattern=r"^[0-9a-zA-Z_-]{1,64}$")]
DeviceName = Annotated[str, Field(pattern=r"^[a-z]{1,16}:[0-9]{1,4}(,[0-9]{1,4}){0,63}$")]
NodeName = Annotated[str, Field(pattern=NAME)]
NodeNames = Annotated[list[NodeName], Field(max_length=MOST_NODES)]


class Shown(Answer):
    """A part of what a node shows. What a newer version adds is not read."""

    model_config = ConfigDict(from_attributes=True, extra="ignore", frozen=True)


class FleetDevice(Shown):
    id: DeviceName
    name: Name | None = None
    state: Literal["ready", "cordoned", "unhealthy", "not_configured"]
    why: Words = Field(default="", description="of the state")
    memory_bytes: Bytes | None = None
    used_bytes: Bytes | None = None
    capacity_bytes: Bytes | None = Field(default=None, description="that processes under xMIG can have; null: unknown")
    utilisation: Share | None = None
    health: Short = Field(default="fine", description="the rung of the answer to the worst of its open findings")
    findings: Annotated[list[Words], Field(max_length=16)] = Field(default=[])
    processes: Count = Field(default=0, description="of all users")


class FleetProcess(Shown):
    id: Id
    device: DeviceName
    state: Short
    memory_bytes: Bytes = Field(description="that it takes, with its snapshot copy and its contexts")
    busy_share: Share | None = Field(default=None, description="share of time in which it had work in the last minute")
    stays: Words = Field(default="", description="why it cannot move to another node; empty: nothing is known against")
    rank: bool = Field(default=False, description="it shares communicators with others of its job")


class FleetJob(Shown):
    id: Id
    name: Name
    uid: Uid
    user: Name
    state: Short
    created_at: Time
    priority: Short = "normal"
    processes: Annotated[list[FleetProcess], Field(max_length=MOST_OF_JOB)] = Field(
        description="that live, in the order in which they began"
    )


class Way(Shown):
    """What transfers from this node to a peer were like, from the last of them."""

    transfers: Count
    standstill_ms: Ms | None = Field(default=None, description="median")
    bytes_per_s: Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)] | None = Field(
        default=None, description="median of the largest rounds"
    )


class NodeShown(Shown):
    """What a node shows of itself to a caller."""

    version: Short
    at: Time = Field(description="by that node's clock")
    devices: Annotated[list[FleetDevice], Field(max_length=MOST_DEVICES)]
    jobs: Annotated[list[FleetJob], Field(max_length=MOST_JOBS)] = Field(description="with processes that live")
    left_out: Count = Field(default=0, description="jobs that are not listed, because there are too many")
    ways: dict[NodeName, Way] = Field(default={}, max_length=64, description="by peer")


NodeState = Literal["answered", "silent", "unreachable", "refused", "not_allowed", "invalid"]


class FleetNode(Answer):
    name: str
    here: bool = Field(description="the node that answers")
    state: NodeState = Field(
        description="silent: connected, and no answer in time; not_allowed: it shows nothing to this node's callers; "
        "invalid: its answer is none"
    )
    why: str = Field(description="empty: it has answered")
    since: float = Field(description="when its state became this one, by the clock of the node that answers")
    answered_at: float | None = Field(description="of `shown`, by the clock of the node that answers")
    age_s: float | None = Field(description="seconds since then; 0: just now")
    shown: NodeShown | None = Field(description="its last answer to this caller; null: there was none")


class FleetTotals(Answer):
    """Numbers of all nodes, by their last answers to the caller."""

    nodes: int = 1
    states: dict[NodeState, int] = Field(default={}, description="how many nodes, by state")
    devices: int
    free_devices: int = Field(description="that take processes and have none")
    unhealthy_devices: int
    jobs: int
    oldest_s: float = Field(default=0.0, description="seconds since the oldest answer of the nodes that have answered")


class FleetInfo(Answer):
    """A page of nodes: this one and its peers, each as it shows itself to the caller."""

    node: str = Field(description="that answers")
    at: float
    nodes: list[FleetNode] = Field(description="this one first, then peers by their names")
    after: str | None = Field(description="for the next page; null: this is the last one")
    totals: FleetTotals = Field(description="of all nodes, whatever the page shows")


class FleetPlanRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    objective: Literal["free_devices", "free_nodes"] = "free_devices"
    nodes: NodeNames = Field(default=[], description="only these; empty: all")
    exclude_nodes: NodeNames = Field(default=[], description="these neither give nor take processes")
    exclude_jobs: Annotated[list[Id], Field(max_length=1024)] = Field(default=[], description="these do not move")
    headroom: Annotated[float, Field(ge=0, le=0.9)] = Field(
        default=0.05, description="share of the memory that stays free on devices to which processes come"
    )
    max_slow_down: Annotated[float, Field(ge=1, le=100)] = Field(
        default=1.25, description="bound on the predicted slow-down; 1.25: a quarter longer"
    )
    assumed_busy_share: Annotated[float, Field(ge=0, le=1)] = Field(
        default=1.0, description="of processes whose busy share is unknown"
    )
    max_moves: Annotated[int, Field(ge=1, le=1000)] = Field(
        default=100, description="at most so many; of a job to another node, with all of its processes, it is one"
    )


class FleetPlace(Answer):
    process: str
    source: str = Field(description="NODE/DEVICE")
    target: str = Field(description="NODE/DEVICE")


class FleetMove(Answer):
    """All processes of a job to another node, at once, or one to another device of its node."""

    job_id: str
    job_name: str
    processes: list[FleetPlace]
    source: str = Field(description="NODE/DEVICES, each once")
    target: str = Field(description="NODE/DEVICES, each once")
    memory_bytes: int
    expected_standstill_ms: float | None = Field(description="null: no transfer on this way is known")
    expected_s: float | None = Field(description="seconds that its content takes at the measured speed of the way")
    basis: str | None = Field(description="what is expected is taken from")


class FleetRefusal(Answer):
    process: str
    job_id: str
    job_name: str
    source: str
    text: str


class LeftOut(Answer):
    node: str
    why: str


class FleetPlan(Answer):
    """A packing of the running jobs over nodes, and the transfers that lead to it. Nothing was changed."""

    id: str
    created_at: float
    objective: Literal["free_devices", "free_nodes"]
    operation: str | None = Field(description="that applies it, or did")
    nodes: list[str] = Field(description="that take part")
    left_out: list[LeftOut] = Field(description="nodes that do not, and why")
    devices_used_before: int
    devices_used_after: int
    freed_devices: list[str] = Field(description="NODE/DEVICE")
    freed_nodes: list[str]
    moves: list[FleetMove]
    refusals: list[FleetRefusal] = Field(description="processes that cannot move, and why")
    ms: float = Field(description="that the packing took")
