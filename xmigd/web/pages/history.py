"""The audit: who requested what, and what came of it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from xmigd.web.page import ThePage
from xmigd.web.paging import ThePages

router = APIRouter()
LISTED = 100


@router.get("/audit")
async def audit(page: ThePage, pages: ThePages) -> Response:
    found = await page.api.get("/v1/audit", before=pages.before, limit=LISTED)
    more = found[-1]["id"] if len(found) == LISTED else None
    return await page.show("audit.html", entries=paired(found), more=more, pages=pages)


def paired(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """An entry for each intent, with its outcome where that is known; newest first, as the records are."""
    outcomes = {record["intent_id"]: record for record in records if record["entry"] == "outcome"}
    entries = []
    for record in records:
        if record["entry"] == "intent":
            outcome = outcomes.pop(record["id"], None)
            entries.append(record | {"outcome": outcome["outcome"] if outcome else None})
    return entries
