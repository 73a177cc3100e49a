"""Is a visitor a user of this machine whom we trust without a token? The kernel says who owns the other end."""

from __future__ import annotations

import ipaddress
import os

from xmigd.connections.peers import Address, owner


def uid_of(visitor: Address, ours: Address) -> int | None:
    """The owner of the visitor's socket; None where it is not of this machine."""
    try:
        ipaddress.ip_address(visitor[0])
    except ValueError:
        return None
    return owner(visitor, ours)


def may_be_local(visitor: Address | None, ours: Address | None) -> bool:
    """Ours, or root's."""
    return visitor is not None and ours is not None and uid_of(visitor, ours) in (0, os.geteuid())
