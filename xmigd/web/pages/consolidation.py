"""Packing running jobs onto fewer devices: a plan, before and after, and how its application goes on."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path
from starlette.responses import Response

from xmigd.web.forms import Form, refused
from xmigd.web.page import ThePage
from xmigd.web.sessions import Note
from xmigd.web.upstream import ApiError

router = APIRouter(prefix="/consolidation")
Id = Annotated[str, Path(max_length=64, pattern=r"^[A-Za-z0-9_-]+$")]
LISTED = 20
PLANS = "/v1/consolidation-plans"


@router.get("")
async def consolidation(page: ThePage) -> Response:
    plans = await page.api.get_or(None, PLANS, limit=LISTED)  # None: only operators see them
    operations = await page.api.get("/v1/operations", kind="consolidation", limit=LISTED)
    devices = await page.api.get("/v1/devices")
    return await page.show("consolidation.html", plans=plans, operations=operations, devices=devices)


@router.post("/plans")
async def plan(page: ThePage) -> Response:
    form = await page.form()
    slow_down, share = _number(form, "max_slow_down"), _number(form, "assumed_busy_share")
    body: dict[str, Any] = {
        "objective": form.get("objective") or None, "max_slow_down": slow_down,
        "assumed_busy_share": None if share is None else share / 100,
    }  # fmt: skip
    try:
        made = (await page.api.post(PLANS, body)).json()
    except ApiError as error:
        if error.status == 401:
            raise
        page.session.notes.append(Note(problem=error.problem))
        return page.go("/consolidation")
    return page.go(f"/consolidation/plans/{made['id']}")


@router.get("/plans/{plan}")
async def one_plan(page: ThePage, plan: Id) -> Response:
    found = await page.api.get(f"{PLANS}/{plan}")
    before = {each["device"]: each for each in found["before"]}
    packing = [(before[after["device"]], after) for after in found["after"]]
    jobs = {job["job_id"]: job for job in found["jobs"]}
    return await page.show("consolidation_plan.html", plan=found, packing=packing, jobs=jobs)


@router.post("/plans/{plan}/apply")
async def apply(page: ThePage, plan: Id) -> Response:
    form = await page.form()
    body = {"guard_seconds": _number(form, "guard_seconds")}
    return await page.act(
        page.api.post(f"{PLANS}/{plan}/apply", body), done="the plan is being applied", to="/consolidation",
        back=f"/consolidation/plans/{plan}",
    )  # fmt: skip


@router.get("/operations/{operation}")
async def progress(page: ThePage, operation: Id) -> Response:
    found = await page.api.get(f"/v1/operations/{operation}")
    known = found["result"] or found["progress"] or {}
    parts = known.get("parts") or (found["progress"] or {}).get("parts") or []
    done = sum(part["state"] not in ("pending", "running") for part in parts)
    guard = (found["result"] or {}).get("guard")
    names = {part["job"]: part["job_name"] for part in parts}
    return await page.show(
        "consolidation_progress.html", operation=found, parts=parts, done=done, guard=guard, names=names
    )


def _number(form: Form, name: str) -> float | None:
    """None: the field is empty. Raises ApiError."""
    text = form.get(name, "").strip().replace(",", ".")
    try:
        return float(text) if text else None
    except ValueError:
        what = name.replace("_", " ")
        raise refused(422, "invalid", f"{what} is a number, not {text[:20]!r}", "go back and correct it") from None
