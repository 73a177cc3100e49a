"""Ranks of two nodes that a third one leads: who is requested to join a suspension or a resumption, and what becomes of
a group of which only a part is suspended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from tests.peers.fake import FakeNetwork
from tests.peers.test_ranks import NAME, ONE, OTHER, Log, Node, stand
from xmigd.ranks.history import History
from xmigd.supervisor import group
from xmigd.supervisor.standby_memory import StandbyMemory

NODES = "a,b,c"
ROUND = 1_000
ASLEEP = {"state": "suspended", "active": None, "suspended_at": ROUND, "rounds": [0, ROUND]}
WAITS = {"suspended_at": ROUND, "rounds": [0, ROUND], "leaving": "waits"}
LEAVES = WAITS | {"leaving": "leaves"}
RUNS = {"rounds": [0, ROUND]}


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is known is in the first messages."""
    monkeypatch.setattr(group, "SETTLE", 0)


def body(kind: str, **fields: object) -> dict[str, Any]:
    return {"topic": "ranks", "nodes": NODES, "kind": kind} | fields


class Three:
    """a leads; ONE is b's, OTHER c's."""

    def __init__(
        self, one: Mapping[str, object], other: Mapping[str, object], *, settled: bool = True, patience: float = 60
    ) -> None:  # fmt: skip
        self.network = FakeNetwork("a", "b", "c")
        self.a, self.b, self.c = (Node(self.network, name, patience=patience) for name in "abc")
        self.sent: list[tuple[str, dict[str, Any]]] = []
        for node, name in ((self.b, "b"), (self.c, "c")):
            node.scopes.received = (  # type: ignore[method-assign]
                lambda _, message, n=name: self.sent.append((n, message))  # type: ignore[misc]
            )
        if settled:
            self.a.scopes.settled()
        self.network.connect()
        for node, process, rank, how in ((self.b, ONE, 0, one), (self.c, OTHER, 1, other)):
            message = {"type": "communicator", "name": NAME, "rank": rank, "ranks": 2, "state": "joined"}
            present = {"stand": stand(process, **how), "orphan": False, "awaits": False, "held": 0, "lost": 0}
            known = [] if how.get("state") == "suspended" else [message]
            node.links.send("a", body("here", standby_bytes=0, processes=[present | {"communicators": known}]))

    async def rests(self) -> None:
        for _ in range(5):
            self.network.deliver()
            await asyncio.sleep(0.001)

    def events(self, process: str) -> list[str]:
        return [one["event"] for _, one in self.sent if one["kind"] == "tell" and one["process"] == process]

    def joins(self) -> list[tuple[str, str, list[str]]]:
        return [(node, one["what"], list(one["processes"])) for node, one in self.sent if one["kind"] == "join"]

    def changes(self, process: str, what: str, how: Mapping[str, object]) -> None:
        node = self.b if process == ONE else self.c
        node.links.send("a", body("changed", stand=stand(process, **how), what=what, why=""))


def runs(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 20))


@pytest.mark.parametrize("what", ["suspend", "resume"])
def test_all_others_are_requested_to_join(what: str) -> None:
    async def main() -> None:
        how = RUNS if what == "suspend" else ASLEEP
        three = Three(how, how)
        await three.rests()
        begins = body("begins", what=what, to="host", processes=[ONE])
        three.b.links.send("a", begins)
        await three.rests()
        assert three.joins() == [("c", what, [OTHER])]
        if what == "resume":  # one that is under way already is meant
            three.c.links.send("a", body("begins", what=what, to="host", processes=[OTHER]))
            await three.rests()
            assert len(three.joins()) == 1
        three.changes(OTHER, "not_suspended" if what == "suspend" else "not_resumed", how)
        await three.rests()
        assert ("GroupRefuses" in three.events(ONE)) == (what == "resume")  # the suspension has no member yet

    runs(main)


@pytest.mark.parametrize("what", ["suspend", "resume"])
def test_a_node_is_not_in_reach(what: str) -> None:
    async def main() -> None:
        how = RUNS if what == "suspend" else ASLEEP
        three = Three(how, how)
        await three.rests()
        three.network.disconnect("a", "c")
        three.b.links.send("a", body("begins", what=what, to="host", processes=[ONE]))
        await three.rests()
        assert three.joins() == []
        assert three.events(ONE)[-1] == "GroupRefuses"

    runs(main)


def test_nothing_begins_before_all_are_known() -> None:
    """A rank of the node that leads, which its new daemon has not found yet, would stay behind."""

    async def main() -> None:
        three = Three(ASLEEP, ASLEEP, settled=False)
        await three.rests()
        begins = body("begins", what="resume", to="host", processes=[ONE])
        three.b.links.send("a", begins)
        await three.rests()
        assert (three.joins(), three.events(ONE)[-1]) == ([], "GroupRefuses")
        three.a.scopes.settled()
        three.b.links.send("a", begins)
        await three.rests()
        assert three.joins() == [("c", "resume", [OTHER])]

    runs(main)


def test_who_has_its_memory_does_not_wait_for_ever() -> None:
    """Its node, which is out of reach for too long, cannot know whether it was let in."""

    async def main() -> None:
        three = Three(ASLEEP, ASLEEP, patience=0.01)
        await three.rests()
        three.b.links.send("a", body("begins", what="resume", to="host", processes=[ONE]))
        await three.rests()
        three.changes(ONE, "restored", ASLEEP | {"resumes": True})
        await three.rests()
        three.network.disconnect("a", "b")
        while "GroupRefuses" not in three.events(OTHER):
            await three.rests()
        three.network.connect("a", "b")
        await three.rests()
        assert three.events(ONE) == ["GroupRefuses"]

    runs(main)


def test_who_has_its_memory_and_cannot_join_does_not_wait_for_ever() -> None:
    """Its daemon was started again, finds it on its way, and does not begin it once more."""

    async def main() -> None:
        three = Three(ASLEEP, ASLEEP)
        await three.rests()
        three.b.links.send("a", body("begins", what="resume", to="host", processes=[ONE]))
        await three.rests()
        three.changes(OTHER, "restored", ASLEEP | {"resumes": True})
        three.changes(OTHER, "cannot_resume", ASLEEP | {"resumes": True})
        await three.rests()
        assert (three.events(ONE), three.events(OTHER)) == (["GroupRefuses"], ["GroupRefuses"])

    runs(main)


@pytest.mark.parametrize(("what", "how"), [("suspend", "not_suspended"), ("resume", "cannot_resume")])
def test_what_a_node_cannot_is_reported(what: Any, how: str) -> None:
    """Of a process that it knows as one of these nodes."""

    async def main() -> None:
        three, heard = Three(ASLEEP, ASLEEP), list[Any]()
        three.a.scopes.received = lambda _, message: heard.append(message)  # type: ignore[method-assign,assignment]
        process: Any = SimpleNamespace(
            row=SimpleNamespace(id=ONE, uid=0, pid=7, start_time=1, device="cpu:0"), state="suspended", active=None,
            job=SimpleNamespace(name="job", nodes=NODES), warm_standby=None, target=None, standing=False, leaving="",
            resumes=False, rounds=lambda: (0, ROUND), forsaken=lambda: False, suspended_at=lambda: ROUND,
            renewed=lambda: 0,
        )  # fmt: skip
        three.b.scopes.made_again([process])
        three.b.scopes.cannot_join(what, process, "no room")
        await three.rests()
        assert [(one["kind"], one["what"], one["why"]) for one in heard if one["kind"] == "changed"] == [
            ("changed", how, "no room")
        ]

    runs(main)


def test_none_is_resumed_while_another_is_taken_back() -> None:
    """What it reports at the end of that would end the next one, too."""

    async def main() -> None:
        three = Three(ASLEEP, ASLEEP)
        await three.rests()
        begins = body("begins", what="resume", to="host", processes=[ONE])
        three.b.links.send("a", begins)
        await three.rests()
        three.changes(OTHER, "not_resumed", ASLEEP | {"resumes": True})
        await three.rests()
        assert (three.joins(), three.events(ONE)) == ([("c", "resume", [OTHER])], ["GroupRefuses"])
        three.b.links.send("a", begins)
        await three.rests()
        assert (len(three.joins()), three.events(ONE)) == (1, ["GroupRefuses"] * 2)
        three.changes(OTHER, "not_resumed", ASLEEP)
        await three.rests()
        three.b.links.send("a", begins)
        await three.rests()
        assert (len(three.joins()), three.events(ONE)) == (2, ["GroupRefuses"] * 2)

    runs(main)


def test_who_is_not_that_nodes_begins_nothing() -> None:
    async def main() -> None:
        three = Three(RUNS, RUNS)
        await three.rests()
        for processes in ([OTHER], ["3" * 32]):
            three.b.links.send("a", body("begins", what="resume", to="host", processes=processes))
            await three.rests()
        assert three.joins() == []
        assert "GroupRefuses" not in three.events(OTHER)

    runs(main)


def test_one_is_suspended_and_the_other_runs() -> None:
    """Both are recovered."""

    async def main() -> None:
        three = Three(ASLEEP, RUNS)
        await three.rests()
        assert "GroupLost" in three.events(OTHER)
        assert three.events(ONE)[-1] == "GroupWoken"

    runs(main)


def test_one_gives_its_device_back_and_the_other_runs() -> None:
    """From now on nothing happens without it, and it is recovered when it has left its device."""

    async def main() -> None:
        three = Three(LEAVES, RUNS)
        await three.rests()
        assert "GroupLost" in three.events(OTHER)
        assert "GroupWoken" not in three.events(ONE)
        three.changes(ONE, "asleep", ASLEEP)
        await three.rests()
        assert three.events(ONE)[-1] == "GroupWoken"

    runs(main)


@pytest.mark.parametrize("other", ["asleep", "leaves", "runs", "waits"])
def test_one_is_in_doubt(other: str) -> None:
    """If the other is suspended, that was decided. If it runs, nothing was, or all are recovered."""

    async def main() -> None:
        others: dict[str, Mapping[str, object]] = {"asleep": ASLEEP, "leaves": LEAVES, "runs": RUNS, "waits": WAITS}
        three = Three(WAITS, others[other])
        await three.rests()
        decided = "GroupSuspended" if other in ("asleep", "leaves") else "GroupRefuses"
        assert [one for one in three.events(ONE) if one in ("GroupSuspended", "GroupRefuses")] == [decided]
        assert "GroupWoken" not in three.events(OTHER)

    runs(main)


def test_one_was_let_in_and_the_other_not() -> None:
    """It reports so when the other runs already."""

    async def main() -> None:
        three = Three(ASLEEP, ASLEEP)
        await three.rests()
        three.b.links.send("a", body("begins", what="resume", to="host", processes=[ONE]))
        await three.rests()
        for process in (ONE, OTHER):
            three.changes(process, "restored", ASLEEP | {"resumes": True})
        await three.rests()
        assert three.events(ONE)[-1] == three.events(OTHER)[-1] == "GroupResumes"
        message = {"type": "communicator", "name": NAME, "rank": 0, "ranks": 2, "state": "joined"}
        three.b.links.send("a", body("reported", stand=stand(ONE, **RUNS), server=0, message=message))
        three.changes(ONE, "running", RUNS)
        await three.rests()
        assert "GroupLost" not in three.events(ONE)
        three.changes(OTHER, "not_resumed", ASLEEP)
        await three.rests()
        assert "GroupLost" in three.events(ONE)
        assert three.events(OTHER)[-1] == "GroupWoken"

    runs(main)


def test_jobs_of_several_nodes_are_left_to_those_who_lead_them() -> None:
    """A job of one node is suspended while a rank of another job is in doubt."""

    async def main() -> None:
        heard: list[Any] = []
        process: Any = SimpleNamespace(
            row=SimpleNamespace(id=ONE, uid=0), job=SimpleNamespace(id="job", nodes=NODES), state="running",
            leaving="waits", resumes=False, grouped=True, active=None, rounds=lambda: (0, ROUND),
            suspended_at=lambda: ROUND, tell=heard.append, server_devices=dict,
        )  # fmt: skip
        log: Any = Log()
        for leads in (False, True):
            ranks = group.Ranks(
                {ONE: process}, log, History(), StandbyMemory(0, {}), lambda _: None, 1, 1, 0, lambda *_: None,
                "report", leads=leads,
            )  # fmt: skip
            ranks.settled()
            await asyncio.sleep(0.01)
            ranks.look_who_is_left_behind()
            assert bool(heard) == leads
            ranks.close()

    runs(main)
