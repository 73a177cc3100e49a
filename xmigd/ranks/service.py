"""The ranks of a job, as callers see them: what the supervisor observes, and what the database remembers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from xmigd.database.reader import Reader
from xmigd.database.rows import wall
from xmigd.errors import NotFound
from xmigd.jobs import repository as jobs
from xmigd.ranks import repository
from xmigd.ranks.history import Change, Communicator, Comparison, Difference, Rank, Round
from xmigd.ranks.repository import Place
from xmigd.ranks.schemas import (
    CommunicatorInfo,
    GroupRecoveryInfo,
    GroupSnapshotInfo,
    JobRanksInfo,
    RankInfo,
    RankOf,
    RankRecovery,
    ReplicaComparison,
    ReplicaDifference,
    Span,
    Suspect,
)
from xmigd.ranks.together import outcome, together
from xmigd.security.callers import Caller
from xmigd.supervisor.supervisor import Supervisor

MOST_OF_EACH = 16  # communicators of a rank; ranks that were lost in one recovery
MOST_ROWS = 20_000  # recoveries of single ranks that are looked at


@dataclass(frozen=True, slots=True)
class Wanted:
    """Of a job. How much of each: ranks, spans of each rank, and what befell them together."""

    from_rank: int
    ranks: int
    spans: int
    together: int


class JobRanks:
    def __init__(self, supervisor: Supervisor, reader: Reader) -> None:
        self._supervisor = supervisor
        self._reader = reader

    async def find(self, job: str, caller: Caller, wanted: Wanted) -> JobRanksInfo:
        """Raises NotFound."""
        t, history = time.monotonic_ns(), self._supervisor.history
        ranks = [one for one in history.ranks_of(t, job) if self._is_seen(one, job, caller)]
        page = [one for one in ranks if one.rank >= wanted.from_rank]
        shown = page[: wanted.ranks]
        waits = history.waits_for(shown)
        infos = [self._rank(one, waits.get(one.who.process), wanted.spans) for one in shown]
        places, rows = await asyncio.to_thread(self._read, job, caller, shown, ranks, wanted.together)
        for info in infos:
            if info.state is None and (place := places.get(info.process_id)) is not None:
                info.pid, info.device, info.state = place.pid, place.device, place.state
        return JobRanksInfo(
            job_id=job,
            total=len(ranks),
            next_rank=shown[-1].rank + 1 if len(page) > len(shown) and page[-1].rank > shown[-1].rank else None,
            ranks=infos,
            communicators=[_communicator(one) for one in history.communicators_of(job)[: wanted.together]],
            snapshots=[_snapshot(one) for one in history.rounds_of(job)[: wanted.together]],
            recoveries=self._recoveries(rows, ranks, shown)[: wanted.together],
            comparison=_comparison(history.comparison_of(job)),
            differences=[_difference(one) for one in history.differences_of(job)[: wanted.together]],
        )

    def _is_seen(self, rank: Rank, job: str, caller: Caller) -> bool:
        """One of another job may be another user's; whose it was, is not known once it has ended."""
        if rank.who.job == job:
            return True
        live = self._supervisor.processes.get(rank.who.process)
        return live is not None and caller.sees(live.job.uid)

    def _read(
        self, job: str, caller: Caller, shown: Sequence[Rank], ranks: Sequence[Rank], count: int
    ) -> tuple[dict[str, Place], list[dict[str, Any]]]:
        with self._reader.session() as session:
            if not jobs.page(session, jobs.Conditions(job_id=job, owner=caller.owner)):
                raise NotFound(f"there is no job {job[:64]!r}", hint="xmigctl ps --all lists them")
            places = repository.places(session, [one.who.process for one in shown])
            of = {one.who.job for one in ranks}
            most = min(MOST_ROWS, (count + 1) * len(ranks))
            rows = repository.recoveries(session, of, most) if of else []
        return places, rows

    def _rank(self, rank: Rank, waits_for: str | None, spans: int) -> RankInfo:
        process = rank.who.process
        live = self._supervisor.processes.get(process)
        largest_first = sorted(rank.has.items(), key=lambda one: -self._supervisor.history.size_of(one[0]))
        communicators = [RankOf(communicator=key[1], rank=one) for key, has in largest_first for one in sorted(has)]
        timeline = _timeline(rank.changes, spans)
        if live is not None and timeline and timeline[-1].activity == "restoring":
            recovery = live.machine.recovery
            if recovery is not None and recovery.restored is not None:
                timeline[-1].activity = "replaying"
        return RankInfo(
            rank=rank.rank,
            process_id=process,
            job_id=rank.who.job,
            pid=None if live is None else live.row.pid,
            device=None if live is None else live.row.device,
            state=None if live is None else live.state,
            activity=timeline[-1].activity if timeline else rank.activity,
            since=wall(rank.changes[-1].t),
            waits_for=waits_for,
            communicators=communicators[:MOST_OF_EACH],
            timeline=timeline,
        )

    def _recoveries(
        self, rows: Sequence[dict[str, Any]], ranks: Sequence[Rank], shown: Sequence[Rank]
    ) -> list[GroupRecoveryInfo]:
        numbers = {one.who.process: one.rank for one in ranks}
        recovering = {
            id for id in numbers if (live := self._supervisor.processes.get(id)) and live.state == "recovering"
        }
        page = {one.who.process for one in shown}
        groups = together([row for row in rows if row["process_id"] in numbers], recovering)
        return [_recovery(group, numbers, page) for group in groups]


def _timeline(changes: Sequence[Change], count: int) -> list[Span]:
    last = list(changes)[-count:] if count else []
    ends: list[int | None] = [following.t for _, following in pairwise(last)] + [None]
    return [
        Span(
            at=wall(one.t),
            ms=None if end is None else (end - one.t) / 1e6,
            activity=one.activity,
            round=one.round or None,
            waited_for=one.waited_for,
        )
        for one, end in zip(last, ends, strict=False)
    ]


def _communicator(one: Communicator) -> CommunicatorInfo:
    return CommunicatorInfo(
        name=one.name, size=one.size, joined=len(one.joined), state=one.state, made_at=wall(one.made),
        ended_at=None if one.ended is None else wall(one.ended),
    )  # fmt: skip


def _snapshot(one: Round) -> GroupSnapshotInfo:
    begins = one.first_stopped or one.began

    def since(at: int | None) -> float | None:
        return None if at is None else (at - begins) / 1e6

    return GroupSnapshotInfo(
        round=one.number,
        at=wall(begins),
        ranks=len(one.members),
        outcome="given_up" if one.given_up else "running" if one.decided is None else "taken",
        behind=len(one.behind),
        fitted_ms=since(one.fitted),
        same_place=one.same_place,
        decided_ms=since(one.decided),
        committed_ms=since(one.committed),
        last_to_stop=one.members.get(one.last_stopped),
        last_to_prepare=one.members.get(one.last_held),
        why=one.given_up,
    )


def _comparison(one: Comparison | None) -> ReplicaComparison | None:
    if one is None:
        return None
    return ReplicaComparison(at=wall(one.t), round=one.round, chunks=one.chunks, watched=one.watched)


def _difference(one: Difference) -> ReplicaDifference:
    return ReplicaDifference(
        at=wall(one.t), round=one.round, policy=one.policy, text=one.text, equal=list(one.equal),
        suspects=[Suspect(rank=rank, process_id=name, snapshot=number) for rank, name, number in one.suspects],
        addresses=list(one.addresses[:MOST_OF_EACH]), chunks=len(one.addresses),
    )  # fmt: skip


def _recovery(rows: Sequence[Mapping[str, Any]], numbers: Mapping[str, int], page: set[str]) -> GroupRecoveryInfo:
    """Of all ranks, from those of single ones, the first of which is the first."""
    begins = rows[0]["at"]

    def since(row: Mapping[str, Any], phase: str) -> float | None:
        return None if row[phase] is None else (row["at"] - begins) * 1e3 + row[phase]

    each = [
        RankRecovery(
            rank=numbers.get(row["process_id"]),
            process_id=row["process_id"],
            recovery=row["id"],
            lost=row["fault"] is not None,
            cause=row["cause"],
            given_ms=since(row, "standby_ready_ms"),
            resumed_ms=since(row, "resumed_ms"),
        )
        for row in rows
    ]
    given = [one.given_ms for one in each]
    resumed = [one.resumed_ms for one in each]
    last = max(each, key=lambda one: one.resumed_ms or 0.0)
    how = outcome(rows)
    return GroupRecoveryInfo.model_validate(
        {
            "at": begins,
            "outcome": how,
            "ranks": len({one.process_id for one in each}),
            "lost": [one for one in each if one.lost][:MOST_OF_EACH],
            "attempts": max(row["attempts"] for row in rows),
            "together_ms": None if None in given else max(one or 0.0 for one in given),
            "resumed_ms": None if None in resumed else max(one or 0.0 for one in resumed),
            "last_to_resume": last.rank if how == "resumed" else None,
            "of_ranks": sorted((one for one in each if one.process_id in page), key=lambda one: one.rank or 0),
        }
    )
