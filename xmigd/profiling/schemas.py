"""Bodies of requests and answers about profiles and traces."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from xmigd.schemas import Answer

LONGEST = 60.0  # seconds of a trace
Shape = tuple[int, int, int]
OperationKind = Literal["kernel", "to_device", "to_host", "on_device", "between_devices", "fill", "graph", "collective"]


class TraceRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    seconds: Annotated[float, Field(gt=0, le=LONGEST, allow_inf_nan=False)] = Field(
        default=5.0, description="how long all operations of the job's devices are written down"
    )


class TraceInfo(Answer):
    """A trace that can be fetched: GET /v1/traces/{id}."""

    id: str = Field(description="the operation's that made it")
    job_id: str | None
    created_at: float
    bytes: int = Field(description="of the file")


class Estimate(Answer):
    """A share of what the device can do. There is no counter behind it."""

    share: float | None = Field(description="0 to 1; null: nothing is known to estimate it from")
    estimated: Literal[True] = True
    how: str


class ProfiledOperation(Answer):
    kind: OperationKind
    name: str
    grid: Shape | None = Field(description="of a kernel")
    block: Shape | None = Field(description="of a kernel")
    shared_bytes: int
    calls: int = Field(description="all of them, of all ranks")
    timed: int = Field(description="calls whose duration was measured")
    total_ms: float | None = Field(description="of all calls: their number times the mean of those that were timed")
    mean_us: float | None
    median_us: float | None = Field(description="of the last calls that were timed")
    share: float | None = Field(description="of the time of all operations")
    bytes: int | None = Field(description="copied, filled, sent and received; null: a kernel's are not known")
    occupancy: float | None = Field(description="threads that a multiprocessor holds of this kernel, by the driver")
    compute: Estimate
    bandwidth: Estimate


class ProfiledProcess(Answer):
    process: str
    device: str
    over: bool = Field(description="it has ended; the figures are its last ones")
    samples: int
    dropped: int = Field(description="samples without a result")
    unlisted: int = Field(description="calls that are in no operation: there were too many different ones")
    live_bytes: int | None
    peak_bytes: int | None
    idle_share: float | None = Field(description="of its devices, in the last two seconds; estimated from samples")
    step_ms: float | None = Field(description="median of its last steps; null: its launches have no period")
    launches_per_step: int | None
    link_bytes_per_s: float | None = Field(description="by collectives, and copies between devices")
    host_bytes_per_s: float | None


class JobProfile(Answer):
    job_id: str
    every: int = Field(description="one of so many operations is timed, or fewer")
    step_ms: float | None = Field(description="median of the processes' steps")
    idle_share: float | None = Field(description="mean over the processes")
    processes: list[ProfiledProcess]
    operations: list[ProfiledOperation] = Field(description="the longest first")
    more: int = Field(description="operations that are not listed")
