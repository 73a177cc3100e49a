"""Communicators that standbys of another node make ahead: what the daemons of both nodes send each other of them."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

from tests.peers.fake import FakeNetwork
from tests.peers.test_ranks import GIB, NAME, NODES, ONE, OTHER, Node, here, in_a_loop, joined, stand
from tests.peers.test_ranks import body as sent
from xmigd.ipc import messages as m
from xmigd.process import events as e
from xmigd.supervisor import node_messages as n
from xmigd.supervisor.following import Following
from xmigd.supervisor.standby_memory import StandbyMemory

STANDBYS = {ONE: 1, OTHER: 2}


class Follower:
    """Plays the daemon of b, with two ranks: each round that a begins is taken."""

    def __init__(self, network: FakeNetwork, bound: int = GIB) -> None:
        self.network = network
        self.bound = bound
        self.heard: list[dict[str, Any]] = []
        self.rounds = 0
        self.leader = Node(network, "a")
        self.leader.scopes.settled()
        self.start()

    def start(self) -> None:
        self.links = Node(self.network, "b").links
        (self.users,) = self.links.all_users()
        self.users.received = self._received  # type: ignore[method-assign]
        self.network.connect("a", "b")
        self.links.send("a", here(ONE, OTHER) | {"standby_bytes": self.bound})
        for rank, process in enumerate(STANDBYS):
            self.links.send("a", joined(process, rank))

    def stand(self, process: str, **changed: object) -> dict[str, Any]:
        return stand(process, **({"standby": STANDBYS[process]} | changed))

    def report(self, process: str, server: int, **message: object) -> None:
        self.links.send("a", sent("reported", stand=self.stand(process), server=server, message=message))

    def _received(self, peer: str, body: dict[str, Any]) -> None:
        self.heard.append(body)
        if body["kind"] != "send":
            return
        process, message = body["process"], json.loads(body["text"])
        number = message["round"]
        match message["type"]:
            case "group_stop":
                self.report(process, 0, type="group_stopped", round=number, counts={}, behind=None)
            case "group_hold":
                self.report(process, 0, type="group_held", round=number)
            case "group_take":
                self.links.send("a", sent("committed", stand=self.stand(process), round=number))
                self.rounds += 1

    async def round(self) -> None:
        """All have its snapshot."""
        wanted = self.rounds + 2
        while self.rounds < wanted:
            self.report(ONE, 0, type="group_wanted", reason="it is due")
            await asyncio.sleep(0.01)
            self.network.deliver()
        self.network.deliver()

    def taken(self, kind: str) -> list[dict[str, Any]]:
        """What came of it since the last time."""
        found = [one for one in self.heard if one["kind"] == kind]
        self.heard = [one for one in self.heard if one["kind"] != kind]
        return found

    def prepared(self, process: str, attempt: int, why: str = "") -> None:
        number = STANDBYS[process]
        self.report(process, number, type="communicator_prepared", attempt=attempt, device_bytes=64, why=why)

    async def made(self) -> int:
        """By both. Returns the attempt."""
        await self.round()
        requests = self.taken("prepare_communicator")
        assert [(one["process"], one["server"], one["name"]) for one in requests] == [
            (name, number, NAME) for name, number in STANDBYS.items()
        ]
        attempt = int(requests[0]["attempt"])
        assert [one["attempt"] for one in requests] == [attempt, attempt]
        for process in STANDBYS:
            self.prepared(process, attempt)
        self.network.deliver()
        noted = self.taken("note_made")
        assert [(one["process"], one["communicators"], one["device_bytes"]) for one in noted] == [
            (name, 1, 64) for name in STANDBYS
        ]
        return attempt

    def go_on(self) -> dict[str, list[int]]:
        """The servers of both are lost. By process, what a recovery uses."""
        self.taken("tell")
        for process, standby in STANDBYS.items():
            lost = self.stand(process, state="recovering", active=standby, standby=None)
            for what in ("broken", "awaits"):
                self.links.send("a", sent("changed", stand=lost, what=what, why="killed"))
        self.network.deliver()
        events = [one for one in self.taken("tell") if one["event"] == "GroupGo"]
        return {one["process"]: one["fields"]["communicators"] for one in events}


def opened(test: Any) -> Any:
    """Once the one who leads begins rounds."""

    def run(monkeypatch: Any) -> None:
        monkeypatch.setattr("xmigd.supervisor.group.SETTLE", 0)
        asyncio.run(asyncio.wait_for(test(), 20))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@opened
async def test_a_recovery_uses_what_both_have_made() -> None:
    b = Follower(FakeNetwork("a", "b"))
    attempt = await b.made()
    assert b.go_on() == {ONE: [attempt], OTHER: [attempt]}


@opened
async def test_what_one_has_not_made_is_not_used() -> None:
    """It failed, or has not come to its end."""
    b = Follower(FakeNetwork("a", "b"))
    await b.round()
    attempt = b.taken("prepare_communicator")[0]["attempt"]
    b.prepared(ONE, attempt)
    b.network.deliver()
    assert b.taken("note_made") == []
    b.prepared(OTHER, attempt, "no room")
    b.network.deliver()
    assert [(one["process"], one["attempt"]) for one in b.taken("forget_communicator")] == [(ONE, attempt)]
    assert b.go_on() == {ONE: [], OTHER: []}


@opened
async def test_the_bound_is_that_of_the_ranks_node() -> None:
    b = Follower(FakeNetwork("a", "b"), bound=0)
    await b.round()
    assert b.taken("prepare_communicator") == []


@opened
async def test_what_was_given_up_is_not_used() -> None:
    """Of another standby on that device, too, and none is made there for a while."""
    b = Follower(FakeNetwork("a", "b"))
    attempt = await b.made()
    b.links.send("a", sent("gave_up", servers=[[ONE, 0], [ONE, 1]]))
    b.network.deliver()
    assert (OTHER, attempt) in [(one["process"], one["attempt"]) for one in b.taken("forget_communicator")]
    await b.round()
    assert b.taken("prepare_communicator") == []
    assert b.go_on() == {ONE: [], OTHER: []}


@opened
async def test_nothing_is_used_after_the_connection_was_lost() -> None:
    """It is forgotten, and made anew."""
    b = Follower(FakeNetwork("a", "b"))
    attempt = await b.made()
    b.network.disconnect("a", "b")
    b.network.connect("a", "b")
    b.network.deliver()
    assert {one["attempt"] for one in b.taken("forget_communicator")} == {attempt}
    assert {one["communicators"] for one in b.taken("note_made")} == {0}
    again = await b.made()
    assert again > attempt
    assert b.go_on() == {ONE: [again], OTHER: [again]}


@opened
async def test_nothing_is_used_of_an_earlier_daemon() -> None:
    b = Follower(FakeNetwork("a", "b"))
    await b.made()
    b.network.restart("b")
    b.start()
    b.network.deliver()
    assert b.go_on() == {ONE: [], OTHER: []}


@opened
async def test_a_program_ends_while_the_daemon_leaves() -> None:
    """All is closed already."""
    network = FakeNetwork("a", "b")
    b = Follower(network)
    network.deliver()
    b.leader.scopes.close()
    for process in STANDBYS:
        b.links.send("a", sent("finished", process=process))
    network.deliver()


@in_a_loop
def test_a_node_that_follows() -> None:
    """It has its standbys do what the other one wants, within its own bounds, and gives its memory to its programs
    at once."""
    network = FakeNetwork("a", "b")
    heard: list[dict[str, Any]] = []
    network["a"].register("ranks", Node(FakeNetwork("a"), "a").scopes)
    network["a"].all_users()[0].received = lambda peer, body: heard.append(body)  # type: ignore[method-assign]
    done: list[tuple[str, int]] = []
    counted: list[list[int]] = []
    events: list[object] = []
    given: list[dict[str, Any]] = []
    standby: Any = SimpleNamespace(number=1, device="cpu:0", send=lambda message: given.append(json.loads(message)))
    process: Any = SimpleNamespace(
        row=SimpleNamespace(id=ONE, uid=0, pid=7, start_time=1, device="cpu:0"), state="running", active=1,
        job=SimpleNamespace(name="job", nodes=NODES), standing=True, warm_standby=1, rounds=lambda: (0, 0),
        suspended_at=lambda: 0, leaving="", resumes=False, target=None, renewed=lambda: 0,
        machine=SimpleNamespace(awaits_group=True, move=None), forsaken=lambda: False, grouped=True, tell=events.append,
        server=lambda number: standby,
        server_devices=lambda: {1: "cpu:0"}, note_made=lambda *_: None, count_standby_bytes=counted.append,
        prepare_communicator=lambda number, attempt, name: done.append(("prepare", attempt)),
        forget_communicator=lambda number, attempt: done.append(("forget", attempt)),
    )  # fmt: skip
    memory = StandbyMemory(GIB, {ONE: process})
    following = Following(NODES, network["b"], {ONE: process}, lambda nodes, members: None, memory, lambda _: None, 60)
    network.connect()
    communicator: Any = m.parse(json.dumps(joined(ONE, 0)["message"]).encode())
    following.reported(process, standby, communicator)

    def receive(kind: str, **fields: object) -> None:
        following.received(n.parse(sent(kind, process=ONE, **fields)))

    def reports(attempt: int, size: int) -> None:
        fields = {"type": "communicator_prepared", "attempt": attempt, "device_bytes": size, "why": ""}
        following.reported(process, standby, m.CommunicatorPrepared.model_validate(fields))
        network.deliver()

    def short(size: int) -> int:
        memory.short(process, standby, m.MemoryShort(type="memory_short", number=5, ordinal=0, bytes=size))
        return int(given.pop()["bytes"])

    receive("prepare_communicator", server=0, attempt=6, name=NAME)
    network.deliver()
    assert heard.pop()["message"]["why"].startswith("the server is no warm standby any more")
    receive("prepare_communicator", server=1, attempt=7, name=NAME)
    reports(7, GIB)
    assert heard.pop()["message"]["why"] == ""
    receive("note_made", server=1, communicators=1, device_bytes=9 * GIB)
    assert counted[-1] == [GIB], "what its own server has taken, at most"
    receive("prepare_communicator", server=1, attempt=8, name=NAME)
    network.deliver()
    assert "standby_communicators_mib" in heard.pop()["message"]["why"]
    assert done == [("prepare", 7)]
    assert short(2 * GIB) == 0
    assert done == [("prepare", 7)], "it would not be enough"
    network.disconnect("a", "b")
    assert short(GIB) == GIB, "however far the other one is"
    assert counted[-1] == [0]
    assert done == [("prepare", 7), ("forget", 7)]
    network.connect("a", "b")
    network.deliver()
    assert (heard[-1]["kind"], heard[-1]["servers"]) == ("gave_up", [[ONE, 1]])
    go_on = {"decided": 5, "gone": [], "communicators": [9]}
    receive("prepare_communicator", server=1, attempt=9, name=NAME)
    reports(9, 64)
    receive("tell", event="GroupGo", fields=go_on)
    assert len(events) == 1
    receive("tell", event="GroupGo", fields=go_on)
    network.deliver()
    assert len(events) == 1, "its server, which has not what the others use, does not get it"
    assert [one["what"] for one in heard[-2:]] == ["broken", "awaits"]
    following.session()
    assert done[2:] == [("prepare", 9)], "its server has it now, and knows by itself what it does not use"
    receive("prepare_communicator", server=1, attempt=10, name=NAME)
    following.session()
    assert done[3:] == [("prepare", 10), ("forget", 10)]
    receive("prepare_communicator", server=1, attempt=11, name=NAME)
    reports(11, 64)
    receive("note_made", server=1, communicators=1, device_bytes=64)
    assert counted[-1] == [64]
    following.settled()
    for resumes in (True, False):  # being resumed, its memory only has no holder
        process.resumes = resumes
        following.changed(process, e.SaveState("suspended", None, ""))
        following.received(n.parse(sent("who_is_here")))
        network.deliver()
        (present,) = heard[-1]["processes"]
        assert (len(present["communicators"]), counted[-1]) == ((1, [64]) if resumes else (0, [0]))
