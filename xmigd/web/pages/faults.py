"""Faults and recoveries on one line of time: what was seen, what was decided, what was done."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.responses import Response

from xmigd.web.page import ThePage

router = APIRouter()
LISTED = 50


@router.get("/faults")
async def faults(
    page: ThePage, job: Annotated[str, Query(max_length=64)] = "", before: Annotated[int | None, Query(ge=1)] = None
) -> Response:
    recoveries, seen = await page.api.all(
        ("/v1/recoveries", {"job": job, "before": before, "limit": LISTED}), ("/v1/faults", {"job": job, "limit": 1000})
    )
    incidents = join(recoveries, seen)
    if recoveries:  # faults before the oldest recovery here belong to the next page
        incidents = [i for i in incidents if i["at"] >= recoveries[-1]["at"]]
    more = recoveries[-1]["id"] if len(recoveries) == LISTED else None
    return await page.show("faults.html", incidents=incidents, job=job, more=more, before=before)


def join(recoveries: list[dict[str, Any]], faults: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Incidents, newest first: each recovery with the fault that began it and those that came before it was over; and
    faults that no recovery answers (yet)."""
    incidents = [{"at": r["at"], "recovery": r, "fault": None, "further": []} for r in recoveries]
    alone = []
    for fault in sorted(faults, key=lambda fault: int(fault["number"])):
        of = [i for i in incidents if _answers(i["recovery"], fault)]
        incident = max(of, key=lambda i: int(i["recovery"]["number"]), default=None)
        if incident is None:
            alone.append({"at": fault["at"], "recovery": None, "fault": fault, "further": []})
        elif fault["number"] == incident["recovery"]["fault"]:
            incident["fault"] = fault
        else:
            incident["further"].append(fault)
    return sorted(incidents + alone, key=lambda incident: float(incident["at"]), reverse=True)


def _answers(recovery: dict[str, Any], fault: dict[str, Any]) -> bool:
    if recovery["process_id"] != fault["process_id"] or recovery["fault"] is None:
        return False
    if fault["number"] <= recovery["fault"]:
        return bool(fault["number"] == recovery["fault"])
    lasted = recovery["resumed_ms"]
    return lasted is None or bool(fault["at"] <= recovery["at"] + lasted / 1000)
