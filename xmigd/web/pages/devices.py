"""Devices: a tile each, and keeping new programs away from them."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

from fastapi import APIRouter, Path
from starlette.responses import Response

from xmigd.web.page import ThePage

router = APIRouter(prefix="/devices")
Device = Annotated[str, Path(max_length=64, pattern=r"^[A-Za-z0-9:,._-]+$")]


@router.get("")
async def devices(page: ThePage) -> Response:
    found, processes = await page.api.all("/v1/devices", ("/v1/processes", {"live": True, "limit": 1000}))
    on = {device["id"]: [p for p in processes if device["id"] in devices_of(p)] for device in found}
    return await page.show("devices.html", devices=found, processes=on)


@router.post("/{device}/cordon")
async def cordon(page: ThePage, device: Device) -> Response:
    form = await page.form()
    reason = form.get("reason", "").strip()
    return await page.act(
        page.api.patch(f"/v1/devices/{quote(device)}", {"cordoned": True, "reason": reason}, form.get("version", "")),
        done=f"{device} is cordoned: no new program is put on it; those that run there go on", to="/devices",
        back="/devices",
    )  # fmt: skip


@router.post("/{device}/uncordon")
async def uncordon(page: ThePage, device: Device) -> Response:
    form = await page.form()
    return await page.act(
        page.api.patch(f"/v1/devices/{quote(device)}", {"cordoned": False}, form.get("version", "")),
        done=f"{device} takes programs again", to="/devices", back="/devices",
    )  # fmt: skip


@router.post("/{device}/drain")
async def drain(page: ThePage, device: Device) -> Response:
    form = await page.form()
    return await page.act(
        page.api.post(f"/v1/devices/{quote(device)}:drain", {"reason": form.get("reason", "").strip()}),
        done=f"{device} is being drained", to="/operations", back="/devices",
    )  # fmt: skip


def devices_of(process: dict[str, object]) -> list[str]:
    """cpu:0,1 → cpu:0 and cpu:1"""
    kind, _, ordinals = str(process.get("device") or "").partition(":")
    return [f"{kind}:{ordinal}" for ordinal in ordinals.split(",") if ordinal]
