"""Which device a new process gets."""

from __future__ import annotations

from xmigd.devices.names import devices_of
from xmigd.errors import Unavailable, XmigError


def resolve_device(wanted: str, devices: list[str]) -> str:
    """`wanted` as the server's --device takes it. Raises XmigError if this node has no such device."""
    for device in devices_of(wanted):
        if device not in devices:
            raise XmigError(
                f"this node has no device {wanted!r}", hint=f"it has {', '.join(devices)}", code="no_such_device"
            )
    return wanted


def least_used(devices: list[str], in_use: list[str]) -> str:
    """The device with the fewest processes; the first of them."""
    return min(devices, key=lambda device: (in_use.count(device), devices.index(device)))


def choose_device(wanted: str | None, devices: list[str], in_use: list[str], cordoned: dict[str, str]) -> str:
    """Where a new process goes: where its job wants to be, otherwise to the device with the fewest processes. Raises
    XmigError: there is none, or it takes no new processes."""
    if wanted is None:
        free = [device for device in devices if device not in cordoned]
        if not free:
            raise Unavailable(
                "every device of this node is cordoned", code="device_cordoned", hint="xmigctl device uncordon"
            )
        return least_used(free, in_use)
    resolve_device(wanted, devices)
    for device in devices_of(wanted):
        if device in cordoned:
            why = f": {cordoned[device]}" if cordoned[device] else ""
            raise Unavailable(
                f"{device} is cordoned and takes no new process{why}", code="device_cordoned",
                hint=f"choose another device, or xmigctl device uncordon {device}",
            )  # fmt: skip
    return wanted
