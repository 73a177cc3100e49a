"""What bodies about sharing say. Times are in milliseconds; what is not known is null."""

from __future__ import annotations

from pydantic import Field

from xmigd.records import Priority
from xmigd.schemas import Answer


class ProcessSharing(Answer):
    process: str
    device: str
    mps: bool = Field(description="its server is a client of MPS")
    without_mps: str = Field(description="why it is not; empty: it is, or that is not known")
    shares: bool = Field(description="its server sees its neighbours, and they see it; of the class normal: never")
    held_kernels: int = Field(description="kernels that have waited for others, of all of its servers")
    held_ms: float = Field(description="for how long, all together")
    overdue_kernels: int = Field(description="of these, kernels that waited as long as they may")


class JobSharing(Answer):
    job: str
    priority: Priority
    memory_quota: int | None = Field(description="bytes of each device, for all of its programs together; null: all")
    quota_used: dict[str, int] = Field(
        description="of the quota, what its programs have, in bytes, by device; empty: it has no quota"
    )
    sm_share: int | None = Field(description="percent of its device's multiprocessors; null: all")
    waits_ms: float | None = Field(
        description="since it was suspended for another job of the rotation; null: it does not wait"
    )
    processes: list[ProcessSharing] = Field(description="that live")
