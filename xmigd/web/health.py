"""For whatever watches over the dashboard: it answers, and xmigd behind it takes work."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from xmigd.web.page import front_of
from xmigd.web.upstream import ApiError

router = APIRouter()


@router.get("/healthz")
async def healthz() -> Response:
    """The dashboard's event loop turns."""
    return JSONResponse({"status": "ok"})


@router.get("/readyz")
async def readyz(request: Request) -> Response:
    """What xmigd says of itself; or that it says nothing."""
    try:
        return JSONResponse(await front_of(request).api(None).get("/readyz"))
    except ApiError as error:
        return JSONResponse(error.problem, error.status, media_type="application/problem+json")
