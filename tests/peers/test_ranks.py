"""What another node's daemon reports of ranks: what does not fit is left out, and nothing else is disturbed."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.peers.fake import FakeNetwork
from xmigd.errors import Invalid, ProtocolError
from xmigd.groups.meetings import Answer
from xmigd.jobs.membership import new_job
from xmigd.process import events as e
from xmigd.ranks.history import History
from xmigd.supervisor import node_messages as n
from xmigd.supervisor.group import Ranks
from xmigd.supervisor.joining import Join
from xmigd.supervisor.member import Member
from xmigd.supervisor.scopes import Scopes
from xmigd.supervisor.standby_memory import StandbyMemory
from xmigd.supervisor.unique import UniqueCopies

NODES = "a,b"
ONE, OTHER = "1" * 32, "2" * 32
NAME = "c" * 64
GIB = 1 << 30


class Log:
    def line(self, *_: object, **__: object) -> None: ...


def make_ranks(
    members: dict[str, Member], may_begin: Callable[[], bool] = lambda: True,
    hear_all: Callable[[Callable[[], None]], None] = lambda then: then(),
    copy_unique: Callable[[Sequence[Member]], None] = lambda members: None,
) -> Ranks:  # fmt: skip
    log: Any = Log()
    memory = StandbyMemory(GIB, {})
    return Ranks(
        members, log, History(), memory, copy_unique, 1, 1000, 0, lambda *_: None, "report", may_begin, hear_all,
        leads=True,
    )  # fmt: skip


class Node:
    """Without processes of its own."""

    def __init__(
        self, network: FakeNetwork, name: str, address: str = "10.0.0.1", patience: float = 60
    ) -> None:  # fmt: skip
        self.links = network[name]
        self.joins: list[Join] = []
        self.scopes = Scopes(
            local=make_ranks({}), links=self.links, address=address, processes={}, jobs={}, make_ranks=make_ranks,
            unique=UniqueCopies("b", {}, most_bytes=0, rate=0), standby_memory=StandbyMemory(GIB, {}),
            join_here=self.joins.append, patience=patience,
        )  # fmt: skip
        self.links.register("ranks", self.scopes)


def in_a_loop(test: Callable[[], None]) -> Callable[[], None]:
    """As in a daemon."""

    @functools.wraps(test)
    def run() -> None:
        async def main() -> None:
            test()

        asyncio.run(main())

    return run


def stand(process: str = ONE, **changed: object) -> dict[str, Any]:
    return {
        "process": process, "uid": 0, "job": "job", "pid": 7, "start_time": 1, "device": "cpu:0", "state": "running",
        "active": 0, "standby": None, "target": None, "standing": True, "rounds": [0, 0],
        "forsaken": False, "renewed": 0,
        "suspended_at": 0, "leaving": "", "resumes": False,
    } | changed  # fmt: skip


def body(kind: str, **fields: object) -> dict[str, Any]:
    return {"topic": "ranks", "nodes": NODES, "kind": kind} | fields


def joined(process: str, rank: int) -> dict[str, Any]:
    message = {"type": "communicator", "name": NAME, "rank": rank, "ranks": 2, "state": "joined"}
    return body("reported", stand=stand(process), server=0, message=message)


def here(*processes: str) -> dict[str, Any]:
    rest = {"orphan": False, "awaits": False, "held": 0, "lost": 0, "communicators": []}
    return body("here", standby_bytes=GIB, processes=[{"stand": stand(one)} | rest for one in processes])


@pytest.mark.parametrize(
    "wrong",
    [
        {}, body("no such kind"), body("here"), body("here", processes=[]),
        body("here", standby_bytes=0, processes=[{}]),
        body("here", standby_bytes=0, processes=[], more=1), body("here", standby_bytes=-1, processes=[]),
        body("gave_up", servers=[["x", 1]]), body("gave_up", servers=[[ONE, 1]] * (n.MOST_PROCESSES + 1)),
        body("prepare_communicator", process=ONE, server=1, attempt=1, name="x"),
        body("note_made", process=ONE, server=1, communicators=-1, device_bytes=0),
        body("reported", stand=stand("x"), server=0, message={}), body("committed", stand=stand(), round=0),
        body("reported", stand=stand(rounds=[0, 1 << 63]), server=0, message={}),
        body("tell", process=ONE, event="ClientExited", fields={}), body("finished", process="../x"),
        body("send", process=ONE, server=0, text=1), body("look", process="x"),
        body("name_replicas", process=ONE, server=0, ranks=[["../b", ONE]]),
    ],
)  # fmt: skip
def test_bodies_that_are_none(wrong: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        n.parse(wrong)


def test_messages_come_through_as_they_were() -> None:
    event = e.GroupGo(t=5, decided=7, gone=(NAME,), communicators=(1, 2))
    read = n.parse(n.tell(NODES, ONE, event).model_dump(mode="json"))
    assert isinstance(read, n.Tell)
    assert read.at(9) == e.GroupGo(t=9, decided=7, gone=(NAME,), communicators=(1, 2))
    with pytest.raises(ProtocolError, match="decided"):
        n.Tell(nodes=NODES, process=ONE, event="GroupGo", fields={"decided": "many"}).at(1)
    met = n.Met(nodes=NODES, process=ONE, server=1, meeting=NAME, rank=1, offers=("x", "y"), answer="0f")
    again = n.parse(met.model_dump(mode="json"))
    assert isinstance(again, n.Met)
    assert again.to_rank() == Answer(ONE, 1, NAME, 1, ("x", "y"), answer="0f")


@pytest.mark.parametrize("text", ["{", "[]", '{"type": "assign"}', '{"type": "group_take", "round": -1}'])
def test_only_messages_of_rounds_reach_a_server(text: str) -> None:
    with pytest.raises(ProtocolError):
        n.round_of(text)
    assert n.round_of('{"type": "communicator_lost"}') is None


@in_a_loop
def test_a_peer_reports_its_own_processes_only() -> None:
    network = FakeNetwork("a", "b", "c")
    a, b, c = (Node(network, name) for name in "abc")
    for one in (a, b, c):
        one.scopes.settled()
    network.connect()
    b.scopes.received = lambda peer, body: None  # type: ignore[method-assign]
    for sender, nodes, process in ((b, "a,b", ONE), (c, "a,c", OTHER)):
        sender.links.send("a", here(process) | {"nodes": nodes})
    b.links.send("a", joined(ONE, 0))
    with capture_logs() as logs:
        network.deliver()
        assert not [one for one in logs if one["log_level"] == "warning"]
        c.links.send("a", joined(ONE, 0))  # it is none of these nodes
        c.links.send("a", body("finished", process=ONE) | {"nodes": "a,c"})  # not known among these
        b.links.send("a", body("tell", process=ONE, event="GroupLost", fields={"reason": "x"}))  # it does not lead
        b.links.send("a", joined(ONE, 0) | {"nodes": "b,a"})  # of which it does lead
        network.deliver()
    reasons = [one["why"] for one in logs if one["event"] == "a message of a peer is left out"]
    assert len(reasons) == 3, logs


@in_a_loop
def test_two_ranks_of_another_node_are_a_group() -> None:
    """Who leads has none itself: b's daemon is sent what becomes of them."""
    network = FakeNetwork("a", "b", "c")
    a, b = Node(network, "a"), Node(network, "b")
    heard: list[dict[str, Any]] = []
    b.scopes.received = lambda peer, body: heard.append(body)  # type: ignore[method-assign]
    a.scopes.settled()
    network.connect("a", "b")
    b.links.send("a", here(ONE, OTHER))
    for rank, process in enumerate((ONE, OTHER)):
        b.links.send("a", joined(process, rank))
    network.deliver()
    tied = [one["process"] for one in heard if one["kind"] == "tell" and one["event"] == "Grouped"]
    assert tied == [ONE, OTHER]
    b.links.send("a", body("changed", stand=stand(ONE, state="recovering"), what="broken", why="killed"))
    network.deliver()
    assert (heard[-1]["process"], heard[-1]["event"]) == (OTHER, "GroupLost")


@pytest.mark.parametrize("again", [False, True])
def test_who_has_lost_memory_is_named_who_stands(again: bool) -> None:
    """Not before they have restored the round, which nobody reports; also if an earlier daemon was to name them."""
    network = FakeNetwork("a", "b", "c")
    heard: list[dict[str, Any]] = []

    def sent(kind: str) -> list[dict[str, Any]]:
        return [one for one in heard if one["kind"] == kind]

    async def until(kind: str, count: int = 1) -> None:
        while len(sent(kind)) < count:
            await asyncio.sleep(0.001)
            network.deliver()

    async def main() -> None:
        a, b = Node(network, "a"), Node(network, "b")
        b.scopes.received = lambda peer, body: heard.append(body)  # type: ignore[method-assign]
        a.scopes.settled()
        network.connect("a", "b")
        present = here(ONE, OTHER)
        for rank, one in enumerate(present["processes"]):
            one["communicators"] = [joined(one["stand"]["process"], rank)["message"]]
            one["stand"] |= {"state": "recovering", "standing": False}
        present["processes"][0]["lost"] = 5 if again else 0
        b.links.send("a", present)
        wanted = {"type": "replicas_wanted", "bytes": 5}
        if not again:
            b.links.send("a", body("reported", stand=stand(ONE, standing=False), server=0, message=wanted))
        await until("look", 2)
        assert {one["process"] for one in sent("look")} == {OTHER}
        b.links.send("a", body("looked", stand=stand(OTHER, rounds=[7, 6])))
        await until("look", len(sent("look")) + 2)
        assert not sent("name_replicas")
        b.links.send("a", body("looked", stand=stand(OTHER, rounds=[0, 7])))
        await until("name_replicas")
        (named,) = sent("name_replicas")
        assert (named["process"], named["server"], named["ranks"]) == (ONE, 0, [["b", OTHER]])

    asyncio.run(asyncio.wait_for(main(), 20))


@in_a_loop
def test_who_is_here_is_looked_at_once_a_session() -> None:
    """A daemon that was started sends it by itself, and once more when it is requested: who waited in the first may
    have gone on since, and is not to be lost again."""
    network = FakeNetwork("a", "b", "c")
    a, b = Node(network, "a"), Node(network, "b")
    heard: list[dict[str, Any]] = []
    b.scopes.received = lambda peer, body: heard.append(body)  # type: ignore[method-assign]
    a.scopes.settled()
    network.connect("a", "b")
    present = here(ONE, OTHER)
    for rank, one in enumerate(present["processes"]):
        one["communicators"] = [joined(one["stand"]["process"], rank)["message"]]
    b.links.send("a", present)
    network.deliver()
    heard.clear()
    present["processes"][0]["awaits"] = True
    b.links.send("a", present)
    network.deliver()
    assert not [one for one in heard if one["kind"] == "tell"], heard


@in_a_loop
def test_lists_of_nodes_without_processes_are_forgotten() -> None:
    network = FakeNetwork("a", "b", "c")
    a, b = Node(network, "a"), Node(network, "b")
    network.connect("a", "b")
    b.scopes.settled()
    b.links.send("a", here())
    network.deliver()
    assert a.scopes.count == 0
    b.links.send("a", joined(ONE, 0))  # before a knows who is here: it will ask, and b answers that nobody is
    network.deliver()
    assert (a.scopes.count, b.scopes.count) == (1, 0)
    a.scopes.settled()
    assert a.scopes.count == 0
    b.scopes.received = lambda peer, body: None  # type: ignore[method-assign]
    b.links.send("a", here(ONE))
    network.deliver()
    assert a.scopes.count == 1
    b.links.send("a", body("finished", process=ONE))
    network.deliver()
    assert a.scopes.count == 0


@in_a_loop
def test_lists_of_nodes() -> None:
    network = FakeNetwork("a", "b", "c")
    a = Node(network, "a")
    a.scopes.check("b,a,c")
    for nodes, why in (("b,c", "is none of"), ("a,b,a", "named twice"), ("a,d", "no peer 'd'")):
        with pytest.raises(Invalid, match=why):
            a.scopes.check(nodes)
    with pytest.raises(Invalid, match="no address"):
        Node(network, "b", "0.0.0.0").scopes.check("a,b")
    assert new_job(name="", command="", uid=0, device=None, registered=True, nodes="a,b")[0].nodes == "a,b"


def test_nobody_is_given_up_before_the_node_of_today_was_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collective fails while the daemon of its other rank is not there: that one's loss may be what it failed of."""
    monkeypatch.setattr("xmigd.groups.failures.LOOK_AGAIN", 1)
    network = FakeNetwork("a", "b", "c")
    heard: list[dict[str, Any]] = []

    def again() -> Node:
        b = Node(network, "b")
        b.scopes.received = lambda peer, body: heard.append(body)  # type: ignore[method-assign]
        return b

    def sent(kind: str) -> list[dict[str, Any]]:
        return [one for one in heard if one["kind"] == kind]

    async def until(kind: str) -> None:
        while not sent(kind):
            await asyncio.sleep(0)
            network.deliver()

    async def main() -> None:
        a, b = Node(network, "a"), again()
        a.scopes.settled()
        network.connect("a", "b")
        b.links.send("a", here(ONE, OTHER))
        for rank, process in enumerate((ONE, OTHER)):
            b.links.send("a", joined(process, rank))
        failure = {"type": "communicator_failed", "name": NAME, "rank": 0, "why": "rank 1 of 2 is gone"}
        b.links.send("a", body("reported", stand=stand(ONE), server=0, message=failure))
        network.deliver()
        await until("catch_up")
        network.restart("b")
        b = again()
        network.connect("a", "b")
        heard.clear()
        network.deliver()
        assert [one["kind"] for one in heard] == ["who_is_here"]
        b.links.send("a", here(ONE, OTHER))
        await until("catch_up")
        assert not sent("send"), "ONE is not to be given up yet"
        b.links.send("a", body("caught_up", number=sent("catch_up")[0]["number"] + 1))  # that nobody waits for
        b.links.send("a", body("caught_up", number=sent("catch_up")[0]["number"]))
        await until("send")
        assert [json.loads(one["text"])["type"] for one in sent("send")] == ["communicator_lost"]

    asyncio.run(asyncio.wait_for(main(), 20))


@in_a_loop
def test_a_node_is_not_caught_up_before_it_knows_who_is_here() -> None:
    network = FakeNetwork("a", "b")
    b, answers = Node(network, "b"), list[str]()
    network["a"].register("ranks", Node(FakeNetwork("a"), "a").scopes)
    a = network["a"].all_users()[0]
    a.received = lambda peer, body: answers.append(body["kind"])  # type: ignore[method-assign]
    network.connect()
    network["a"].send("b", body("catch_up", number=4))
    network.deliver()
    assert answers == []
    b.scopes.settled()
    network["a"].send("b", body("catch_up", number=4))
    network.deliver()
    assert answers == ["caught_up"]
