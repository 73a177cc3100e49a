"""A device is called `kind:ordinal`; several of one program `cuda:1,0`, in the order in which it sees them."""

from __future__ import annotations

from collections.abc import Sequence


def devices_of(device: str) -> list[str]:
    """`cpu:0,1` is cpu:0 and cpu:1."""
    kind, _, ordinals = device.partition(":")
    return [f"{kind}:{ordinal}" for ordinal in ordinals.split(",")]


def as_one(devices: Sequence[str]) -> str:
    """cuda:1 and cuda:0 are `cuda:1,0`: what a server is started with."""
    kind = devices[0].partition(":")[0]
    return f"{kind}:{','.join(name.partition(':')[2] for name in devices)}"
