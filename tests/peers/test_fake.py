"""The fake does what the contract says: other tests believe it."""

from __future__ import annotations

from typing import Any

import pytest

from xmigd.peers.contract import Links, Users

from .fake import FakeLinks, FakeNetwork


class Heard:
    def __init__(self, links: FakeLinks) -> None:
        self.events: list[tuple[Any, ...]] = []
        links.register("test", self)

    def session(self, peer: str) -> None:
        self.events.append(("session", peer))

    def received(self, peer: str, body: dict[str, Any]) -> None:
        self.events.append((peer, body["n"]))

    def down(self, peer: str, why: str) -> None:
        self.events.append(("down", peer))

    def up(self, peer: str) -> None:
        self.events.append(("up", peer))


def message(number: int) -> dict[str, Any]:
    return {"topic": "test", "n": number}


def test_what_waits_arrives_once_and_in_order_over_a_lost_connection() -> None:
    network = FakeNetwork("a", "b")
    links: Links = network["a"]
    heard: Users = Heard(network["b"])
    assert isinstance(heard, Heard)
    assert not links.send("b", message(0))
    network.connect()
    for number in range(1, 4):
        assert links.send("b", message(number))
    assert network.deliver(count=1) == 1
    network.disconnect("a", "b")
    assert not links.connected("b")
    assert links.send("b", message(4))
    assert network.deliver() == 0
    network.connect()
    assert network.deliver() == 3
    assert heard.events == [
        ("session", "a"), ("up", "a"), ("a", 1), ("down", "a"), ("up", "a"), ("a", 2), ("a", 3), ("a", 4),
    ]  # fmt: skip


def test_a_restart_begins_a_new_session_without_what_was_sent_before() -> None:
    network = FakeNetwork("a", "b", "c")
    heard = Heard(network["a"])
    network.connect()
    network["a"].send("b", message(1))
    network["b"].send("a", message(2))
    again = Heard(network.restart("b"))
    assert network["a"].send("b", message(3))  # nobody knows yet that the session has ended
    assert not network["b"].send("a", message(4))
    network.connect("b")
    assert network.deliver() == 0
    network["b"].send("a", message(5))
    network.deliver("b", "a")
    assert heard.events[4:] == [("down", "b"), ("session", "b"), ("up", "b"), ("b", 5)]
    assert again.events == [("session", "a"), ("up", "a"), ("session", "c"), ("up", "c")]


def test_what_is_no_message_is_refused() -> None:
    network = FakeNetwork("a", "b")
    network.connect()
    for body in ({"n": 1}, {"topic": 1}, {"topic": "test", "text": "x" * (1 << 20)}):
        with pytest.raises(ValueError, match="topic"):
            network["a"].send("b", body)
    assert not network["a"].send("stranger", message(1))
