"""What users of links see of them: names of peers, sessions, messages in order.

A *peer* is the daemon of another node. A *session* begins when two daemons meet that have not met since one of them
started; it outlives connections. Within a session each message arrives once, and in the order in which it was sent.
A new session begins with nothing: what was sent before and has not arrived never will.

Everything happens on the daemon's event loop. No callback runs inside `send`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

Body = Mapping[str, Any]  # a JSON object; its `topic` names the users that it is for
NAME = r"^[a-z0-9.-]{1,64}$"  # of a node
LONGEST = 1 << 20  # bytes of a message, as it is on the wire


class Users(Protocol):
    """Who hears of peers. What a callback raises is logged, and keeps nothing from going on."""

    def session(self, peer: str) -> None:
        """A new session: whatever was known of this peer is void. Comes before `up`, and before any message of it."""

    def received(self, peer: str, body: dict[str, Any]) -> None:
        """The session's next message with the users' topic."""

    def down(self, peer: str, why: str) -> None:
        """The connection is lost, or the peer is not known any more. What is sent waits, unless a new session begins.
        Once for each `up`."""

    def up(self, peer: str) -> None:
        """There is a connection, of the session that was last reported."""


class Links(Protocol):
    """This node's links to all of its peers."""

    node: str  # this one's name

    def known(self) -> Collection[str]:
        """Names of peers."""
        ...

    def send(self, peer: str, body: Body) -> bool:
        """Keep it until the peer has it. False: the peer is not known, or there is no session with it. Raises
        ValueError: it has no topic, is no JSON object, or is longer than `LONGEST`."""
        ...

    def connected(self, peer: str) -> bool:
        """Does a connection last, as far as this node knows?"""
        ...

    def tried(self, peer: str) -> bool:
        """Does this daemon know whether it is in reach? Not in its first moment."""
        ...
