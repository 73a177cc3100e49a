"""What the node is set to: policies, the circuit breaker, tokens."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path
from starlette.responses import Response

from xmigd.web.forms import refused
from xmigd.web.page import ThePage
from xmigd.web.sessions import Note
from xmigd.web.upstream import ApiError

router = APIRouter(prefix="/settings")
DAY = 86400  # seconds


@router.get("")
async def settings(page: ThePage) -> Response:
    node = await page.api.get("/v1/node")
    policies = await page.api.get_or(None, "/v1/policies") if page.front.features.policies else None
    tokens = await page.api.get_or(None, "/v1/tokens") if page.front.features.tokens else None
    return await page.show("settings.html", info=node, policies=policies, tokens=tokens)


@router.post("/breaker/reset")
async def reset_breaker(page: ThePage) -> Response:
    form = await page.form()
    return await page.act(
        page.api.post("/v1/circuit-breaker:reset"),
        done="the circuit breaker is closed: automation acts again", to="/settings",
        back=form.get("back", "/settings"),
    )  # fmt: skip


@router.post("/tokens")
async def make_token(page: ThePage) -> Response:
    """The token is shown once, on the next page."""
    form = await page.form()
    uid, days = form.get("uid", "").strip(), form.get("days", "30")
    if (uid and not uid.isdecimal()) or not days.isdecimal():
        raise refused(422, "invalid", "the user and the days are numbers", "go back and correct the form")
    body = {
        "name": form.get("name", "").strip(), "scope": form.get("scope", "read"), "uid": int(uid) if uid else None,
        "lifetime": int(days) * DAY,
    }  # fmt: skip
    try:
        answer = await page.api.post("/v1/tokens", body)
    except ApiError as error:
        if error.status == 401:
            raise
        page.session.notes.append(Note(problem=error.problem))
    else:
        made = answer.json()
        page.session.notes.append(Note(f"the token {made['name']}:", secret=made["token"]))
    return page.go("/settings")


@router.post("/tokens/{token}/revoke")
async def revoke_token(
    page: ThePage, token: Annotated[str, Path(max_length=64, pattern=r"^[A-Za-z0-9_-]+$")]
) -> Response:
    await page.form()
    return await page.act(
        page.api.delete(f"/v1/tokens/{token}"), done="the token is revoked: nobody gets in with it any more",
        to="/settings", back="/settings",
    )  # fmt: skip


@router.post("/policies/{name}")
async def change_policy(page: ThePage, name: Annotated[str, Path(max_length=64, pattern=r"^[a-z-]+$")]) -> Response:
    form = await page.form()
    change: dict[str, float | int] = {}
    for field, text in form.items():
        if field.startswith("set."):
            change[field.removeprefix("set.")] = _number(text)
    return await page.act(
        page.api.patch(f"/v1/policies/{name}", change, form.get("version", "")), done="it applies from now on",
        to="/settings", back="/settings",
    )  # fmt: skip


def _number(text: str) -> float | int:
    try:
        return int(text) if text.strip().isdecimal() else float(text)
    except ValueError:
        raise refused(422, "invalid", f"{text[:40]!r} is not a number", "go back and correct the form") from None
