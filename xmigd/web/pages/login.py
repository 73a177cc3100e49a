"""Logging in with a token, logging out, and the choice between light and dark."""

from __future__ import annotations

import secrets
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from xmigd.web.forms import path_of_ours, read_form
from xmigd.web.page import THEMES, ThePage, front_of
from xmigd.web.upstream import ApiError

router = APIRouter()
LOGIN_COOKIE = "xmig_login"  # what the login page's form proves itself with: there is no session yet
YEAR = 365 * 86400
LONGEST = 512  # characters of a token


@router.get("/login")
async def ask(request: Request, next: Annotated[str, Query(max_length=2048)] = "/") -> Response:
    """The page that asks for a token."""
    return _ask(request, next)


def _ask(request: Request, wanted: str, why: str = "", status: int = 200) -> Response:
    front = front_of(request)
    proof = secrets.token_urlsafe(32)
    answer = front.render(request, "login.html", status=status, proof=proof, wanted=path_of_ours(wanted), why=why)
    front.set_cookie(answer, LOGIN_COOKIE, proof, seconds=3600)
    return answer


@router.post("/login")
async def log_in(request: Request) -> Response:
    """Begin a session if xmigd takes the token."""
    front = front_of(request)
    form = await read_form(request, request.cookies.get(LOGIN_COOKIE, ""))
    token, wanted = form.get("token", "").strip(), path_of_ours(form.get("next", "/"))
    if not token or len(token) > LONGEST or not (token.isascii() and token.isprintable()) or " " in token:
        return _ask(request, wanted, "that is no token: it is one word, as `xmigctl token create` prints it", 422)
    try:
        await front.api(token).get("/v1/node")
    except ApiError as error:
        if error.status not in (401, 403):
            raise
        return _ask(request, wanted, "xmigd does not know this token, or it has expired", 401)
    session = front.sessions.begin(token)
    answer = RedirectResponse(wanted, 303)
    front.set_cookie(answer, front.session_cookie, session.id)
    answer.delete_cookie(LOGIN_COOKIE, path="/")
    return answer


@router.post("/logout")
async def log_out(page: ThePage) -> Response:
    """End the session; the token stays valid."""
    await page.form()
    page.front.sessions.end(page.session)
    answer = RedirectResponse("/login", 303)
    answer.delete_cookie(page.front.session_cookie, path="/", secure=page.front.tls, httponly=True, samesite="strict")
    return answer


@router.post("/theme")
async def choose_theme(page: ThePage) -> Response:
    """Light, dark, or as the system has it."""
    form = await page.form()
    answer = page.go(path_of_ours(form.get("back", "/")))
    theme = form.get("theme", "auto")
    page.front.set_cookie(answer, "xmig_theme", theme if theme in THEMES else "auto", seconds=YEAR)
    return answer
