"""Callers: what is known of whoever sends a request, and what follows from it.

An operator sees and may do everything: root, the daemon's own user, members of the operators' group, a token of scope
`admin`. Everybody else sees the node and what belongs to their user. A token does what its scope says: `read` looks,
`operate` also acts, `admin` also decides about the node.
"""

from __future__ import annotations

import grp
import os
from dataclasses import dataclass
from typing import Literal

from xmigd.errors import Forbidden, NotFound, StartError
from xmigd.ipc.channel import Peer

Scope = Literal["read", "operate", "admin"]
SCOPES: tuple[Scope, ...] = ("read", "operate", "admin")
Via = Literal["unix", "network", "xmigd"]


@dataclass(frozen=True, slots=True)
class Caller:
    name: str  # as the audit and operations show it
    scope: Scope
    owner: int | None  # whose things they see; None: everybody's
    uid: int | None  # whose programs they may start: the kernel's word, or a token's
    via: Via
    token: str | None = None  # the token's id

    @property
    def is_operator(self) -> bool:
        return self.scope == "admin" and self.owner is None

    def sees(self, owner: int | None) -> bool:
        """May they know of something of this user's? None: it is the node's."""
        return self.owner is None or owner == self.owner

    def check_sees(self, owner: int | None, what: str, id: str, *, hint: str = "") -> None:
        """Raises NotFound: to them it does not exist."""
        if not self.sees(owner):
            raise NotFound(f"there is no {what} {id[:64]!r}", hint=hint)

    def check_scope(self, scope: Scope) -> None:
        """Raises Forbidden."""
        if SCOPES.index(self.scope) < SCOPES.index(scope):
            raise Forbidden(
                f"this needs a token of scope {scope}; yours is for {self.scope}", code="scope_too_small",
                hint=f"make one: xmigctl token create --scope {scope}",
            )  # fmt: skip

    def check_operator(self) -> None:
        """Raises Forbidden."""
        if not self.is_operator:
            raise Forbidden(
                "this is for operators: root, the daemon's user, the operators' group, or a token of scope admin",
                code="operators_only", hint="ask an operator of this node",
            )  # fmt: skip


def operators_group(name: str) -> int | None:
    """The group's number; None: none is configured. Raises StartError: there is no such group."""
    if not name:
        return None
    if name.isdecimal():
        return int(name)
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise StartError(
            f"there is no group {name!r}", hint="make it (groupadd), or set another XMIG_OPERATORS_GROUP"
        ) from None


def local_caller(peer: Peer, groups: frozenset[int], operators: int | None) -> Caller:
    """The process at the other end of a Unix socket."""
    trusted = peer.uid in (0, os.geteuid()) or (operators is not None and operators in groups | {peer.gid})
    if trusted:
        return Caller(f"user {peer.uid}", "admin", None, peer.uid, "unix")
    return Caller(f"user {peer.uid}", "operate", peer.uid, peer.uid, "unix")
