"""A device is called `kind:ordinal`; several of one program `cuda:1,0`, in the order in which it sees them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from xmigd.errors import Invalid


def devices_of(device: str) -> list[str]:
    """`cpu:0,1` is cpu:0 and cpu:1."""
    kind, _, ordinals = device.partition(":")
    return [f"{kind}:{ordinal}" for ordinal in ordinals.split(",")]


def as_one(devices: Sequence[str]) -> str:
    """cuda:1 and cuda:0 are `cuda:1,0`: what a server is started with."""
    kind = devices[0].partition(":")[0]
    return f"{kind}:{','.join(name.partition(':')[2] for name in devices)}"


def together(devices: Iterable[str]) -> str:
    """Those of several programs, each once: `cuda:0,cuda:1`, as somebody names them."""
    return ",".join(dict.fromkeys(devices))


def each_of(text: str) -> list[str]:
    """`cuda:0,cuda:1` is cuda:0 and cuda:1, and so is `cuda:0,1`."""
    kind, found = "", []
    for part in text.split(",") if text else []:
        before, colon, ordinal = part.rpartition(":")
        kind = before if colon else kind
        found.append(f"{kind}:{ordinal}")
    return found


def in_turn(counts: Sequence[int], named: Sequence[str]) -> list[list[str]]:
    """The devices that programs get which have so many each. Programs of one device get these in turn, in the order in
    which they began. Raises Invalid."""
    needed = sum(counts)
    if not named or (len(named) != needed and not (len(counts) > 1 and all(count == 1 for count in counts))):
        raise Invalid(f"the program had {needed} devices, and {len(named)} are named")
    chosen, at = [], 0
    for count in counts:
        chosen.append([named[(at + number) % len(named)] for number in range(count)])
        at += count
    return chosen
