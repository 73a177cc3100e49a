"""The first page: what runs, on what, and what went wrong lately."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from xmigd.web.page import ThePage

router = APIRouter()


@router.get("/")
async def overview(page: ThePage) -> Response:
    devices, processes, jobs, recoveries, faults = await page.api.all(
        "/v1/devices", ("/v1/processes", {"live": True, "limit": 200}), ("/v1/jobs", {"limit": 8}),
        ("/v1/recoveries", {"limit": 6}), ("/v1/faults", {"limit": 6}),
    )  # fmt: skip
    operations = await page.api.get_or([], "/v1/operations", state="running", limit=20)
    return await page.show(
        "overview.html", devices=devices, processes=processes, jobs=jobs, recoveries=recoveries, faults=faults,
        operations=operations,
    )  # fmt: skip
