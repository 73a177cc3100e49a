"""A rank moves on its node, which another one leads: what the two send each other, and what is done when the decision
comes too late."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from tests.peers.fake import FakeNetwork
from tests.peers.test_ranks import NAME, NODES, ONE, OTHER, body, joined
from tests.peers.test_suspended_ranks import RUNS, Three, at_once
from xmigd.ipc import messages as m
from xmigd.process import events as e
from xmigd.process import migration_events as v
from xmigd.supervisor import following
from xmigd.supervisor import node_messages as n
from xmigd.supervisor.standby_memory import StandbyMemory

__all__ = ["at_once"]

TARGET = 2


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        asyncio.run(asyncio.wait_for(test(**arguments), 20))

    return run


class Followed:
    """b's only process, which moves; the node that leads is played by the test."""

    def __init__(self, patience: float = 60) -> None:
        network = FakeNetwork("a", "b")
        self.heard: list[dict[str, Any]] = []
        leader: Any = SimpleNamespace(
            received=lambda peer, message: self.heard.append(message), session=lambda peer: None,
            up=lambda peer: None, down=lambda peer, why: None,
        )  # fmt: skip
        network["a"].register("ranks", leader)
        self.network = network
        self.events: list[e.Event] = []
        self.to_servers: list[tuple[int, dict[str, Any]]] = []
        self.communicators: tuple[int, ...] = ()
        process: Any = SimpleNamespace(
            row=SimpleNamespace(id=ONE, uid=0, pid=7, start_time=1, device="cpu:0"), state="running", active=0,
            job=SimpleNamespace(name="job", nodes=NODES), standing=True, warm_standby=None, rounds=lambda: (0, 0),
            suspended_at=lambda: 0, leaving="", resumes=False, target=TARGET, renewed=lambda: 0,
            machine=SimpleNamespace(awaits_group=False, move=None), forsaken=lambda: False, grouped=True,
            tell=self.events.append, server=self.server, server_devices=dict, note_made=lambda *_: None,
            count_standby_bytes=lambda _: None, prepare_communicator=lambda *_: None,
            forget_communicator=lambda *_: None, leaves_with=self.leaves_with,
        )  # fmt: skip
        self.process = process
        memory = StandbyMemory(0, {ONE: self.process})
        self.following = following.Following(
            NODES, network["b"], {ONE: self.process}, lambda *_: None, memory, lambda _: None, patience
        )
        network.connect()
        communicator: Any = m.parse(json.dumps(joined(ONE, 0)["message"]).encode())
        self.following.reported(self.process, self.server(0), communicator)
        for number in (0, TARGET):
            self.receives("prepare_communicator", server=number, attempt=7, name=NAME)
            made = m.CommunicatorPrepared(type="communicator_prepared", attempt=7, device_bytes=1, why="")
            self.following.reported(self.process, self.server(number), made)
        self.following.changed(self.process, v.AskHandover(0))
        network.deliver()

    def server(self, number: int) -> Any:
        def send(message: bytes) -> None:
            self.to_servers.append((number, json.loads(message)))

        return SimpleNamespace(number=number, device="cpu:0", send=send)

    def leaves_with(self, communicators: tuple[int, ...]) -> None:
        self.communicators = tuple(communicators)

    def receives(self, kind: str, **fields: object) -> None:
        self.following.received(n.parse(body(kind, process=ONE, **fields)))
        self.network.deliver()

    def decided(self, *communicators: int, leaves: bool = True) -> None:
        fields = {"round": 5, "moves": True, "leaves": leaves, "communicators": list(communicators)}
        self.receives("send", server=0, text=json.dumps({"type": "group_take"} | fields))

    def changes(self) -> list[str]:
        return [one["what"] for one in self.heard if one["kind"] == "changed"]

    def is_recovered(self) -> bool:
        lost = any(isinstance(one, e.GroupLost) for one in self.events)
        return lost and "broken" in self.changes() and not self.to_servers


@in_a_loop
async def test_it_leaves() -> None:
    """With what its target has made, and not earlier."""
    one = Followed()
    assert one.changes() == ["leaves"]
    assert one.communicators == ()
    one.decided(7)
    assert one.communicators == (7,)
    assert [(number, sent["type"]) for number, sent in one.to_servers] == [(0, "group_take")]
    assert one.events == []


@pytest.mark.parametrize("what", ["given up", "its time is up", "refused", "a new leader", "another server"])
@in_a_loop
async def test_the_decision_comes_too_late(what: str) -> None:
    """The others have gone on with its target."""
    one = Followed(patience=0.01 if what == "its time is up" else 60)
    match what:
        case "given up":
            record = v.MigrationRecord(id="1", kind="move", process=ONE, source="cpu:0", target="cpu:1", started=0)
            record.state = "failed"
            one.following.changed(one.process, v.SaveMigration(record))
        case "its time is up":
            await asyncio.sleep(0.05)
        case "refused":
            one.receives("tell", event="HandoverFailed", fields={"server": 0, "text": "it is not moved"})
        case "a new leader":
            one.following.session()
        case _:
            one.process.target = TARGET + 1
    if what != "another server":
        assert [type(event) for event in one.events] == [v.HandoverFailed], "its machine goes on where it was"
    one.decided(7)
    assert one.is_recovered()


@pytest.mark.parametrize("leaves", [True, False])
@in_a_loop
async def test_what_was_made_for_it_is_gone(leaves: bool) -> None:
    """Memory was needed, of this rank or of one that another goes on with."""
    one = Followed()
    one.receives("forget_communicator", server=TARGET if leaves else 0, attempt=7)
    one.decided(7, leaves=leaves)
    assert one.is_recovered()


@in_a_loop
async def test_another_rank_leaves() -> None:
    one = Followed()
    one.decided(7, leaves=False)
    assert [sent["type"] for _, sent in one.to_servers] == ["group_take"]
    assert one.communicators == (), "it still waits for a round of its own"
    assert one.events == []


MOVES = RUNS | {"target": TARGET}


@in_a_loop
async def test_the_leader_has_it_made() -> None:
    """By its target and the others' servers, once both nodes are in reach."""
    three = Three(MOVES, RUNS)
    await three.rests()
    three.changes(ONE, "moves", MOVES)
    await three.rests()
    made = {(one["process"], one["server"]) for _, one in three.sent if one["kind"] == "prepare_communicator"}
    assert made == {(ONE, TARGET), (OTHER, 0)}


@in_a_loop
async def test_none_is_made_while_a_node_is_not_in_reach() -> None:
    three = Three(MOVES, RUNS)
    await three.rests()
    three.network.disconnect("a", "c")
    three.changes(ONE, "leaves", MOVES)
    await three.rests()
    assert not [one for _, one in three.sent if one["kind"] == "prepare_communicator"]
    three.network.connect("a", "c")
    await three.rests()
    made = {(one["process"], one["server"]) for _, one in three.sent if one["kind"] == "prepare_communicator"}
    assert made == {(ONE, TARGET), (OTHER, 0)}
