"""How jobs share devices."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path

from xmigd.api.dependencies import AnyCaller, provided
from xmigd.api.routing import make_router
from xmigd.sharing.schemas import JobSharing
from xmigd.sharing.service import Sharing

router = make_router("/v1")


@router.get("/jobs/{job}/sharing", operation_id="get_sharing")
async def get_sharing(
    sharing: Annotated[Sharing, provided(Sharing)], caller: AnyCaller, job: Annotated[str, Path(max_length=64)]
) -> JobSharing:
    """A running job's class and quota, and how long its kernels have waited for others."""
    return sharing.of_job(caller, job)
