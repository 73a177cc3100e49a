"""What bodies about consolidation say. Times are Unix seconds; *_ms are milliseconds; what is not known is null."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from xmigd.consolidation.placement import Objective
from xmigd.schemas import Answer

Name = Annotated[str, Field(min_length=1, max_length=64)]
Names = Annotated[list[Name], Field(max_length=1024)]
Share = Annotated[float, Field(ge=0, le=1)]


class ConsolidationRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    objective: Objective = "free_devices"
    devices: Names = Field(default=[], description="only these give and take processes; empty: all")
    exclude_devices: Names = Field(default=[], description="these neither give nor take processes")
    jobs: Names = Field(default=[], description="only these jobs move; empty: all")
    exclude_jobs: Names = Field(default=[], description="these jobs do not move")
    apart: Annotated[list[Names], Field(max_length=64)] = Field(
        default=[], description="anti-affinity: jobs of one of these groups share no device"
    )
    alone: Names = Field(default=[], description="isolation: these jobs share no device with another job")
    max_jobs_per_device: Annotated[int | None, Field(ge=1, le=1024)] = Field(
        default=None, description="on devices to which processes come"
    )
    headroom: Annotated[float, Field(ge=0, le=0.9)] = Field(
        default=0.05, description="share of the memory that stays free on devices to which processes come"
    )
    max_slow_down: Annotated[float, Field(ge=1, le=100)] = Field(
        default=1.25, description="bound on the predicted slow-down; 1.25: a quarter longer"
    )
    assumed_busy_share: Share = Field(default=1.0, description="of processes whose busy share is unknown")
    busy_shares: Annotated[dict[Name, Share], Field(max_length=1024)] = Field(
        default={}, description="by job: of each of its processes, in place of what was measured"
    )
    least_remaining_s: Annotated[float, Field(ge=0, le=1e9)] = Field(
        default=0.0, description="jobs whose predicted P90 is less than this do not move; unknown ones may"
    )
    solver_seconds: Annotated[float, Field(ge=0, le=10)] = Field(
        default=2.0, description="time limit of the solver; 0: the heuristic only"
    )


class ApplyRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    guard_seconds: Annotated[float, Field(ge=0, le=3600)] = Field(
        default=60.0, description="how long jobs are watched after the moves; 0: they are not"
    )


class PackedProcess(Answer):
    process: str
    job_id: str
    job_name: str
    memory_bytes: int = Field(description="that it takes on this device, with its snapshot copy and its contexts")
    busy_share: float | None = Field(description="share of time in which it had work in the last minute")
    step_ms: float | None = Field(
        default=None,
        description="median of its steps in the last minute, by which the guard judges it; null: by its calls",
    )
    moves: bool = Field(description="before: it leaves; after: it has come")


class PackedDevice(Answer):
    device: str
    takes: bool = Field(description="may processes come?")
    why: str = Field(description="why none may")
    capacity_bytes: int | None
    used_bytes: int
    busy_share: float | None = Field(description="sum over its processes; more than 1: they wait for each other")
    processes: list[PackedProcess]


class PlannedMove(Answer):
    process: str
    job_id: str
    job_name: str
    source: str
    target: str
    memory_bytes: int
    detour: bool = Field(description="it makes room: the process moves once more")
    expected_downtime_ms: float | None
    expected_downtime_basis: str | None


class PlannedJob(Answer):
    job_id: str
    job_name: str
    devices: list[str] = Field(description="after the moves")
    moves: bool
    predicted_slow_down: float | None = Field(description="1: none. From busy shares; null where one is unknown")
    remaining_s_p50: float | None = Field(description="seconds that it will still run; null: unknown")
    remaining_s_p90: float | None
    promised_slow_down: float = Field(description="a job that gets slower than this is moved back")


class Refusal(Answer):
    process: str
    job_id: str
    job_name: str
    device: str
    code: str
    text: str


class SolverInfo(Answer):
    solver: Literal["highs", "heuristic"] = Field(description="whose packing it is")
    optimal: bool = Field(description="none frees more devices, or is more even, as HiGHS proved")
    why: str = Field(description="why HiGHS had no part in it")
    heuristic_freed: int
    highs_freed: int | None
    highs_ms: float | None


class ConsolidationPlan(Answer):
    """A packing of the running jobs, and the moves that lead to it. Nothing was changed."""

    id: str
    created_at: float
    objective: Objective
    operation: str | None = Field(description="that applies it, or did")
    before: list[PackedDevice]
    after: list[PackedDevice]
    freed: list[str]
    moves: list[PlannedMove]
    jobs: list[PlannedJob]
    refusals: list[Refusal] = Field(description="processes that cannot move, and why")
    solver: SolverInfo
