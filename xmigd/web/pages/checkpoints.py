"""Checkpoints: what there is of which job, whether it is whole, and what may be done with it."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path
from starlette.responses import Response

from xmigd.web.page import Page, ThePage
from xmigd.web.paging import ThePages
from xmigd.web.render import share

router = APIRouter(prefix="/checkpoints")
Id = Annotated[str, Path(max_length=64, pattern=r"^[A-Za-z0-9_-]+$")]
LISTED = 50
REMEMBERED = 500  # verifications whose outcome is shown
WORKS = {"verification": "being verified", "restoration": "being restored", "export": "being exported"}
GOING = ("pending", "running")


@router.get("")
async def checkpoints(page: ThePage, pages: ThePages) -> Response:
    found, devices, jobs = await page.api.all(
        ("/v1/checkpoints", {"before": pages.before, "limit": LISTED}), "/v1/devices", ("/v1/jobs", {"limit": 1000})
    )
    names = {job["id"]: job["name"] for job in jobs}
    more = found[-1]["id"] if len(found) == LISTED else None
    running, verified = await _operations(page)
    making = [_making(one, names) for one in running if one["kind"] == "checkpoint"]
    return await page.show(
        "checkpoints.html", checkpoints=[_shown(one, running, verified) for one in found], making=making,
        devices=devices, more=more, pages=pages, live=any(job["state"] == "running" for job in jobs),
    )  # fmt: skip


@router.get("/{checkpoint}")
async def one_checkpoint(page: ThePage, checkpoint: Id) -> Response:
    found = await page.api.get(f"/v1/checkpoints/{checkpoint}")
    devices = await page.api.get("/v1/devices")
    running, verified = await _operations(page)
    return await page.show(
        "checkpoint.html", checkpoint=_shown(found, running, verified), devices=devices,
        job=await page.api.get_or(None, f"/v1/jobs/{found['job_id']}"),
    )  # fmt: skip


@router.post("")
async def create(page: ThePage) -> Response:
    form = await page.form()
    body = {"job": form.get("job", ""), "stop": bool(form.get("stop"))}
    return await page.act(
        page.api.post("/v1/checkpoints", body), done="a checkpoint is being made", to="/checkpoints",
        back=form.get("back", "/checkpoints"),
    )  # fmt: skip


@router.post("/{checkpoint}/verify")
async def verify(page: ThePage, checkpoint: Id) -> Response:
    form = await page.form()
    return await _act(page, checkpoint, "verify", {}, "it is being verified", form.get("back"))


@router.post("/{checkpoint}/restore")
async def restore(page: ThePage, checkpoint: Id) -> Response:
    form = await page.form()
    devices = [form["device"]] if form.get("device") else []
    return await _act(page, checkpoint, "restore", {"devices": devices}, "it is being restored", form.get("back"))


@router.post("/{checkpoint}/export")
async def export(page: ThePage, checkpoint: Id) -> Response:
    form = await page.form()
    body = {"key_file": form.get("key_file", "").strip() or None}
    return await _act(page, checkpoint, "export", body, "it is being exported", form.get("back"))


@router.post("/{checkpoint}/remove")
async def remove(page: ThePage, checkpoint: Id) -> Response:
    form = await page.form()
    return await page.act(
        page.api.delete(f"/v1/checkpoints/{checkpoint}"), done=f"checkpoint {checkpoint[:12]} is removed",
        to="/checkpoints", back=form.get("back", "/checkpoints"),
    )  # fmt: skip


async def _act(
    page: Page, checkpoint: str, action: str, body: dict[str, Any], done: str, back: str | None
) -> Response:  # fmt: skip
    here = f"/checkpoints/{checkpoint}"
    return await page.act(
        page.api.post(f"/v1/checkpoints/{checkpoint}:{action}", body), done=done, to=here, back=back or here
    )


async def of_job(page: Page, job: str) -> tuple[list[dict[str, Any]] | None, list[dict[str, Any]]]:
    """A job's checkpoints, and what makes one of it. None: xmigd knows no checkpoints."""
    if not page.front.features.checkpoints:
        return None, []
    found = await page.api.get("/v1/checkpoints", job=job, limit=LISTED)
    running, verified = await _operations(page)
    making = [_making(one, {}) for one in running if one["kind"] == "checkpoint" and one["job_id"] == job]
    return [_shown(one, running, verified) for one in found], making


async def _operations(page: Page) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What is under way, and the latest verifications, newest first."""
    latest, verified = await page.api.all(
        ("/v1/operations", {"limit": 200}), ("/v1/operations", {"kind": "verification", "limit": REMEMBERED})
    )
    return [one for one in latest if one["state"] in GOING], verified


def _shown(
    checkpoint: dict[str, Any], running: list[dict[str, Any]], verified: list[dict[str, Any]]
) -> dict[str, Any]:  # fmt: skip
    """With `shown`: its state, why, and the operation that goes on."""
    shown: dict[str, Any] = {
        "state": "complete", "why": "not read again since it was made", "operation": None, "percent": None,
    }  # fmt: skip
    for one in verified:
        if one["subject"]["id"] == checkpoint["id"] and one["state"] in ("succeeded", "failed"):
            code = (one["error"] or {}).get("code")
            if one["state"] == "succeeded":
                shown |= {"state": "whole", "why": "all of it was read and compared with its hashes"}
            elif code == "damaged":
                shown |= {"state": "damaged", "why": one["error"]["detail"]}
            break
    for one in running:
        if one["subject"]["id"] == checkpoint["id"]:
            shown |= {"state": WORKS.get(one["kind"], one["kind"]), "operation": one["id"], "percent": _percent(one)}
    return checkpoint | {"shown": shown}


def _making(operation: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    return operation | {"name": names.get(operation["job_id"] or "", ""), "percent": _percent(operation)}


def _percent(operation: dict[str, Any]) -> float | None:
    progress = operation["progress"] or {}
    return share(progress.get("processed_bytes"), progress.get("total_bytes"))
