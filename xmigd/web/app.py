"""The dashboard's application: its routes, its files, and what a visitor sees when something does not work."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlencode

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from xmigd import __version__, log
from xmigd.connections.quotas import Place
from xmigd.connections.turns import InTurn, Turns
from xmigd.errors import XmigError
from xmigd.web import health
from xmigd.web.forms import path_of_ours, refused
from xmigd.web.guard import Guard
from xmigd.web.live import Interest, Relay
from xmigd.web.page import Front, NotLoggedIn, Page, ThePage, front_of, open_session
from xmigd.web.pages import (
    checkpoints,
    consolidation,
    devices,
    faults,
    fleet,
    history,
    jobs,
    login,
    migrations,
    operations,
    overview,
    settings,
    words,
)
from xmigd.web.render import folder, make_templates
from xmigd.web.sessions import Sessions
from xmigd.web.settings import WebSettings
from xmigd.web.upstream import ApiError, make_http

logger = log.get("web")

PAGES = (
    overview, devices, jobs, migrations, consolidation, fleet, checkpoints, faults, operations, history, settings,
    words, login, health,
)  # fmt: skip


class Files(StaticFiles):
    """Their addresses contain their hash, so they never change."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        answer = await super().get_response(path, scope)
        answer.headers["cache-control"] = "public, max-age=31536000, immutable"
        return answer


def make_app(web: WebSettings) -> tuple[InTurn, Front]:
    app = FastAPI(
        title="xMIG dashboard", version=__version__, docs_url=None, redoc_url=None, openapi_url=None,
        routes=[route for module in PAGES for route in module.router.routes],
    )  # fmt: skip
    front = Front(
        web, make_http(web), make_templates(users_are_ours=web.api.startswith("unix:")), Sessions(web.session_hours)
    )
    app.state.front = front
    for kind in (ApiError, NotLoggedIn, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, on_error)
    app.add_api_route("/live", live, methods=["GET"], include_in_schema=False)
    app.mount("/static", Files(directory=folder() / "static"))
    # Around everything, also around what answers when a handler has failed.
    return InTurn(Guard(app, web.allowed_names, tls=web.tls_certificate is not None), Turns()), front


async def live(
    page: ThePage,
    topics: str = "",
    job: str = "",
    every: Annotated[float, Query(ge=0, le=60)] = 0,
    last: Annotated[str, Query(max_length=64, pattern=r"^[\x21-\x7e]*$")] = "",
) -> Response:
    """The page's events. `last`: the id of the last one that it has, where its browser does not say it by itself."""
    place: Place | None = getattr(page.request.state, "place", None)
    if place is not None:
        try:
            place.listen(place.who)
        except XmigError as error:
            raise refused(error.status, error.code, error.message, error.hint) from None
    interest = Interest(frozenset(topics.split(",")) - {""}, job, every and max(every, 0.5))
    last_id = page.request.headers.get("last-event-id", last)
    relay = Relay(page.api, interest, last_id if last_id.isprintable() else "", page.front.stopping)
    return StreamingResponse(relay.run(), media_type="text/event-stream", headers={"x-accel-buffering": "no"})


async def on_error(request: Request, error: Exception) -> Response:
    front = front_of(request)
    if isinstance(error, NotLoggedIn) or (isinstance(error, ApiError) and error.status == 401):
        return _to_login(request, front)
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        error = refused(422, "invalid", f"{first['loc'][-1]}: {first['msg']}", "correct the address")
    elif isinstance(error, HTTPException):
        detail = "there is no such page" if error.status_code == 404 else str(error.detail)
        error = refused(error.status_code, "http", detail, "the navigation leads to everything there is")
    elif not isinstance(error, ApiError):
        logger.error("a page failed", path=request.url.path, why=f"{type(error).__name__}: {error}")
        error = refused(500, "internal", "the dashboard failed to make this page", "its log says why")
    session, fresh = open_session(request)
    if session is None:
        return front.render(request, "problem.html", status=error.status, problem=error.problem)
    page = Page(request, front, session, front.api(session.token), fresh)
    return await page.show("problem.html", status=error.status, problem=error.problem)


def _to_login(request: Request, front: Front) -> Response:
    session = front.sessions.find(request.cookies.get(front.session_cookie))
    if session is not None:
        front.sessions.end(session)
    if request.url.path == "/live":
        return Response("the session has ended", 401)
    wanted = request.url.path if request.method == "GET" else "/"
    return RedirectResponse("/login?" + urlencode({"next": path_of_ours(wanted)}), 303)
