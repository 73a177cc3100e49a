"""What bodies about transfers say. Times are Unix seconds; *_ms are milliseconds; what is not known is null."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from xmigd.schemas import Answer


class TransferRound(Answer):
    n: int
    copied_bytes: int = Field(description="that the peer lacked")
    ms: float


class TransferInfo(Answer):
    """A job that moves to another node, or comes from one."""

    id: str = Field(description="the same on both nodes")
    direction: Literal["out", "in"]
    peer: str = Field(description="the other node")
    state: Literal[
        "copying", "committed", "done", "failed", "receiving", "preparing", "prepared", "going", "running", "dropped"
    ] = Field(
        description="out: copying, then committed (stopped, the peer is to say), done or failed; in: receiving, "
        "preparing, prepared (stopped, it waits for the other node's decision), going, then running or dropped"
    )
    why: str
    job_id: str | None = Field(description="on this node")
    job_name: str
    process_id: str | None = Field(description="on this node: the first of `processes`")
    processes: list[str] = Field(description="on this node, in the order in which they began")
    devices: list[str] = Field(description="on this node, of each of `processes`")
    peer_job: str | None = Field(description="the job on the other node")
    uid: int
    user: str
    command: str
    source: str
    target: str
    rounds: list[TransferRound]
    standstill_ms: float | None
    took: dict[str, float] = Field(
        description="what it stood still for: pause_ms until it stands at a snapshot, dump_ms CRIU's dump, copy_ms the "
        "copy of its device memory (beside the dump), store_ms hashing it, send_ms the last round on the link, "
        "prepare_ms all at the target, of which criu_ms until CRIU has made it again (beside that, read_ms: its memory "
        "is there), and server_ms until its servers have it"
    )
    content_bytes: int | None = Field(description="of device memory, at the target")
    ahead_bytes: int | None = Field(description="of content_bytes, on the target's devices before the program stopped")
    created_at: float
    ended_at: float | None


class DecisionRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    goes_on: Literal["here", "there"] = Field(description="on which node the program goes on")
