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
FAULTS = 4 * LISTED  # that are looked at for a page: several may belong to one recovery


@router.get("/faults")
async def faults(page: ThePage, pages: ThePages, job: Annotated[str, Query(max_length=64)] = "") -> Response:
    """A page begins before a recovery and before a fault: `17-40`, either of which may be missing."""
    recovery, _, fault = pages.before.partition("-")
    if any(each and not each.isdecimal() for each in (recovery, fault)):
        raise refused(422, "invalid", "this is no page of the list", "begin with the newest: /faults")
    recoveries, seen = await page.api.all(
        ("/v1/recoveries", {"job": job, "before": recovery or None, "limit": LISTED + 1}),
        ("/v1/faults", {"job": job, "before": fault or None, "limit": FAULTS}),
    )
    incidents, more = one_page(recoveries, seen, (recovery, fault))
    name = (await page.api.get_or({"name": job[:12]}, f"/v1/jobs/{quote(job)}"))["name"] if job else ""
    return await page.show("faults.html", incidents=incidents, job=job, job_name=name, more=more, pages=pages)


def one_page(
    recoveries: list[dict[str, Any]], seen: list[dict[str, Any]], begins: tuple[str, str] = ("", "")
) -> tuple[list[dict[str, Any]], str | None]:
    """Both newest first, from where the page begins. The incidents of a page, and where the next one begins; None:
    there is none. The two lists are taken one after the other as things happened, each row once, and a fault with the
    recovery that answers it."""
    cut_off = len(recoveries) == LISTED + 1, len(seen) == FAULTS
    place_of = {id(recovery): place for place, recovery in enumerate(recoveries)}
    answered = [place_of[id(found)] if (found := _answer(recoveries, fault)) else None for fault in seen]
    taken = faults = shown = 0
    while taken < len(recoveries) or faults < len(seen):
        place = answered[faults] if faults < len(seen) else None
        if place is not None and place < taken:
            faults += 1
        elif shown == LISTED or (cut_off[1] and faults == len(seen)):
            break
        elif (
            faults == len(seen)
            or place is not None
            or (taken < len(recoveries) and recoveries[taken]["at"] >= seen[faults]["at"])
        ):
            if cut_off[0] and taken == LISTED:
                break
            taken, shown = taken + 1, shown + 1
        else:
            faults, shown = faults + 1, shown + 1
    incidents = join(recoveries[:taken], seen[:faults])
    if taken == len(recoveries) and faults == len(seen) and not cut_off[1]:
        return incidents, None
    recovery = recoveries[taken - 1]["id"] if taken else begins[0]
    fault = seen[faults - 1]["id"] if faults else begins[1]
    return incidents, f"{recovery}-{fault}"


def _answer(recoveries: list[dict[str, Any]], fault: dict[str, Any]) -> dict[str, Any] | None:
    """The recovery to which a fault belongs."""
    found = (recovery for recovery in recoveries if _answers(recovery, fault))
    return max(found, key=lambda recovery: int(recovery["number"]), default=None)


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
