"""The node, its devices, its health."""

from __future__ import annotations

import os

from fastapi import APIRouter, Response

from xmigd import __version__
from xmigd.api.context import TheNode
from xmigd.api.schemas import DeviceInfo, Health, NodeInfo
from xmigd.database import queries
from xmigd.errors import NotFound

router = APIRouter()


@router.get("/v1/node")
async def get_node(node: TheNode) -> NodeInfo:
    """This node and its daemon."""
    return NodeInfo(
        version=__version__,
        pid=os.getpid(),
        uid=os.geteuid(),
        started_at=node.started_at,
        runtime_dir=str(node.settings.runtime_dir),
        database=str(node.settings.database),
        tcp_address=node.tcp_address,
        devices=node.settings.device_names,
        processes=len(node.supervisor.processes),
        database_failure=node.writer.failure,
    )


@router.get("/v1/devices")
def list_devices(node: TheNode) -> list[DeviceInfo]:
    """The node's devices and how many processes use each."""
    use = node.supervisor.device_use()
    with node.read() as session:
        return [
            DeviceInfo(
                id=device.id, kind=device.kind, ordinal=device.ordinal, configured=device.configured,
                memory_bytes=device.memory_bytes, processes=use.get(device.id, 0),
            )
            for device in queries.devices(session)
        ]  # fmt: skip


@router.get("/v1/devices/{device}")
def get_device(node: TheNode, device: str) -> DeviceInfo:
    """One device."""
    for info in list_devices(node):
        if info.id == device:
            return info
    raise NotFound(f"there is no device {device!r}")


@router.get("/healthz")
async def healthz() -> Health:
    """The daemon's event loop turns."""
    return Health(status="ok")


@router.get("/readyz", responses={503: {"model": Health}})
async def readyz(node: TheNode, response: Response) -> Health:
    """Programs can be started and everything can be recorded."""
    why = node.writer.failure or ("xmigd is stopping" if node.is_stopping() else "")
    if why:
        response.status_code = 503
        return Health(status="failing", detail=why)
    return Health(status="ok")
