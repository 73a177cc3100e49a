"""Devices, and whether they take new processes."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Response

from xmigd.api import preconditions
from xmigd.api.dependencies import AnyCaller, OperatorCaller, provided
from xmigd.api.preconditions import IfMatch
from xmigd.devices.schemas import DeviceChange, DeviceInfo
from xmigd.devices.service import Devices

router = APIRouter(prefix="/v1/devices")
DeviceId = Annotated[str, Path(max_length=64)]
TheDevices = Annotated[Devices, provided(Devices)]


@router.get("", operation_id="list_devices")
def list_devices(devices: TheDevices, caller: AnyCaller) -> list[DeviceInfo]:
    """The node's devices: memory, use, whether they take new processes."""
    return devices.listed(caller)


@router.get("/{device}", operation_id="get_device")
def get_device(devices: TheDevices, caller: AnyCaller, device: DeviceId, response: Response) -> DeviceInfo:
    """One device. Its `ETag` is for a PATCH."""
    return _tagged(devices.find(device, caller), response)


@router.patch("/{device}", operation_id="change_device")
async def change_device(
    devices: TheDevices,
    caller: OperatorCaller,
    device: DeviceId,
    change: DeviceChange,
    if_match: IfMatch,
    response: Response,
) -> DeviceInfo:
    """Cordon it, so that it gets no new process, or uncordon it. What runs there stays."""
    info = await devices.change(
        device, change, check=lambda version: preconditions.check(if_match, version), caller=caller
    )
    return _tagged(info, response)


def _tagged(info: DeviceInfo, response: Response) -> DeviceInfo:
    response.headers["ETag"] = preconditions.etag(info.version)
    return info
