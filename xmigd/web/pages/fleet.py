"""This node and its peers in one view, and packings over all of them."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from fastapi import APIRouter, Path, Query
from starlette.responses import Response

from xmigd.web.page import ThePage
from xmigd.web.paging import ThePages
from xmigd.web.sessions import Note
from xmigd.web.upstream import ApiError

router = APIRouter(prefix="/fleet")
Id = Annotated[str, Path(max_length=64, pattern=r"^[A-Za-z0-9_-]+$")]
Name = Annotated[str, Query(max_length=64)]
NodeState = Literal["answered", "silent", "unreachable", "refused", "not_allowed", "invalid"]
State = Annotated[NodeState | Literal[""], Query()]
LISTED = 20
NODES = 25  # on a page
PLANS = "/v1/fleet/plans"


@router.get("")
async def fleet(page: ThePage, pages: ThePages, name: Name = "", state: State = "") -> Response:
    found = await page.api.get("/v1/fleet", limit=NODES, after=pages.before, name=name, state=state)
    plans = await page.api.get_or(None, PLANS, limit=LISTED)  # None: only operators see them
    return await page.show(
        "fleet.html", fleet=found, plans=plans, pages=pages, name=name, state=state, states=get_args(NodeState)
    )  # fmt: skip


@router.post("/plans")
async def plan(page: ThePage) -> Response:
    form = await page.form()
    try:
        made = (await page.api.post(PLANS, {"objective": form.get("objective") or None})).json()
    except ApiError as error:
        if error.status == 401:
            raise
        page.session.notes.append(Note(problem=error.problem))
        return page.go("/fleet")
    return page.go(f"/fleet/plans/{made['id']}")


@router.get("/plans/{plan}")
async def one_plan(page: ThePage, plan: Id) -> Response:
    return await page.show("fleet_plan.html", plan=await page.api.get(f"{PLANS}/{plan}"))


@router.post("/plans/{plan}/apply")
async def apply(page: ThePage, plan: Id) -> Response:
    await page.form()
    return await page.act(
        page.api.post(f"{PLANS}/{plan}/apply"), done="the plan is being applied", to="/operations",
        back=f"/fleet/plans/{plan}",
    )  # fmt: skip
