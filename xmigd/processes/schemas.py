"""What bodies about processes say. Times are Unix seconds; *_ms are milliseconds; what is not known is null."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from xmigd.schemas import Answer


class ProcessInfo(Answer):
    """Of one in state `unprotected` nothing is known but what /proc says: it has never come to xMIG."""

    id: str
    job_id: str
    job_name: str
    pid: int
    uid: int
    user: str = Field(default="", description="what the daemon's machine calls them")
    command: str
    device: str
    state: str
    why: str
    protected: bool = Field(
        default=True, description="false: it has loaded the genuine driver, or opened a device itself"
    )
    unprotected: str = Field(description="why it is not protected; empty: it is")
    server_pid: int | None
    standby: str | None = None
    standby_preloaded: bool = Field(default=False, description="has it loaded the modules that a recovery will need?")
    standby_communicators: int = Field(
        default=0, description="communicators that standbys of all ranks have made with each other"
    )
    communicator_bytes: int | None = Field(default=None, description="of server_bytes: what these take, about")
    replica_copy_bytes: int | None = Field(
        default=None, description="copied to host memory, of what only its device has; null: nobody looks for that"
    )
    survives_device_loss: bool | None = Field(
        default=None,
        description="other devices and host memory have all that its last snapshot has; null: it is not known",
    )
    device_loss_why: str | None = Field(
        default=None, description="why they have not; empty: they have; null: it is not known"
    )
    neighbour: str | None = Field(
        default=None, description="the node that is sent what only this process's device has; null: none is"
    )
    neighbour_copy_bytes: int | None = Field(default=None, description="of these, what is there")
    neighbour_behind_bytes: int | None = Field(default=None, description="of the last round, what is to follow")
    neighbour_sent_bytes: int | None = Field(
        default=None, description="what was sent there, of all rounds, since this daemon knows the process"
    )
    neighbour_why: str | None = Field(default=None, description="why nothing gets there; empty: it does")
    location: str = Field(default="device", description="of its state: device, moving, host, file or lost")
    suspended: bool = False
    generation: int
    started_at: float
    ended_at: float | None
    exit_code: int | None = Field(default=None, description="null: not known, or a signal ended it")
    exit_signal: int | None = None
    snapshots: int | None = None
    expected_stall_ms: float | None = Field(
        default=None, description="what the program would wait if its server died now; null: no server tells"
    )
    stall_bound_ms: float | None = Field(default=None, description="what snapshots are to keep that below")
    snapshots_ms: float | None = Field(default=None, description="what snapshots have cost it since it began")
    live_bytes: int | None = None
    held_bytes: int | None = Field(default=None, description="the program's memory, shadow and module images")
    shadow_bytes: int | None = Field(default=None, description="device memory that holds the last snapshot")
    server_bytes: int | None = Field(default=None, description="device memory of its servers' contexts, about")
    faults: int
    recoveries: int


class RebindRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    pid: Annotated[int, Field(ge=1, lt=1 << 31, description="the process in which the program was restored")]


class Position(Answer):
    position: int = Field(description="byte of the journal before which everything is executed")


class SegmentInfo(Answer):
    number: int
    position: int
    sequence: int
    journal_bytes: int
    live_bytes: int
    copied_bytes: int
    chunks: int
    objects: int
    ms: float = Field(description="in which nothing was executed and the device had nothing to do")
    waited_ms: float = Field(description="before that, until the device had finished what it had")
    hash_ms: float = Field(description="of ms, for hashing live memory where it is")
    copy_ms: float = Field(description="of ms, for copying what has changed, and its hashes")
    hashed_bytes: int = Field(description="where they are; what is copied is hashed with it")
    reason: str
    at: float
    stored_bytes: int | None = Field(
        default=None, description="in the store, compressed; null: this snapshot was not kept"
    )
    images: int | None = Field(default=None, description="module images that are kept with it")
