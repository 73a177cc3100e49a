"""Devices, and whether they take new processes."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Path, Response
from sqlalchemy import update
from sqlalchemy.orm import Session

from xmigd.api import preconditions
from xmigd.api.context import AnyCaller, Node, OperatorCaller, TheNode
from xmigd.api.preconditions import IfMatch
from xmigd.api.schemas import DeviceChange, DeviceInfo
from xmigd.database import models
from xmigd.devices import repository
from xmigd.devices.header import Description
from xmigd.devices.inventory import held_bytes
from xmigd.devices.names import devices_of
from xmigd.errors import NotFound
from xmigd.security.callers import Caller
from xmigd.supervisor.process import Process

router = APIRouter(prefix="/v1/devices")
DeviceId = Annotated[str, Path(max_length=64)]


def describe(node: Node, caller: Caller, rows: list[models.Device]) -> list[DeviceInfo]:
    """Rows with what is known of the devices now; whose processes are there only to those who see them. May wait for
    the driver."""
    processes = list(node.supervisor.processes.values())
    use: dict[str, list[Process]] = {}
    for process in processes:
        for name in devices_of(process.row.device):
            use.setdefault(name, []).append(process)
    held = held_bytes(processes)
    return [_info(node, caller, row, use.get(row.id, []), held.get(row.id, 0)) for row in rows]


def _info(node: Node, caller: Caller, row: models.Device, processes: list[Process], held: int) -> DeviceInfo:
    description = None
    if row.uuid is not None:
        description = Description(row.name or "", row.uuid, row.memory_bytes or 0)
    reading = node.inventory.read(row.id, description, held)
    return DeviceInfo(
        id=row.id, kind=row.kind, ordinal=row.ordinal, configured=row.configured, uuid=row.uuid,
        name=row.name or reading.name,
        state="unhealthy" if not reading.healthy else "cordoned" if row.cordoned else "ready",
        why=reading.why or row.cordon_reason, memory_bytes=reading.total_bytes or row.memory_bytes,
        used_bytes=reading.used_bytes, free_bytes=reading.free_bytes, utilisation=reading.utilisation,
        held_bytes=held, cordoned=row.cordoned, cordon_reason=row.cordon_reason, processes=len(processes),
        process_ids=sorted(each.row.id for each in processes if caller.sees(each.job.uid)), version=row.version,
    )  # fmt: skip


def _read(node: Node, caller: Caller, device: str) -> DeviceInfo:
    with node.read() as session:
        row = session.get(models.Device, device)
        if row is None:
            raise NotFound(f"there is no device {device!r}", hint="GET /v1/devices lists them")
        return describe(node, caller, [row])[0]


@router.get("", operation_id="list_devices")
def list_devices(node: TheNode, caller: AnyCaller) -> list[DeviceInfo]:
    """The node's devices: memory, use, whether they take new processes."""
    with node.read() as session:
        return describe(node, caller, list(repository.listed(session)))


@router.get("/{device}", operation_id="get_device")
def get_device(node: TheNode, caller: AnyCaller, device: DeviceId, response: Response) -> DeviceInfo:
    """One device. Its `ETag` is for a PATCH."""
    info = _read(node, caller, device)
    response.headers["ETag"] = preconditions.etag(info.version)
    return info


@router.patch("/{device}", operation_id="change_device")
async def change_device(
    node: TheNode, caller: OperatorCaller, device: DeviceId, change: DeviceChange, if_match: IfMatch, response: Response
) -> DeviceInfo:
    """Cordon it, so that it gets no new process, or uncordon it. What runs there stays."""

    def write(session: Session) -> tuple[bool, str]:
        row = session.get(models.Device, device)
        if row is None:
            raise NotFound(f"there is no device {device!r}", hint="GET /v1/devices lists them")
        preconditions.check(if_match, row.version)
        cordoned = row.cordoned if change.cordoned is None else change.cordoned
        reason = (row.cordon_reason if change.reason is None else change.reason) if cordoned else ""
        session.execute(
            update(models.Device)
            .where(models.Device.id == device)
            .values(cordoned=cordoned, cordon_reason=reason, version=row.version + 1)
        )
        return cordoned, reason

    cordoned, reason = await asyncio.wrap_future(node.writer.submit("devices.change", write))
    if cordoned:
        node.supervisor.cordoned[device] = reason
    else:
        node.supervisor.cordoned.pop(device, None)
    node.bus.publish(
        "device.changed", "device", device, None, {"cordoned": cordoned, "reason": reason, "by": caller.name}
    )
    info = await asyncio.to_thread(_read, node, caller, device)
    response.headers["ETag"] = preconditions.etag(info.version)
    return info
