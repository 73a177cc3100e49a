"""What bodies about devices say. Times are Unix seconds; *_ms are milliseconds; what is not known is null."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from xmigd.schemas import Answer
from xmigd.text import VISIBLE

Grade = Literal["fine", "report", "cordon", "drain", "lose"]


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
    mps: Literal["off", "on", "failed"] = Field(
        default="off", description="shared through NVIDIA's MPS; failed: for a while programs begin without it"
    )
    mps_why: str = Field(default="", description="it has failed")
    health: Grade = Field(description="the rung of the answer to the worst of its open findings")
    findings: list[str] = Field(description="what is wrong with it, worst first")
    processes: int
    process_ids: list[str]
    version: int = Field(description="its ETag's")


class DeviceChange(BaseModel):
    model_config = ConfigDict(extra="forbid")

    cordoned: bool | None = Field(default=None, description="a cordoned device gets no new process")
    reason: Annotated[str, Field(max_length=255, pattern=VISIBLE)] | None = None


class DeviceLoss(BaseModel):
    model_config = ConfigDict(extra="forbid")

    reason: Annotated[str, Field(min_length=1, max_length=200, pattern=VISIBLE, description="everybody sees it")]
