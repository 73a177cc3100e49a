"""What bodies about checkpoints say. Times are Unix seconds; what is not known is null."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from xmigd.schemas import Answer

DeviceName = Annotated[str, Field(max_length=64)]


class CheckpointRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    process: Annotated[str, Field(max_length=64)] | None = None
    job: Annotated[str, Field(max_length=64)] | None = Field(default=None, description="instead of its one process")
    stop: bool = Field(default=False, description="end the program where it was written down")

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.process is None) == (self.job is None):
            raise ValueError("name either a process or a job")
        return self


class RestoreRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    devices: Annotated[list[DeviceName], Field(max_length=8)] = Field(
        default=[], description="as many as the program had, of the same kind; empty: those that it had"
    )


class ImportRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    file: Annotated[
        str,
        Field(
            pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}\.xmig$",
            description="its name in the folder `exported` beside the daemon's checkpoints",
        ),
    ]


class CheckpointInfo(Answer):
    id: str
    job_id: str = Field(description="of the job that it was made of, which may be over")
    job_name: str
    uid: int
    user: str = Field(description="what this machine calls them")
    command: str
    device: str = Field(description="that the job was on")
    programs: int
    content_bytes: int = Field(description="of all that it has, without what is zero")
    stored_bytes: int = Field(description="that it took on disk; what other checkpoints had already is not counted")
    standstill_ms: float | None = Field(
        description="in which the programs stood still for it; null: they were suspended anyway"
    )
    created_at: float
