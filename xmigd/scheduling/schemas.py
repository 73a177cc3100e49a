"""What bodies of schedulers' requests say."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from xmigd.jobs.schemas import LABEL_KEY
from xmigd.text import INVISIBLE

Prefer = Literal["suspend", "checkpoint", "either"]
Action = Literal["suspend", "resume", "preempt", "continue", "migrate", "end"]
MOST_JOBS = 1000  # of one request
Deadline = Annotated[
    float, Field(ge=0.1, le=86_400, description="seconds from the request; what is not done then is taken back")
]
DeviceName = Annotated[str, Field(max_length=64)]
LabelSelector = Annotated[str, Field(max_length=319, pattern=f"{LABEL_KEY[:-1]}(=[^{INVISIBLE}]*)?$")]


class Request(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PreemptRequest(Request):
    deadline_seconds: Deadline = 30.0
    prefer: Prefer = Field(
        default="either",
        description="suspend: to host memory, and nothing else; checkpoint: that, and the program ends; either: "
        "suspended to host memory, or to files, or as a checkpoint, what is possible first",
    )


class ContinueRequest(Request):
    devices: Annotated[
        list[DeviceName], Field(max_length=1024, description="as of a resumption; empty: those that it had")
    ] = []


class BulkRequest(Request):
    action: Action
    jobs: Annotated[list[Annotated[str, Field(max_length=64)]], Field(max_length=MOST_JOBS)] = Field(
        default=[], description="their ids"
    )
    labels: Annotated[list[LabelSelector], Field(max_length=16)] = Field(
        default=[],
        description="in the place of ids: KEY=VALUE or KEY; jobs that have all of them and are not over, or were "
        "preempted if they are to continue",
    )
    to: Literal["host", "file"] = Field(default="host", description="of suspend")
    devices: Annotated[list[DeviceName], Field(max_length=1024)] = Field(default=[], description="of resume, continue")
    target: DeviceName | None = Field(default=None, description="of migrate: the device")
    deadline_seconds: Deadline = Field(default=30.0, description="of preempt; for each job from its turn on")
    prefer: Prefer = Field(default="either", description="of preempt")

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if bool(self.jobs) == bool(self.labels):
            raise ValueError("name either jobs or labels")
        if (self.action == "migrate") != (self.target is not None):
            raise ValueError("target goes with migrate, and migrate needs it")
        return self
