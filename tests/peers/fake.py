"""Links without a network: several nodes in one process, and a test that decides when something arrives.

What waits has been sent and not arrived; `deliver` lets it arrive. Everything else is as `xmigd.peers.contract` says.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Collection
from typing import Any

from xmigd.peers.contract import LONGEST, Body, Users


class FakeLinks:
    """One node's links."""

    def __init__(self, network: FakeNetwork, node: str) -> None:
        self.node = node
        self._network = network
        self._users: dict[str, Users] = {}

    def register(self, topic: str, users: Users) -> None:
        """As `PeerLinks.register`."""
        assert topic not in self._users, f"{topic} has users"
        self._users[topic] = users

    def known(self) -> Collection[str]:
        return tuple(name for name in self._network.nodes if name != self.node)

    def send(self, peer: str, body: Body) -> bool:
        text = json.dumps(body, allow_nan=False)
        if not isinstance(body.get("topic"), str) or len(text) > LONGEST:
            raise ValueError("no topic, or too long")
        if not self._network.has_session(self.node, peer):
            return False
        self._network.waiting[self.node, peer].append(text)
        return True

    def connected(self, peer: str) -> bool:
        return self._network.is_up(self.node, peer)

    def tried(self, peer: str) -> bool:
        return peer not in self._network.untried

    def all_users(self) -> list[Users]:
        return list(self._users.values())

    def receive(self, peer: str, body: dict[str, Any]) -> None:
        users = self._users.get(body["topic"])
        if users is not None:
            users.received(peer, body)


class FakeNetwork:
    """Nodes that all know each other. At first nobody is connected: users are registered, then `connect`."""

    def __init__(self, *names: str) -> None:
        self.nodes = {name: FakeLinks(self, name) for name in names}
        self.waiting: dict[tuple[str, str], deque[str]] = {}  # of each session, in each direction, as JSON
        self.untried: set[str] = set()  # peers with whom nobody has tried to connect yet
        self._up: set[frozenset[str]] = set()
        self._sessions: set[frozenset[str]] = set()  # of pairs of daemons that live

    def __getitem__(self, name: str) -> FakeLinks:
        return self.nodes[name]

    def has_session(self, one: str, other: str) -> bool:
        return (one, other) in self.waiting

    def is_up(self, one: str, other: str) -> bool:
        return frozenset((one, other)) in self._up

    def connect(self, one: str | None = None, other: str | None = None) -> None:
        """Connect these two, or one with all others, or everybody who is not connected. Who has not met since a restart
        gets a new session."""
        for first, second in self._pairs(one, other):
            pair = frozenset((first, second))
            if pair in self._up:
                continue
            is_new = pair not in self._sessions
            self._sessions.add(pair)
            self._up.add(pair)
            if is_new:
                self.waiting[first, second], self.waiting[second, first] = deque(), deque()
            for here, there in ((first, second), (second, first)):
                for users in self.nodes[here].all_users():
                    if is_new:
                        users.session(there)
                    users.up(there)

    def disconnect(self, one: str | None = None, other: str | None = None, why: str = "the connection is lost") -> None:
        """The connections of these two, of one with all others, or all. What waits stays."""
        for first, second in self._pairs(one, other):
            if frozenset((first, second)) not in self._up:
                continue
            self._up.remove(frozenset((first, second)))
            for here, there in ((first, second), (second, first)):
                for users in self.nodes[here].all_users():
                    users.down(there, why)

    def restart(self, name: str) -> FakeLinks:
        """The daemon of this node is killed, and another one starts: without users, sessions and connections. The
        others see their connections end, and a new session when they are connected again."""
        old = self.nodes[name]
        self.nodes[name] = FakeLinks(self, name)
        for other in old.known():
            pair = frozenset((name, other))
            self._sessions.discard(pair)
            self.waiting.pop((name, other), None)
            if (other, name) in self.waiting:  # who lives sends into a session that nobody has any more
                self.waiting[other, name].clear()
            if pair in self._up:
                self._up.remove(pair)
                for users in self.nodes[other].all_users():
                    users.down(name, "the peer's daemon has ended")
        return self.nodes[name]

    def deliver(self, sender: str | None = None, receiver: str | None = None, count: int | None = None) -> int:
        """Let so many messages arrive that wait for this receiver or any, from this sender or any, in the order of
        each session; None: until nothing waits, also of what is sent meanwhile. Returns how many."""
        arrived = 0
        while count is None or arrived < count:
            ready = [
                way for way, texts in self.waiting.items()
                if texts and self.is_up(*way) and sender in (None, way[0]) and receiver in (None, way[1])
            ]  # fmt: skip
            if not ready:
                break
            for way in ready:
                if (count is None or arrived < count) and self.waiting.get(way) and self.is_up(*way):
                    body = json.loads(self.waiting[way].popleft())
                    arrived += 1
                    self.nodes[way[1]].receive(way[0], body)
        return arrived

    def _pairs(self, one: str | None, other: str | None) -> list[tuple[str, str]]:
        names = list(self.nodes)
        return [
            (first, second)
            for place, first in enumerate(names)
            for second in names[place + 1 :]
            if {one, other} - {None} <= {first, second}
        ]
