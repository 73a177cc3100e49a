"""Devices, and whether they take new processes."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Response

from xmigd.api import preconditions
from xmigd.api.dependencies import AnyCaller, OperatorCaller, provided
from xmigd.api.preconditions import IfMatch
from xmigd.api.routing import make_router
from xmigd.devices.schemas import DeviceChange, DeviceInfo, DeviceLoss
from xmigd.devices.service import Devices

router = make_router("/v1/devices")
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


@router.post("/{device}:lose", operation_id="lose_device")
async def lose_device(
    devices: TheDevices, caller: OperatorCaller, device: DeviceId, loss: DeviceLoss, response: Response
) -> DeviceInfo:
    """Treat it as lost with its memory: it fell off the bus, or that is to be tried. All servers on it are ended, what
    xMIG holds of its memory is given up, and it is cordoned. A rank of several goes on elsewhere if others have its
    memory's content; every other program that has memory on the device is lost."""
    return _tagged(await devices.lose(device, loss.reason, caller=caller), response)


def _tagged(info: DeviceInfo, response: Response) -> DeviceInfo:
    response.headers["ETag"] = preconditions.etag(info.version)
    return info
