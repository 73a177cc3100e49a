"""The ranks of jobs."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query

from xmigd.api.dependencies import AnyCaller, Limit, provided
from xmigd.api.routing import make_router
from xmigd.ranks.schemas import JobRanksInfo
from xmigd.ranks.service import JobRanks, Wanted
from xmigd.schemas import EXACT

router = make_router("/v1/jobs")
JobId = Annotated[str, Path(max_length=64)]
TheRanks = Annotated[JobRanks, provided(JobRanks)]


@router.get("/{job}/ranks", operation_id="get_ranks")
async def get_ranks(
    ranks: TheRanks,
    caller: AnyCaller,
    job: JobId,
    from_rank: Annotated[int, Query(ge=0, le=EXACT, description="those with this rank and higher ones")] = 0,
    limit: Limit = 100,
    spans: Annotated[int, Query(ge=1, le=1000, description="of each rank's timeline, the last")] = 50,
    together: Annotated[
        int, Query(ge=1, le=100, description="communicators, group snapshots, recoveries: so many of each")
    ] = 20,
) -> JobRanksInfo:
    """A job's ranks: what each does and waits for, and did before; their communicators, snapshots and recoveries. Ranks
    of other jobs that share communicators with them are here, too. A job whose processes have no communicator has
    none. What they did is known since the daemon began, and of jobs that are over for a while."""
    return await ranks.find(job, caller, Wanted(from_rank, limit, spans, together))
