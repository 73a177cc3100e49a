"""What every domain's router is made by."""

from __future__ import annotations

from fastapi import APIRouter

from xmigd.schemas import Problem


def make_router(prefix: str = "") -> APIRouter:
    """What holds for all endpoints stands here. If it stood at the application, FastAPI would make each route again
    when a request is routed for the first time, in the loop that repairs programs."""
    return APIRouter(
        prefix=prefix,
        responses={"default": {"model": Problem, "description": "A problem (RFC 9457)."}},
    )  # fmt: skip
