"""Faults and recoveries on one line of time: what was seen, what was decided, what was done."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Query
from starlette.responses import Response

from xmigd.web.forms import refused
from xmigd.web.page import ThePage
from xmigd.web.paging import ThePages

router = APIRouter()
LISTED = 50


@router.get("/faults")
async def faults(page: ThePage, pages: ThePages, job: Annotated[str, Query(max_length=64)] = "") -> Response:
    """A page begins before a recovery and before a fault: `17-40`, either of which may be missing."""
    recovery, _, fault = pages.before.partition("-")
    if any(each and not each.isdecimal() for each in (recovery, fault)):
        raise refused(422, "invalid", "this is no page of the list", "begin with the newest: /faults")
    recoveries, seen = await page.api.all(
        ("/v1/recoveries", {"job": job, "before": recovery or None, "limit": LISTED + 1}),
        ("/v1/faults", {"job": job, "before": fault or None, "limit": 4 * LISTED}),
    )
    incidents, more = one_page(recoveries, seen)
    name = (await page.api.get_or({"name": job[:12]}, f"/v1/jobs/{quote(job)}"))["name"] if job else ""
    return await page.show("faults.html", incidents=incidents, job=job, job_name=name, more=more, pages=pages)


def one_page(recoveries: list[dict[str, Any]], seen: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str | None]:
    """Both newest first. The incidents of a page, at most LISTED, and before what the next one begins; None: there is
    no next one. Rows that a page has not shown are the next one's."""
    # As far back as both lists are known.
    known = [rows[-1]["at"] for rows, most in ((recoveries, LISTED + 1), (seen, 4 * LISTED)) if len(rows) == most]
    incidents = [each for each in join(recoveries, seen) if not known or each["at"] >= max(known)]
    over = bool(known) or len(incidents) > LISTED
    incidents = incidents[:LISTED]
    if not over or not incidents:
        return incidents, None
    shown_recoveries = [each["recovery"]["id"] for each in incidents if each["recovery"]]
    shown_faults = [f["id"] for each in incidents for f in (each["fault"], *each["further"]) if f]
    # What is newer than this page's last incident has been shown; a list of which it shows none goes on where it was.
    last = incidents[-1]["at"]
    recovery = min(shown_recoveries, default=None) or (recoveries[0]["id"] + 1 if recoveries else "")
    older = [f["id"] for f in seen if f["at"] <= last and f["id"] not in shown_faults]
    fault = max(older) + 1 if older else min(shown_faults, default="")
    return incidents, f"{recovery}-{fault}"


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
    return sorted(incidents + alone, key=_when, reverse=True)


def _when(incident: dict[str, Any]) -> tuple[float, int]:
    return float(incident["at"]), int((incident["recovery"] or incident["fault"])["id"])


def _answers(recovery: dict[str, Any], fault: dict[str, Any]) -> bool:
    if recovery["process_id"] != fault["process_id"] or recovery["fault"] is None:
        return False
    if fault["number"] <= recovery["fault"]:
        return bool(fault["number"] == recovery["fault"])
    lasted = recovery["resumed_ms"]
    return lasted is None or bool(fault["at"] <= recovery["at"] + lasted / 1000)
