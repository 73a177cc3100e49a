"""What every page has: its visitor, the API as that visitor has it, and the template that answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import httpx
from fastapi import Depends
from jinja2 import Environment
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from xmigd.web.features import Features
from xmigd.web.forms import Form, path_of_ours, read_form
from xmigd.web.sessions import Note, Session, Sessions
from xmigd.web.settings import WebSettings
from xmigd.web.upstream import Api, ApiError
from xmigd.web.visitor import may_be_local

Answer = TypeVar("Answer", bound=Response)
THEMES = ("auto", "light", "dark")


class NotLoggedIn(Exception):
    pass


@dataclass(slots=True)
class Front:
    """The program's state, made once."""

    settings: WebSettings
    http: httpx.AsyncClient
    templates: Environment
    sessions: Sessions
    features: Features = field(default_factory=Features)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def tls(self) -> bool:
        return self.settings.tls_certificate is not None

    @property
    def session_cookie(self) -> str:
        return "__Host-xmig" if self.tls else "xmig"

    def api(self, token: str | None) -> Api:
        return Api(self.http, self.settings.api, token)

    def set_cookie(self, answer: Response, name: str, value: str, *, seconds: int | None = None) -> None:
        answer.set_cookie(name, value, max_age=seconds, path="/", secure=self.tls, httponly=True, samesite="strict")

    def render(self, request: Request, template: str, *, status: int = 200, **values: Any) -> HTMLResponse:
        theme = request.cookies.get("xmig_theme", "auto")
        frame = {
            "path": request.url.path, "here": _here(request), "theme": theme if theme in THEMES else "auto",
            "now": time.time(), "has": self.features, "session": None, "node": None, "breaker": None, "notes": [],
        }  # fmt: skip
        text = self.templates.get_template(template).render(frame | values)
        return HTMLResponse(text, status)


@dataclass(slots=True)
class Page:
    request: Request
    front: Front
    session: Session
    api: Api
    fresh: bool  # the session began with this request

    async def show(self, template: str, *, status: int = 200, **values: Any) -> HTMLResponse:
        """A page in the frame that all have: navigation, the node's state, what is to be shown once."""
        node, breaker = await self._node()
        notes: list[Note] = []
        if "hx-request" not in self.request.headers:  # a page that renews itself keeps what it shows
            notes, self.session.notes = self.session.notes, []
        return self.remember(self.front.render(
            self.request, template, status=status, session=self.session, notes=notes, node=node, breaker=breaker,
            **values,
        ))  # fmt: skip

    async def _node(self) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        try:
            await self.front.features.learn(self.api)
            node = await self.api.get("/v1/node")
            breaker = await self.api.get_or(None, "/v1/circuit-breaker") if self.front.features.breaker else None
        except ApiError:
            return None, None  # the page itself says what is wrong
        return node, breaker

    async def form(self) -> Form:
        return await read_form(self.request, self.session.csrf)

    async def act(self, work: Awaitable[httpx.Response], *, done: str, to: str, back: str) -> Response:
        """Do what a form asks for and go on to `to`; when it is refused, back to where the form was, saying why."""
        try:
            answer = await work
        except ApiError as error:
            if error.status == 401:
                raise
            self.session.notes.append(Note(problem=error.problem))
            return self.go(path_of_ours(back))
        self.session.notes.append(Note(done))
        return self.go(operation_page(answer) or to)

    def go(self, to: str) -> Response:
        if "hx-request" in self.request.headers:  # a page that renews itself: the window goes on, not its content
            return self.remember(Response(status_code=204, headers={"hx-redirect": to}))
        return self.remember(RedirectResponse(to, 303))

    def remember(self, answer: Answer) -> Answer:
        if self.fresh:
            self.front.set_cookie(answer, self.front.session_cookie, self.session.id)
        return answer


def operation_page(answer: httpx.Response) -> str | None:
    """Long work is watched on its own page."""
    location = answer.headers.get("location", "")
    if answer.status_code == 202 and location.startswith("/v1/operations/"):
        return path_of_ours(location.removeprefix("/v1"))
    return None


def front_of(request: Request) -> Front:
    front: Front = request.app.state.front
    return front


def _here(request: Request) -> str:
    query = request.url.query
    return request.url.path + (f"?{query}" if query else "")


def open_session(request: Request) -> tuple[Session | None, bool]:
    """The visitor's session, and whether it begins now."""
    front = front_of(request)
    session = front.sessions.find(request.cookies.get(front.session_cookie))
    if session is not None or not front.settings.local:
        return session, False
    visitor = request.client
    ours = request.scope.get("server")
    if not may_be_local(None if visitor is None else (visitor.host, visitor.port), ours):
        return None, False
    return front.sessions.begin(None), True


def _page(request: Request) -> Page:
    session, fresh = open_session(request)
    if session is None:
        raise NotLoggedIn
    front = front_of(request)
    return Page(request, front, session, front.api(session.token), fresh)


ThePage = Annotated[Page, Depends(_page)]
