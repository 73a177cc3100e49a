"""Jobs and their processes: where they stand, what they cost, and what may be done with them."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any, Literal
from urllib.parse import quote

from fastapi import APIRouter, Path, Query
from starlette.responses import Response

from xmigd.web.forms import refused
from xmigd.web.lanes import lanes
from xmigd.web.page import Page, ThePage
from xmigd.web.pages.checkpoints import of_job
from xmigd.web.pages.devices import devices_of
from xmigd.web.pages.faults import join
from xmigd.web.paging import ThePages
from xmigd.web.series import MOST, STEP, Sample, charts, of_series, of_snapshots

router = APIRouter()
Id = Annotated[str, Path(max_length=64, pattern=r"^[A-Za-z0-9_-]+$")]
Which = Annotated[Literal["live", "suspended", "all"], Query()]
LISTED = 100
RANKS, SPANS = 32, 250  # of a job, on its page; of each rank
PROFILED = 15  # operations of a profile
LINES = 100  # of a job's log, on its page


@router.get("/jobs")
async def jobs(page: ThePage, pages: ThePages, show: Which = "all") -> Response:
    listed, processes = await page.api.all(
        ("/v1/jobs", {"limit": LISTED, "before": pages.before, "live": show != "all"}),
        ("/v1/processes", {"live": True, "limit": 1000}),
    )
    more = listed[-1]["id"] if len(listed) == LISTED else None
    if show != "all":
        wanted = "running" if show == "live" else "suspended"
        listed = [job for job in listed if job["state"] == wanted]
    of: dict[str, list[dict[str, Any]]] = {}
    for process in processes:
        of.setdefault(process["job_id"], []).append(process)
    return await page.show("jobs.html", jobs=listed, processes=of, which=show, more=more, pages=pages)


@router.get("/jobs/{job}")
async def one_job(page: ThePage, job: Id) -> Response:
    found = await page.api.get(f"/v1/jobs/{job}")
    processes, faults, recoveries, devices = await page.api.all(
        ("/v1/processes", {"job": job, "limit": 100}), ("/v1/faults", {"job": job, "limit": 200}),
        ("/v1/recoveries", {"job": job, "limit": 20}), "/v1/devices",
    )  # fmt: skip
    measured = await _measured(page, processes[0]) if processes else []
    lines = await page.api.get_or([], f"/v1/jobs/{job}/logs", limit=LINES) if page.front.features.logs else []
    ranks = None
    if page.front.features.ranks:
        ranks = await page.api.get_or(None, f"/v1/jobs/{job}/ranks", limit=RANKS, spans=SPANS)
    checkpoints, making = await of_job(page, job)
    policy = None
    if page.front.features.checkpoint_policies:
        policy = await page.api.get_or(None, f"/v1/jobs/{job}/checkpoint-policy")
    profile = None
    if page.front.features.profile:
        profile = await page.api.get_or(None, f"/v1/jobs/{job}/profile", limit=PROFILED)
    return await page.show(
        "job.html", profile=profile, checkpoints=checkpoints, making=making, policy=policy, ranks=ranks,
        lanes=lanes(ranks["ranks"], time.time()) if ranks else None,
        job=found, processes=processes, incidents=join(recoveries, faults), samples=measured,
        charts=charts(measured), charted=processes[0] if processes else None, devices=devices, lines=lines,
    )  # fmt: skip


async def _measured(page: Page, process: dict[str, Any]) -> list[Sample]:
    of = f"/v1/processes/{process['id']}"
    if page.front.features.series:
        device = quote(devices_of(process)[0]) if devices_of(process) else ""
        nothing: dict[str, Any] = {"samples": {}}
        since = time.time() - MOST * STEP
        its, devices = await asyncio.gather(
            page.api.get(f"{of}/series", since=since),
            page.api.get_or(nothing, f"/v1/devices/{device}/series", since=since),
        )
        if found := of_series(its["samples"], devices["samples"]):
            return found
    return of_snapshots(await page.api.get(f"{of}/segments", limit=MOST))


@router.post("/jobs/{job}/stop")
async def stop(page: ThePage, job: Id) -> Response:
    await page.form()
    return await page.act(
        page.api.delete(f"/v1/jobs/{job}"), done="the job is being stopped", to=f"/jobs/{job}", back=f"/jobs/{job}"
    )


@router.get("/processes/{process}")
async def one_process(page: ThePage, process: Id) -> Response:
    found = await page.api.get(f"/v1/processes/{process}")
    faults, recoveries, devices = await page.api.all(
        ("/v1/faults", {"process": process, "limit": 200}),
        ("/v1/recoveries", {"process": process, "limit": 20}), "/v1/devices",
    )  # fmt: skip
    measured = await _measured(page, found)
    return await page.show(
        "process.html", process=found, incidents=join(recoveries, faults), samples=measured,
        charts=charts(measured), devices=devices,
    )  # fmt: skip


@router.post("/jobs/{job}/checkpoint-policy")
async def set_checkpoint_policy(page: ThePage, job: Id) -> Response:
    form = await page.form()
    every, keep, here = form.get("every", "").strip(), form.get("keep", "").strip(), f"/jobs/{job}"
    try:
        body = {
            "every_minutes": float(every) if every else None, "keep": int(keep), "before_drain": "before_drain" in form,
        }  # fmt: skip
    except ValueError:
        raise refused(
            422, "invalid", "the minutes and how many are kept are numbers", "go back and correct the form"
        ) from None
    return await page.act(
        page.api.put(f"/v1/jobs/{job}/checkpoint-policy", body, form.get("version", "")),
        done="the policy applies from now on", to=here, back=here,
    )  # fmt: skip


@router.post("/processes/{process}/suspend")
async def suspend(page: ThePage, process: Id) -> Response:
    form = await page.form()
    here = f"/processes/{quote(process)}"
    return await page.act(
        page.api.post(f"/v1/processes/{process}:suspend", {"to": form.get("to", "host")}),
        done="the process is being suspended", to=here, back=here,
    )  # fmt: skip


@router.post("/processes/{process}/resume")
async def resume(page: ThePage, process: Id) -> Response:
    form = await page.form()
    here = f"/processes/{quote(process)}"
    return await page.act(
        page.api.post(f"/v1/processes/{process}:resume", {"device": form.get("device") or None}),
        done="the process is being resumed", to=here, back=here,
    )  # fmt: skip
