"""Long work: what runs, what has run, and ending it early."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query
from starlette.responses import Response

from xmigd.web.forms import path_of_ours
from xmigd.web.page import ThePage
from xmigd.web.paging import ThePages

router = APIRouter(prefix="/operations")
Id = Annotated[str, Path(max_length=64, pattern=r"^[A-Za-z0-9_-]+$")]
LISTED = 50


@router.get("")
async def operations(
    page: ThePage,
    pages: ThePages,
    state: Annotated[str, Query(max_length=16)] = "",
    kind: Annotated[str, Query(max_length=16)] = "",
) -> Response:
    found = await page.api.get("/v1/operations", state=state, kind=kind, before=pages.before, limit=LISTED)
    more = found[-1]["id"] if len(found) == LISTED else None
    names = {job["id"]: job["name"] for job in await page.api.get("/v1/jobs", limit=1000)}
    return await page.show(
        "operations.html", operations=found, state=state, kind=kind, pages=pages, more=more, names=names
    )


@router.get("/{operation}")
async def one_operation(page: ThePage, operation: Id) -> Response:
    found = await page.api.get(f"/v1/operations/{operation}")
    if found["kind"] == "consolidation":
        return page.go(path_of_ours(f"/consolidation/operations/{operation}"))
    migration = (found["progress"] or {}).get("migration") or (found["result"] or {}).get("migration")
    # The operation may name it a moment before it can be read.
    if migration and await page.api.get_or(None, f"/v1/migrations/{migration}") is not None:
        return page.go(path_of_ours(f"/migrations/{migration}"))
    return await page.show("operation.html", operation=found)


@router.post("/{operation}/cancel")
async def cancel(page: ThePage, operation: Id) -> Response:
    form = await page.form()
    back = form.get("back", f"/operations/{operation}")
    return await page.act(
        page.api.delete(f"/v1/operations/{operation}"), done="it is being cancelled", to=back, back=back
    )
