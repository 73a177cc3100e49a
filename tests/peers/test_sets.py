"""What other nodes request of checkpoints of several nodes: what is not theirs to request changes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import StaticPool

from tests.harness import needs_root
from tests.peers.fake import FakeNetwork
from tests.peers.test_ranks import NODES, ONE, OTHER, Node, body, here, in_a_loop, stand
from tests.ports import free_port
from xmigd.checkpoints import held, sets
from xmigd.checkpoints import set_messages as s
from xmigd.checkpoints.exchange import Exchange
from xmigd.checkpoints.manifest import Connection, host_and_port
from xmigd.checkpoints.part import InDoubt
from xmigd.checkpoints.restoring import RESTORE
from xmigd.checkpoints.sets import GOING, READY, Sets
from xmigd.database.models import Base, Checkpoint
from xmigd.errors import Conflict, NotFound, NotReady, ProtocolError, Unavailable
from xmigd.ipc import messages as m
from xmigd.ipc import pidfd as pidfds
from xmigd.supervisor import node_messages as n
from xmigd.supervisor.following import Following
from xmigd.supervisor.standby_memory import StandbyMemory

TCP_REPAIR = 19  # linux/tcp.h
HERE, PART, UNKNOWN = "a" * 32, "b" * 32, "c" * 32  # a checkpoint that is whole, a part of one that is not


class Checkpoints:
    """Of node b: those of a job on a and b."""

    def __init__(self) -> None:
        self.engine = create_engine("sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False})
        Base.metadata.create_all(self.engine)
        with Session(self.engine) as session:
            for id, whole in ((HERE, True), (PART, False)):
                session.add(
                    Checkpoint(
                        id=id, job_id=ONE, job_name="job", uid=0, command="", device="cpu:0", programs=1,
                        content_bytes=0, stored_bytes=0, manifest="", created_at=0, nodes=NODES, whole=whole,
                    )
                )  # fmt: skip
            session.commit()
        self.done: list[tuple[str, str]] = []

    @contextlib.contextmanager
    def session(self) -> Iterator[Session]:
        with Session(self.engine) as session:
            yield session

    def page(self, *, checkpoint: str) -> list[Any]:
        return [SimpleNamespace(nodes=NODES.split(","))] if checkpoint == HERE else []

    async def is_whole(self, checkpoint: str) -> None:
        self.done.append(("whole", checkpoint))

    async def forget_part(self, checkpoint: str) -> None:
        self.done.append(("forgotten", checkpoint))

    async def remove_here(self, checkpoint: str) -> None:
        self.done.append(("removed", checkpoint))

    async def removed_elsewhere(self, checkpoint: str, node: str) -> None:
        self.done.append((f"removed at {node}", checkpoint))

    async def check(self, checkpoint: str) -> None:
        """It is sound."""


class Operations:
    def __init__(self, **phases: str) -> None:
        self._phases = phases  # by operation
        self.rows: list[Any] = []

    def active(self) -> list[Any]:
        return self.rows

    def get(self, id: str) -> Any:
        if id not in self._phases:
            raise NotFound("there is none")
        return SimpleNamespace(kind=RESTORE, request={"nodes": ["b", "a"]}, phase=self._phases[id], state="running")


class Nodes:
    """b, whose peers are a and c. What it sends them is in `heard`."""

    def __init__(self, operations: Operations | None = None) -> None:
        self.network = FakeNetwork("a", "b", "c")
        self.checkpoints: Any = Checkpoints()
        supervisor: Any = SimpleNamespace(processes={})
        restoring: Any = SimpleNamespace()
        self.sets = Sets(
            checkpoints=self.checkpoints, restoring=restoring, supervisor=supervisor,  # type: ignore[arg-type]
            operations=operations or Operations(),  # type: ignore[arg-type]
            reader=self.checkpoints,  # type: ignore[arg-type]
            links=self.network["b"], allowed=lambda: ["a"], networks=SimpleNamespace(),  # type: ignore[arg-type]
        )  # fmt: skip
        self.network["b"].register(s.TOPIC, self.sets)
        self.heard: list[tuple[str, dict[str, Any]]] = []
        for name in "ac":
            listening: Any = SimpleNamespace(
                received=lambda peer, body, name=name: self.heard.append((name, body)), session=lambda peer: None,
                up=lambda peer: None, down=lambda peer, why: None,
            )  # fmt: skip
            self.network[name].register(s.TOPIC, listening)
        self.network.connect()

    async def send(self, peer: str, message: s.Message) -> list[tuple[str, dict[str, Any]]]:
        """What b sends then."""
        await self.idle()
        self.heard.clear()
        self.network[peer].send("b", message.model_dump(mode="json"))
        await self.idle()
        return list(self.heard)

    async def idle(self) -> None:
        self.network.deliver()
        while self.sets._tasks:
            await asyncio.gather(*self.sets._tasks)
            self.network.deliver()


def create(id: str, *nodes: str) -> s.Create:
    return s.Create(id=id, nodes=nodes, job="job", uid=0, stop=False)


def restore(checkpoint: str, of: str, *nodes: str) -> s.Restore:
    return s.Restore(id=UNKNOWN, checkpoint=checkpoint, of=of, nodes=nodes, uid=0, round=1)


@pytest.mark.parametrize(
    "wrong",
    [
        {}, {"kind": "no such kind", "id": HERE}, {"kind": "remove", "id": "../x"}, {"kind": "remove"},
        {"kind": "reached", "id": HERE, "stage": "ran"}, {"kind": "reached", "id": HERE, "stage": "go", "more": 1},
        {"kind": "given_up", "id": HERE, "code": "A B", "why": ""}, {"kind": "create", "id": HERE, "nodes": ["a"]},
        {"kind": "reached", "id": HERE, "stage": "made", "processes": ["x"]},
        {"kind": "question", "id": HERE, "what": "everything"},
    ],
)  # fmt: skip
def test_bodies_that_are_none(wrong: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        s.parse({"topic": "checkpoints"} | wrong)


@pytest.mark.parametrize(
    ("peer", "message", "code"),
    [
        ("c", create(UNKNOWN, "a", "b"), "other_node_leads"),  # it does not lead these
        ("a", create(UNKNOWN, "a", "c"), "other_node_leads"),  # which this one is none of
        ("a", create(UNKNOWN, "a", "b"), "no_part"),
        ("c", restore(HERE, "b", "a", "b"), "other_node_leads"),
        ("c", restore(HERE, "b", "c", "b"), "peer_not_allowed"),  # it had no part of it
        ("c", restore(UNKNOWN, "a", "c", "b"), "peer_not_allowed"),
    ],
)
def test_what_is_refused(peer: str, message: s.Message, code: str) -> None:
    async def main() -> None:
        nodes = Nodes()
        ((to, answer),) = await nodes.send(peer, message)
        assert (to, answer["kind"], answer["code"]) == (peer, "given_up", code)
        assert nodes.checkpoints.done == []

    asyncio.run(main())


def test_an_id_that_is_there_is_not_taken() -> None:
    async def main() -> None:
        nodes = Nodes()
        for known in (HERE, PART):
            with pytest.raises(Conflict, match="is here already"):
                await nodes.sets._check_new(known)
        nodes.sets._exchanges[UNKNOWN] = Exchange(["c"])
        with pytest.raises(Conflict, match="is here already"):
            await nodes.sets._check_new(UNKNOWN)
        await nodes.send("a", s.GivenUp(id=UNKNOWN, code="conflict", why="it has no part in that"))
        nodes.sets._exchanges[UNKNOWN].check()

    asyncio.run(main())


def test_who_leads_settles_a_part() -> None:
    async def main() -> None:
        nodes = Nodes()
        await nodes.send("c", s.Reached(id=PART, stage="whole"))
        await nodes.send("c", s.GivenUp(id=PART, code="conflict", why=""))
        await nodes.send("a", s.Reached(id=HERE, stage="whole"))
        await nodes.send("a", s.GivenUp(id=HERE, code="conflict", why=""))
        assert nodes.checkpoints.done == []
        await nodes.send("a", s.Reached(id=PART, stage="whole"))
        await nodes.send("a", s.GivenUp(id=PART, code="conflict", why=""))
        assert nodes.checkpoints.done == [("whole", PART), ("forgotten", PART)]

    asyncio.run(main())


def test_who_leads_removes_and_verifies() -> None:
    async def main() -> None:
        nodes = Nodes()
        assert [each["kind"] for _, each in await nodes.send("c", s.Remove(id=HERE))] == ["removed"]
        assert nodes.checkpoints.done == []
        for peer, wrong in (("c", "there is no part of it"), ("a", "")):
            ((_, answer),) = await nodes.send(peer, s.Verify(id=HERE, request=UNKNOWN))
            assert (answer["kind"], answer["wrong"]) == ("verified", wrong)
        await nodes.send("a", s.Remove(id=HERE))
        assert nodes.checkpoints.done == [("removed", HERE)]

    asyncio.run(main())


def test_questions_are_answered_with_what_is_written_down() -> None:
    async def main() -> None:
        nodes = Nodes(Operations(**{ONE: GOING, OTHER: READY}))
        for peer, id, what, answer in (
            ("a", HERE, "checkpoint", "whole"), ("a", PART, "checkpoint", "given_up"),
            ("a", UNKNOWN, "checkpoint", "given_up"), ("a", ONE, "restoration", "go"),
            ("a", OTHER, "restoration", "given_up"), ("a", UNKNOWN, "restoration", "given_up"),
            ("c", ONE, "restoration", "given_up"),
        ):  # fmt: skip
            ((_, sent),) = await nodes.send(peer, s.Question.model_validate({"id": id, "what": what}))
            assert (sent["id"], sent.get("stage", sent["kind"])) == (id, answer), (peer, what)

    asyncio.run(main())


def test_a_new_session_has_questions_about_parts_and_ends_what_is_under_way() -> None:
    async def main() -> None:
        nodes = Nodes()
        await nodes.idle()
        questions = [(to, each["id"]) for to, each in nodes.heard if each["kind"] == "question"]
        assert questions == [("a", PART)]
        for decided in (False, True):
            exchange = nodes.sets._exchanges[UNKNOWN] = Exchange(["a", "c"])
            exchange.decided = decided
            nodes.sets.session("a")
            with contextlib.nullcontext() if decided else pytest.raises(Conflict, match="started again"):
                exchange.check()
        nodes.sets._exchanges.clear()
        await nodes.idle()

    asyncio.run(main())


def test_stages_are_reached_by_all() -> None:
    async def main() -> None:
        exchange = Exchange(["a", "c"])
        waiting = asyncio.ensure_future(exchange.all("dumped", None))
        exchange.reached("a", s.Reached(id=HERE, stage="dumped", round=7))
        exchange.reached("c", s.Reached(id=HERE, stage="stored"))
        await asyncio.sleep(0)
        assert not waiting.done()
        exchange.reached("c", s.Reached(id=HERE, stage="dumped", round=7))
        assert [one.round for one in await waiting] == [7, 7]
        with pytest.raises(Unavailable, match="a did not answer"):
            await exchange.all("stored", 0.01)
        failed: list[str] = []
        exchange.failed = failed.append
        exchange.fail("conflict", "c: it cannot")
        exchange.fail("conflict", "a: neither")
        assert failed == ["c: it cannot"]
        with pytest.raises(Conflict, match="c: it cannot"):
            await exchange.all("dumped", None)

    asyncio.run(main())


class AtWork(Nodes):
    """b, at which a job of a and b runs, with operations as they end."""

    def __init__(self) -> None:
        super().__init__(self)  # type: ignore[arg-type]
        self.operation: Any = SimpleNamespace(
            id=OTHER, progress=lambda phase: None, point_of_no_return=lambda why: None
        )
        job = SimpleNamespace(id=ONE, name="job", uid=0, nodes=NODES)
        self.process: Any = SimpleNamespace(
            row=SimpleNamespace(id=ONE, origin=None), job=job, state="running", moving=SimpleNamespace(),
            suspended_at=lambda: 1,
        )  # fmt: skip
        self.sets._supervisor = self  # type: ignore[assignment]
        self.processes = {ONE: self.process}
        self.expected: list[str] = []
        self.scopes = SimpleNamespace(
            check=lambda nodes: None, made_again=lambda made: None, resume_all=lambda *_: True
        )  # fmt: skip
        self.checkpoints.prepared = self.prepared
        self.checkpoints.make = self.make
        self.checkpoints.begin = self.begin
        self.checkpoints.part = self.part
        self.checkpoints.criu = SimpleNamespace(confined=False)
        self.sets._restoring = self  # type: ignore[assignment]
        self.under_way: asyncio.Future[Any] | None = None
        self.connections: Sequence[Connection] = ()
        self.sockets = contextlib.ExitStack()

    # Checkpoints
    async def prepared(self, process: object, *, stop: bool, part: Any) -> Any:
        return part

    async def make(self, operation: Any, id: str, part: Any, process: object) -> dict[str, Any]:
        await part.kept(operation)
        return {}

    async def begin(self, id: str, making: object, process: object, work: Any, **_: object) -> None:
        self.under_way = asyncio.ensure_future(work(self.operation))

    async def part(self, checkpoint: str, node: str) -> Any:
        program = SimpleNamespace(id="p", uid=0, device="cpu:0")
        return SimpleNamespace(
            round=1, programs=[program], connections=self.connections, nodes=("b", "a"), network=None
        )

    # Restoring
    async def check_restoration(self, *_: object) -> list[list[str]]:
        return [["cpu:0"]]

    @contextlib.asynccontextmanager
    async def files_of(self, manifest: object) -> AsyncIterator[None]:
        yield

    async def make_again(self, operation: object, *_: object, before: Any, keep: Any, **__: object) -> dict[str, Any]:
        for each in self.connections:
            self.sockets.enter_context(made_again(each))
        await before([self.process], os.getpid())
        await keep([self.process], os.getpid())
        return {"root": 0}

    # Operations
    def active(self) -> list[Any]:
        return []

    async def start(self, *_: object, work: Any, **__: object) -> None:
        self.under_way = asyncio.ensure_future(work(self.operation))

    async def decide(self, operation: object, phase: str) -> None:
        assert phase in (READY, GOING)

    async def stages(self, *expected: str) -> None:
        """What b sends first."""
        async with asyncio.timeout(60):
            while [each.get("stage", each["kind"]) for _, each in self.heard] != list(expected):
                await asyncio.sleep(0.001)
                await self.idle()


@pytest.mark.parametrize("stop", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_a_part_has_succeeded_once_all_exist(stop: bool, whole: bool) -> None:
    async def main() -> None:
        node = AtWork()
        await node.send("a", create(UNKNOWN, "a", "b").model_copy(update={"stop": stop}))
        await node.stages("stored")
        assert node.under_way is not None
        assert not node.under_way.done()
        answer = s.Reached(id=UNKNOWN, stage="whole") if whole else s.GivenUp(id=UNKNOWN, code="conflict", why="no")
        await node.send("a", answer)
        with contextlib.nullcontext() if whole else pytest.raises(Conflict, match="a: no"):
            await node.under_way
        assert node.checkpoints.done == [("whole" if whole else "forgotten", UNKNOWN)]

    asyncio.run(main())


@pytest.mark.parametrize("stop", [False, True])
def test_a_part_that_is_stored_stays_when_its_job_has_ended(monkeypatch: pytest.MonkeyPatch, stop: bool) -> None:
    """Who leads may have decided, and is not there: the operation says so, and ends."""
    monkeypatch.setattr(sets, "LOOK_EVERY", 0.01)

    async def main() -> None:
        node = AtWork()
        await node.send("a", create(UNKNOWN, "a", "b").model_copy(update={"stop": stop}))
        await node.stages("stored")
        assert node.under_way is not None
        node.process.state = "ended"  # and the answer may be on its way
        await asyncio.wait([node.under_way], timeout=0.05)
        assert not node.under_way.done()
        node.process.state = "running"
        node.network.disconnect()
        await asyncio.wait([node.under_way], timeout=0.05)
        assert not node.under_way.done()
        node.process.state = "ended"
        with pytest.raises(InDoubt, match=f"part of {UNKNOWN[:12]} is kept"):
            await node.under_way
        assert (node.checkpoints.done, node.sets._exchanges) == ([], {})

    asyncio.run(main())


def test_a_part_is_stored_and_the_daemon_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has started the programs stands still, and says nothing of whether they live."""
    monkeypatch.setattr(sets, "LOOK_EVERY", 0.01)

    async def main() -> None:
        node = AtWork()
        node.network.disconnect()
        root = os.getpid()
        request = {
            "checkpoint": PART, "nodes": ["a", "b"], "stop": True, "processes": [ONE], "root": root,
            "root_start": pidfds.start_time(root),
        }  # fmt: skip
        operation: Any = SimpleNamespace(request=request)
        node.expected, node.processes = [ONE], {}
        resolving = asyncio.ensure_future(node.sets.resolve_create(operation))
        for expected, state in (([ONE], ""), ([], "suspended"), ([], "ended")):
            await asyncio.wait([resolving], timeout=0.05)
            assert not resolving.done()
            node.process.state = state
            node.expected, node.processes = expected, {ONE: node.process} if state else {}
        with pytest.raises(InDoubt, match=f"part of {PART[:12]} is kept"):
            await asyncio.wait_for(resolving, 60)
        assert (node.checkpoints.done, node.sets._exchanges) == ([], {})

    asyncio.run(main())


def test_a_part_in_doubt_is_discarded() -> None:
    """Not while the one who decides about it is in reach, nor while anything here waits for it."""

    async def main() -> None:
        operations = Operations()
        node = Nodes(operations)
        with pytest.raises(Conflict, match="a, which decides about the checkpoint, is in reach"):
            await node.sets.discard(PART, ["a", "b"])
        node.network.disconnect()
        node.network.untried.add("a")  # the daemon has just begun
        with pytest.raises(NotReady, match="not known yet"):
            await node.sets.discard(PART, ["a", "b"])
        node.network.untried.clear()
        node.sets._exchanges[PART] = Exchange(["a"])
        with pytest.raises(Conflict, match="still waits"):
            await node.sets.discard(PART, ["a", "b"])
        node.sets._exchanges.clear()
        operations.rows = [SimpleNamespace(request={"checkpoint": PART})]  # of an earlier daemon, and not begun yet
        with pytest.raises(Conflict, match="still waits"):
            await node.sets.discard(PART, ["a", "b"])
        operations.rows = [SimpleNamespace(request={})]
        await node.sets.discard(PART, ["a", "b"])
        assert node.checkpoints.done == [("forgotten", PART)]

    asyncio.run(main())


def test_a_part_that_is_ready_does_not_wait_once_its_programs_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sets, "LOOK_EVERY", 0.01)

    async def main() -> None:
        node = AtWork()
        node.process.state = "lost"  # it has ended, or it could not be restored beside itself
        await node.send("a", restore(HERE, "b", "a", "b"))
        await node.stages("made")
        node.process.state = "suspended"
        await node.send("a", s.Reached(id=UNKNOWN, stage="resume"))
        await node.stages("ready")
        assert node.under_way is not None
        node.sets.session("a")  # in doubt: who leads may have decided
        await asyncio.wait([node.under_way], timeout=0.05)
        assert not node.under_way.done()
        node.process.state = "ended"
        with pytest.raises(Conflict, match="was ended before"):
            await node.under_way
        assert not node.sets._exchanges

    asyncio.run(main())


@needs_root
@pytest.mark.parametrize("leads", [False, True])
@pytest.mark.parametrize("dies", [False, True])
def test_a_connection_that_dies_while_it_is_held(leads: bool, dies: bool) -> None:
    """It was made again, and nothing came for it: that it has ended is known before the job goes on."""

    async def main() -> None:
        node = AtWork()
        await node.idle()
        node.heard.clear()
        checked = asyncio.Event()
        node.scopes.made_again = lambda made: checked.set()
        connection = free_ends()
        with contextlib.ExitStack() as node.sockets:
            node.connections = [connection]
            if leads:
                caller: Any = SimpleNamespace(owner=None)
                await node.sets.restore(caller, HERE, [], {}, requestor="user 0")
            else:
                await node.send("a", restore(HERE, "b", "a", "b"))
            await node.stages("restore" if leads else "made")
            await asyncio.wait_for(checked.wait(), 60)  # that it is there
            if dies:
                held.forget((connection.local, connection.remote))
            stages: list[s.Stage] = ["made", "ready"] if leads else ["resume", "go"]
            for stage in stages:
                message = s.Reached(id=OTHER if leads else UNKNOWN, stage=stage)
                node.network["a"].send("b", message.model_dump(mode="json"))
                await node.idle()
            assert node.under_way is not None
            with pytest.raises(Conflict, match="has ended before") if dies else contextlib.nullcontext():
                await asyncio.wait_for(node.under_way, 60)
        await node.idle()
        sent = {each.get("stage", each["kind"]) for _, each in node.heard}
        assert ("go" if leads else "ready") in sent or dies
        assert ("given_up" in sent) == dies

    asyncio.run(main())


def free_ends() -> Connection:
    """Of a connection that may be made."""
    return Connection(local=f"127.0.0.1:{free_port()}", remote=f"127.0.0.1:{free_port()}", pid=1)


def made_again(connection: Connection) -> socket.socket:
    """Established without another end, as CRIU makes it."""
    sock = socket.socket()
    sock.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 1)
    sock.bind(host_and_port(connection.local))
    sock.connect(host_and_port(connection.remote))
    sock.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, -1)  # off, and nothing is sent
    return sock


def test_whether_a_checkpoint_can_be_made_is_known_where_the_job_is_led() -> None:
    async def main() -> None:
        node = AtWork()
        with pytest.raises(Conflict, match="a leads the job's nodes"):
            await node.sets.check_creation(node.process)
        node.process.job.nodes = "b,a"
        await node.sets.check_creation(node.process)
        node.network.disconnect()
        with pytest.raises(Unavailable, match="a cannot be reached"):
            await node.sets.check_creation(node.process)

    asyncio.run(main())


@in_a_loop
def test_only_what_a_node_has_made_again_is_resumed() -> None:
    """A name of a process that runs, or that is another node's, is none."""
    network = FakeNetwork("a", "b", "c")
    a, b = Node(network, "a"), Node(network, "b")
    a.scopes.settled()
    network.connect("a", "b")
    b.scopes.received = lambda peer, body: None  # type: ignore[method-assign]
    b.links.send("a", here(ONE))
    network.deliver()
    assert not a.scopes.resume_all(NODES, [], {"b": [ONE]})
    b.links.send("a", body("made_again", stand=stand(OTHER, state="suspended")))
    network.deliver()
    assert not a.scopes.resume_all(NODES, [], {"b": [ONE, OTHER]})
    assert not a.scopes.resume_all(NODES, [], {"c": [OTHER]})
    assert a.scopes.resume_all(NODES, [], {"b": [OTHER]})


@in_a_loop
def test_replicas_are_of_the_job_s_user() -> None:
    """Who leads names processes of others, too. What was reported as missing is then brought, and is not reported
    again."""
    network = FakeNetwork("a", "b")
    network.connect()
    third, far = "3" * 32, "4" * 32
    named: list[tuple[int, list[str], list[str]]] = []
    processes: dict[str, Any] = {}
    for name, uid in ((ONE, 1000), (OTHER, 1001), (third, 1000)):
        processes[name] = SimpleNamespace(
            row=SimpleNamespace(id=name, uid=uid, pid=7, start_time=1, device="cpu:0"), state="recovering", active=3,
            warm_standby=None, job=SimpleNamespace(name="job", nodes=NODES), standing=True, rounds=lambda: (0, 0),
            forsaken=lambda: False, suspended_at=lambda: 0, leaving="", resumes=False, target=None, renewed=lambda: 0,
            machine=SimpleNamespace(awaits_group=False),
            name_ranks=lambda number, near, far: named.append(
                (number, [one.row.id for one in near], [one.process for one in far])
            ),
        )  # fmt: skip
    settled: list[list[str]] = []
    following = Following(
        NODES, network["b"], processes, lambda nodes, members: settled.append([one.row.id for one in members]),
        StandbyMemory(0, processes), lambda join: None, 60,
    )  # fmt: skip
    server: Any = SimpleNamespace(number=3)
    for process in processes.values():
        following.reported(process, server, m.ReplicasWanted(type="replicas_wanted", bytes=5))

    def missing() -> int:
        return following._present(processes[ONE], following._known[ONE]).lost

    ranks = [["b", OTHER], ["b", third], ["b", UNKNOWN], ["a", far]]
    assert missing() == 5
    following.received(n.parse(body("name_replicas", process=ONE, server=2, ranks=ranks)))
    assert missing() == 5  # of another server
    following.received(n.parse(body("name_replicas", process=ONE, server=3, ranks=ranks)))
    assert missing() == 0
    assert named == [(2, [third], [far]), (3, [third], [far])]
    following.received(n.parse(body("settled", processes=[ONE, OTHER])))
    following.received(n.parse(body("settled", processes=[ONE, third])))
    assert settled == [[ONE, third]]


@in_a_loop
def test_a_pause_that_nobody_wants_any_more() -> None:
    """It was sent while the node gave it up: the process is let go on."""
    network = FakeNetwork("a", "b")
    sent: list[str] = []
    server = SimpleNamespace(send=lambda text: sent.append("pause"))
    row = SimpleNamespace(id=ONE, uid=0, pid=7, start_time=1, device="cpu:0")
    process: Any = SimpleNamespace(
        row=row, job=SimpleNamespace(name="job", nodes=NODES), state="running", active=0, standing=True,
        warm_standby=None, rounds=lambda: (0, 0), forsaken=lambda: False, target=None, renewed=lambda: 0,
        suspended_at=lambda: 0, leaving="", resumes=False, server=lambda number: server,
        let_go_on=lambda: sent.append("go on"),
    )  # fmt: skip
    network.connect()
    following = Following(
        NODES, network["b"], {ONE: process}, lambda nodes, members: None, StandbyMemory(0, {}), lambda join: None, 60
    )
    take = body("send", process=ONE, server=0, text='{"type": "group_take", "round": 5, "pauses": true}')
    following.pause(process)
    following.received(n.parse(take))
    assert sent == ["pause"]
    assert not following.not_to_pause(process)
    following.pause(process)
    assert following.not_to_pause(process)
    following.received(n.parse(take))
    assert sent == ["pause", "pause", "go on"]
