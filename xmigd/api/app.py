"""The application: resources, errors as RFC 9457 problems, and who may do what over which socket."""

from __future__ import annotations

from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware.base import RequestResponseEndpoint
from starlette.responses import Response

from xmigd import __version__, log
from xmigd.api import jobs, node, processes
from xmigd.api.context import Node
from xmigd.api.schemas import Problem
from xmigd.errors import XmigError

logger = log.get("api")
READING = frozenset({"GET", "HEAD", "OPTIONS"})
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})


def problem(status: int, code: str, detail: str, hint: str = "") -> JSONResponse:
    body = Problem(title=HTTPStatus(status).phrase, status=status, code=code, detail=detail, hint=hint)
    return JSONResponse(body.model_dump(), status, media_type="application/problem+json")


async def on_error(_: Request, error: Exception) -> Response:
    if isinstance(error, XmigError):
        status = error.status if error.status != 500 else 400
        return problem(status, error.code, error.message, error.hint)
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        return problem(422, "invalid", f"{place}: {first['msg']}")
    if isinstance(error, HTTPException):
        return problem(error.status_code, HTTPStatus(error.status_code).name.lower(), str(error.detail))
    logger.error("a request failed", why=f"{type(error).__name__}: {error}")
    return problem(500, "internal", "the request failed inside xmigd", "its log says why")


async def guard_tcp(request: Request, call_next: RequestResponseEndpoint) -> Response:
    """Over TCP nobody is known, so nobody may change anything; and a web page in a browser of this machine that
    resolved its own name to us gets nothing at all."""
    if getattr(request.state, "peer", None) is None:
        name = request.headers.get("host", "").rsplit(":", 1)[0]
        bound = (request.scope.get("server") or ("",))[0]
        if name not in LOCAL_NAMES and name != bound:
            return problem(421, "wrong_host", f"this is not {name!r}")
        if request.method not in READING:
            return problem(403, "read_only", "over TCP one may only read", "use the local socket api.sock")
    return await call_next(request)


def make_app(context: Node) -> FastAPI:
    app = FastAPI(
        title="xMIG", version=__version__, docs_url="/docs", redoc_url=None,
        responses={"default": {"model": Problem, "description": "RFC 9457 problem"}},
    )  # fmt: skip
    app.state.node = context
    app.middleware("http")(guard_tcp)
    for kind in (XmigError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, on_error)
    for module in (node, jobs, processes):
        app.include_router(module.router)
    return app
