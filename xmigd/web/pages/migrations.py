"""Moving a process to another device: what it would mean, how it goes on, what it came to."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query
from starlette.responses import Response

from xmigd.web.forms import refused
from xmigd.web.page import ThePage
from xmigd.web.paging import ThePages

router = APIRouter(prefix="/migrations")
Id = Annotated[str, Path(max_length=64, pattern=r"^[A-Za-z0-9_-]+$")]
LISTED = 50
# What a person follows; what is in between is in the table of phases.
STEPS = {
    "move": {
        "preparing": "Prepare the target", "copying": "Copy while it runs", "handing_over": "Stop at the source",
        "taking": "Take over", "releasing": "Release the source",
    },
    "suspend": {
        "preparing": "Make room, copy while it runs", "handing_over": "Stop and copy the rest",
        "keeping": "Keep its memory", "releasing": "Give the device back",
    },
    "resume": {"preparing": "Start a server", "taking": "Bring its memory back"},
}  # fmt: skip


@router.get("")
async def migrations(
    page: ThePage,
    pages: ThePages,
    state: Literal["", "running", "done", "failed", "cancelled"] = "",
    kind: Literal["", "move", "suspend", "resume"] = "",
    process: Annotated[str, Query(max_length=32)] = "",
    sort: Literal["newest", "oldest", "downtime", "copied"] = "newest",
) -> Response:
    chosen = {"state": state, "kind": kind, "process": process, "sort": "" if sort == "newest" else sort}
    found = await page.api.get("/v1/migrations", **chosen, before=pages.before, limit=LISTED)
    more = found[-1]["id"] if len(found) == LISTED else None
    movable = await page.api.get("/v1/processes", live=True, limit=200) if not pages.before else []
    return await page.show(
        "migrations.html", migrations=found, more=more, pages=pages, movable=movable, chosen=chosen, sort=sort
    )


@router.get("/new")
async def plan(page: ThePage, process: Annotated[str, Query(max_length=64)] = "") -> Response:
    if not process:
        raise refused(422, "invalid", "no process is chosen", "choose one on the page Migrations or on its own page")
    found = await page.api.get(f"/v1/processes/{process}")
    made = (await page.api.post("/v1/migration-plans", {"process": process})).json()
    return await page.show("plan.html", process=found, plan=made)


@router.post("")
async def migrate(page: ThePage) -> Response:
    form = await page.form()
    process = form.get("process", "")
    budget = form.get("max_downtime_ms", "").strip()
    if budget and not budget.isdecimal():
        raise refused(422, "invalid", "the downtime's budget is a number of milliseconds", "go back and correct it")
    body = {
        "process": process, "target": form.get("target"), "engine": form.get("engine") or None,
        "max_downtime_ms": int(budget) if budget else None,
    }  # fmt: skip
    return await page.act(
        page.api.post("/v1/migrations", body), done="the migration has begun", to="/migrations",
        back=f"/migrations/new?process={process}",
    )  # fmt: skip


@router.get("/{migration}")
async def one_migration(page: ThePage, migration: Id) -> Response:
    found = await page.api.get(f"/v1/migrations/{migration}")
    operation = await page.api.get_or(None, f"/v1/operations/{found['operation_id']}")
    process = await page.api.get_or(None, f"/v1/processes/{found['process_id']}")
    steps = _steps(found)
    return await page.show(
        "migration.html", migration=found, operation=operation, process=process, steps=steps,
    )  # fmt: skip


def _steps(migration: dict[str, Any]) -> list[dict[str, Any]]:
    """The stepper: those reached, the one under way, those to come if it goes on as it should."""
    spent = {phase["name"]: phase["ms"] for phase in migration["phases"]}
    going = migration["state"] in ("pending", "running")
    named = STEPS.get(migration["kind"], {})
    steps = []
    for name, title in named.items():
        look = "ahead" if name not in spent else "current" if going and name == migration["phase"] else "done"
        if going or name in spent:
            steps.append({"title": title, "look": look, "ms": spent.get(name)})
    if "rolling_back" in spent:
        look = "current" if going else "done"
        steps = [step for step in steps if step["look"] != "ahead"]
        steps.append({"title": "Roll back", "look": look, "ms": spent["rolling_back"]})
    return steps
