"""What bodies about checkpoints say. Times are Unix seconds; what is not known is null."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from xmigd.published import MOST_PORTS
from xmigd.schemas import Answer

DeviceName = Annotated[str, Field(max_length=64)]
NodeName = Annotated[str, Field(pattern=r"^[a-z0-9.-]{1,64}$")]


KeepBits = Annotated[int, Field(ge=1, le=51)]
KEEP_BITS = (
    "lossy: of the mantissas of the optimizer state that the programs have named, without the implicit bit; null: the "
    "checkpoint is exact"
)


class CheckpointRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    process: Annotated[str, Field(max_length=64)] | None = None
    job: Annotated[str, Field(max_length=64)] | None = Field(default=None, description="instead of its one process")
    stop: bool = Field(default=False, description="end the program where it was written down")
    keep_bits: KeepBits | None = Field(default=None, description=KEEP_BITS)

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
    own_files: bool = Field(
        default=False,
        description="copy the files that the program writes to, beside themselves; what is restored has the copies",
    )
    publish: Annotated[list[Annotated[str, Field(max_length=64)]], Field(max_length=MOST_PORTS)] = Field(
        default=[],
        description="ports of its private network to be reached from outside: PORT, PORT:INNER or ADDRESS:PORT:INNER",
    )

    nodes: Annotated[dict[NodeName, NodeName], Field(max_length=64)] = Field(
        default={},
        description="of a job with ranks on several nodes: by the name of a node that had a part of it, the node that "
        "gets it now; the others get their own",
    )


KeyFile = Annotated[
    str,
    Field(
        min_length=1, max_length=4096, pattern=r"^/[^\x00]*$",
        description="path, on the node, of the file of the key: 32 bytes or 64 hexadecimal digits; it belongs to root "
        "or the daemon's user, and nobody else may read it, or systemd has passed it to the daemon as a credential",
    ),
]  # fmt: skip


class ExportRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    key_file: KeyFile | None = Field(default=None, description="encrypt the file with this key; null: not encrypted")


class ImportRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    key_file: KeyFile | None = Field(default=None, description="with which it was encrypted; null: it was not")

    file: Annotated[
        str,
        Field(
            pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}\.xmig$",
            description="its name in the folder `exported` beside the daemon's checkpoints",
        ),
    ]


class RoundedInfo(Answer):
    type: Literal["float16", "bfloat16", "float32", "float64"]
    ranges: int = Field(description="of device memory that were named")
    bytes: int = Field(description="of them")
    changed: int = Field(description="numbers that are not what they were")
    largest_relative: float = Field(description="error of one of these, against what it was")
    largest_absolute: float = Field(description="error of one of these")


class LossyInfo(Answer):
    keep_bits: int = Field(description="of mantissas, without the implicit bit")
    rounded: list[RoundedInfo] = Field(description="the numbers of each type")
    piece_bytes: int = Field(description="of the pieces of content that have such numbers, and may have others")
    stored_bytes: int | None = Field(
        description="that these pieces take on the disk; null: not known, they were in host memory only"
    )


class CheckpointInfo(Answer):
    id: str
    job_id: str = Field(description="of the job that it was made of, which may be over")
    job_name: str
    uid: int
    user: str = Field(description="what this machine calls them")
    command: str
    device: str = Field(description="that the job was on")
    nodes: list[str] = Field(
        description="on which the job had ranks, each with a part of the checkpoint; empty: all of it is here"
    )
    programs: int
    content_bytes: int = Field(description="of all that it has, without what is zero")
    stored_bytes: int = Field(description="that it took on disk; what other checkpoints had already is not counted")
    standstill_ms: float | None = Field(
        description="in which the programs stood still for it; null: they were suspended anyway"
    )
    created_at: float
    by_policy: bool = Field(description="it was made without a request, and is removed when newer ones are enough")
    mirrored: bool = Field(description="all of it is where the setting `checkpoint_mirror` says, too")
    lossy: LossyInfo | None = Field(
        description="what of it is not as the programs had it; null: nothing, the checkpoint is exact"
    )
    places: list[Literal["memory", "disk", "mirror"]] = Field(
        description="where all of it is; a restoration takes it from the first of these. Host memory does not outlive "
        "the machine. None: it is lost"
    )


class PolicyRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    every_minutes: Annotated[float, Field(ge=0.02, le=525_600)] | None = Field(
        default=None, description="between two checkpoints; null: none by the clock"
    )
    keep: Annotated[int, Field(ge=1, le=1000)] = Field(
        default=3, description="of those that were made without a request: the newest so many"
    )
    before_drain: bool = Field(default=False, description="make one before the job is moved off a device by a drain")
    keep_bits: KeepBits | None = Field(default=None, description=KEEP_BITS)


class CheckpointPolicyInfo(Answer):
    job_id: str
    source: Literal["job", "settings"] = Field(description="who decides: a policy of the job, or the daemon's settings")
    version: int = Field(description="its ETag's; 0: the job has none of its own")
    every_minutes: float | None = Field(description="between two checkpoints; null: none by the clock")
    keep: int = Field(description="of those that were made without a request: the newest so many")
    before_drain: bool = Field(description="one is made before the job is moved off a device by a drain")
    keep_bits: int | None = Field(description=KEEP_BITS)
    next_at: float | None = Field(description="when the next one is due; null: none is, or the job is over")
    failures: int = Field(description="in a row, since the daemon's start")
    last_failure: str | None = Field(description="why the last one failed; null: it did not")
    updated_at: float | None
    updated_by: str | None
