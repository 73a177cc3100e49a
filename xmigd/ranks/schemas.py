"""What bodies about ranks say. Times are Unix seconds; *_ms are milliseconds; what is not known is null."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from xmigd.ranks.history import Activity
from xmigd.records import ReplicaPolicy
from xmigd.schemas import Answer

Outcome = Literal["running", "taken", "given_up"]


class Span(Answer):
    """What a rank did for a while. Of a wait that is over it is known which rank came last."""

    at: float
    ms: float | None = Field(description="null: it still does")
    activity: Activity
    round: int | None = Field(default=None, description="of a group snapshot")
    waited_for: int | None = Field(default=None, description="the rank that came last; null: none, or not yet known")


class RankOf(Answer):
    communicator: str = Field(description="its name")
    rank: int


class RankInfo(Answer):
    rank: int = Field(description="in the largest of its communicators")
    process_id: str
    job_id: str
    pid: int | None
    device: str | None
    state: str | None = Field(description="of the process")
    activity: Activity
    since: float
    waits_for: str | None = Field(description="now, for people; null: for nobody, as far as the daemon knows")
    communicators: list[RankOf] = Field(description="that have not ended, the largest first, at most 16")
    timeline: list[Span] = Field(description="oldest first; the last is what it does now")


class CommunicatorInfo(Answer):
    name: str
    size: int
    joined: int = Field(description="ranks that have it")
    state: Literal["joining", "whole", "incomplete", "ended"] = Field(
        description="incomplete: a rank has ended it, or its program has exited; a recovery does not make it again"
    )
    made_at: float
    ended_at: float | None


class GroupSnapshotInfo(Answer):
    """An attempt of all ranks to take a snapshot together. *_ms count from the moment at which the first of them
    stopped."""

    round: int
    at: float
    ranks: int
    outcome: Outcome
    behind: int = Field(description="ranks that had to go on after they had stopped, to be as far as the others")
    fitted_ms: float | None = Field(description="all stood still at positions that fit")
    same_place: bool | None = Field(
        description="all stood as many launches and copies behind the same collective: ranks that do the same hold the "
        "same; null: not known yet"
    )
    decided_ms: float | None = Field(description="all had prepared their snapshots")
    committed_ms: float | None = Field(description="all had taken them")
    last_to_stop: int | None = Field(description="a rank")
    last_to_prepare: int | None = Field(description="a rank")
    why: str = Field(description="it was given up")


class RankRecovery(Answer):
    rank: int | None
    process_id: str
    recovery: int = Field(description="see GET /v1/recoveries")
    lost: bool = Field(description="its own server was lost; the others' were killed because of that")
    cause: str
    given_ms: float | None = Field(description="another server got it: until then it waited for the others to end")
    resumed_ms: float | None


class GroupRecoveryInfo(Answer):
    """A recovery of all ranks. *_ms count from the loss of the first server."""

    at: float
    outcome: Literal["running", "resumed", "lost", "abandoned", "interrupted"]
    ranks: int
    lost: list[RankRecovery] = Field(description="those whose own servers were lost, at most 16")
    attempts: int = Field(description="the most of a rank: more than one if a server was lost in the middle of it")
    together_ms: float | None = Field(description="all servers had ended, and each rank had another")
    resumed_ms: float | None = Field(description="all ranks run again; null: not yet, or never")
    last_to_resume: int | None = Field(description="a rank")
    of_ranks: list[RankRecovery] = Field(description="of the ranks that this answer has")


class Suspect(Answer):
    rank: int
    process_id: str
    snapshot: int = Field(description="of the process, its number: the first that is known to have it")


class ReplicaComparison(Answer):
    """Of what the ranks of a job held at a group snapshot at which all stood at the same place."""

    at: float
    round: int
    chunks: int = Field(description="of 2 MiB of device memory, by address")
    watched: int = Field(description="of these: where ranks are known to hold the same, and a difference is reported")


class ReplicaDifference(Answer):
    """Device memory of a rank is not what other ranks hold there, though it was: silent corruption."""

    at: float
    round: int
    suspects: list[Suspect] = Field(description="one; two if there are only two replicas: then it is one of them")
    equal: list[int] = Field(description="ranks that hold the same still")
    addresses: list[int] = Field(description="of chunks of 2 MiB, at most 16")
    chunks: int = Field(description="that differ")
    policy: ReplicaPolicy = Field(description="what was done about it")
    text: str


class JobRanksInfo(Answer):
    job_id: str
    total: int = Field(description="ranks")
    next_rank: int | None = Field(description="with which the next page begins (`from_rank`); null: there is none")
    ranks: list[RankInfo] = Field(description="by rank; of one that several processes had, who lives comes first")
    communicators: list[CommunicatorInfo] = Field(description="the largest first, then those that have ended")
    snapshots: list[GroupSnapshotInfo] = Field(description="newest first")
    recoveries: list[GroupRecoveryInfo] = Field(description="newest first")
    comparison: ReplicaComparison | None = Field(description="the last one; null: none yet")
    differences: list[ReplicaDifference] = Field(description="between replicas, newest first")
