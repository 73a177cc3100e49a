"""$CUDA_VISIBLE_DEVICES, read as the driver reads it (CUDA C++ Programming Guide, "CUDA Environment Variables").

The numbers in it count the devices of the program's job. Where the job has none of its own they are the node's
ordinals, as natively.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from xmigd.devices.names import devices_of


def numbered(job_device: str | None, node_devices: Sequence[str]) -> dict[int, str]:
    """The devices that a program could choose from, by the numbers that it knows them by."""
    if job_device is not None:
        return dict(enumerate(devices_of(job_device)))
    gpus = [name for name in node_devices if name.startswith("cuda:")]
    kind = (gpus or list(node_devices))[0].partition(":")[0]
    found = (name.partition(":") for name in node_devices)
    return {int(ordinal): f"{kind}:{ordinal}" for its_kind, _, ordinal in found if its_kind == kind}


def visible(text: str, devices: Mapping[int, str], uuid_of: Callable[[str], str | None]) -> list[str]:
    """The devices that `text` names, in its order: those before the first entry that names none, and none at all if one
    is named twice. An entry is a number, or `GPU-` and the beginning of one UUID only. `uuid_of`: a device's, without
    `GPU-`; None where nobody knows it yet."""
    numbers = {str(number): name for number, name in devices.items()}  # a list may have longer ones than Python reads
    found: list[str] = []
    for entry in text.split(","):
        entry = entry.strip(" ")
        if entry.isascii() and entry.isdecimal():
            number = entry.lstrip("0") or "0"
            named = [numbers[number]] if number in numbers else []
        elif entry.startswith("GPU-"):
            beginning = entry.removeprefix("GPU-").lower()
            named = [name for name in devices.values() if (uuid_of(name) or "").startswith(beginning or "-")]
        else:
            named = []
        if len(named) != 1:
            break
        found += named
    return found if len(set(found)) == len(found) else []


def names_devices(text: str) -> bool:
    """False: it hides every device, and the program finds that out without a daemon (shim/ipc/visible.h)."""
    return re.match(r" *([0-9]|GPU-|MIG-)", text) is not None
