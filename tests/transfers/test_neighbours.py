"""What a node keeps of the one before it: who may have it kept, how much, and what is no request. That it is what it is
to be only the server knows that gets it back (tests/collectives/test_neighbours.py)."""

from __future__ import annotations

import asyncio
import json
import os
import random
from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from xmigd.errors import Conflict, Forbidden, ProtocolError, Unavailable, XmigError
from xmigd.ipc import messages as m
from xmigd.ipc.fds import Fd
from xmigd.memory.retained import Owner, Retained
from xmigd.supervisor.far_chunks import FarRank, room_for
from xmigd.supervisor.unique import Budget, UniqueCopies, after
from xmigd.transfers.chunks import ChunkExchange
from xmigd.transfers.neighbours import NeighbourExchange

PROCESS = "1" * 32
OWNER = Owner("a", "a,b", PROCESS)
MIB = 1 << 20
Answer = tuple[dict[str, Any], bytes]


def content(one: int) -> bytes:
    return one.to_bytes(8, "little") * (m.CHUNK // 8)


def test_what_is_kept_is_found_whatever_came_before() -> None:
    """Chunks come and go between rounds; what stays is not sent again."""
    chance, retained, there = random.Random(3), Retained(16 * m.CHUNK), set[int]()
    for _ in range(40):
        wanted = chance.sample(range(30), chance.randrange(1, 16))
        lacking = retained.retain(OWNER, wanted)
        assert [bool(bit) for bit in lacking] == [one not in there for one in wanted]
        there &= set(wanted)
        sent = chance.sample(wanted, chance.randrange(len(wanted) + 1))
        if sent:
            retained.put(OWNER, sent, b"".join(map(content, sent)))
        there |= set(sent)
        examined, found, memory = retained.find(OWNER, [(0, one) for one in range(30)])
        assert (examined, set(found)) == (30, there)
        assert memory == b"".join(map(content, found))
        assert retained.reserved == len(wanted) * m.CHUNK


def test_there_is_room_for_all_or_for_none() -> None:
    retained, other = Retained(3 * m.CHUNK), Owner("c", "c,b", PROCESS)
    retained.retain(OWNER, [1, 2])
    retained.put(OWNER, [1], content(1))
    with pytest.raises(Conflict, match="room for 2 MiB"):
        retained.retain(other, [1, 2])
    with pytest.raises(Unavailable, match="not to be kept"):
        retained.put(other, [1], content(1))
    with pytest.raises(Unavailable, match="not to be kept"):
        retained.put(OWNER, [3], content(3))
    assert retained.find(other, [(0, 1)]) == (1, (), b"")
    retained.retain(OWNER, [])
    assert retained.find(OWNER, [(0, 1)]) == (1, (), b"")
    assert retained.retain(other, [1, 2, 3]) == b"\1\1\1"
    retained.forget(lambda owner: owner.nodes == "c,b")
    assert retained.reserved == 0


def test_one_answer_takes_so_many_chunks() -> None:
    retained = Retained(40 * m.CHUNK)
    retained.retain(OWNER, range(20))
    for first in (0, 10):
        retained.put(OWNER, range(first, first + 10), b"".join(map(content, range(first, first + 10))))
    examined, found, memory = retained.find(OWNER, [(0, one) for one in range(20)])
    assert (examined, found, len(memory)) == (16, tuple(range(16)), 16 * m.CHUNK)


def test_a_budget() -> None:
    """In any time so many bytes and one piece, whenever they are wanted."""
    chance, now, budget = random.Random(5), 100.0, Budget(4 * MIB)
    begun: list[tuple[float, int]] = []
    for _ in range(300):
        now += chance.choice([0, 0, 0.1, 3])
        size = chance.choice([2, 4]) * MIB
        now += budget.wait(size, now)
        begun.append((now, size))
    for first in range(len(begun)):
        for last in range(first, min(first + 20, len(begun))):
            sent = sum(size for _, size in begun[first:last])
            assert sent <= 4 * MIB * (begun[last][0] - begun[first][0]) + 1


def test_which_node_is_the_next() -> None:
    assert [after(one, "a,b,c") for one in "abcd"] == [["b", "c"], ["c", "a"], ["a", "b"], []]
    assert after("a", "a") == []


class Net:
    """Two nodes, a and b, and what one calls the other."""

    def __init__(self, most: int = 8) -> None:
        calls: Any = SimpleNamespace(exchange=self.exchange)
        self.retained = Retained(most * m.CHUNK)
        self.ranks = {"a,b"}
        self.requested: list[tuple[str, int]] = []

        async def held(nodes: str, round: int) -> frozenset[int]:
            self.requested.append((nodes, round))
            return frozenset({5, 2**64 - 1})

        nothing: Any = None
        self.a = NeighbourExchange("a", calls, Retained(0), has_ranks=bool, held=held, shares_job=bool)
        self.b = NeighbourExchange(
            "b", nothing, self.retained, has_ranks=lambda nodes: nodes in self.ranks, held=held,
            shares_job=lambda peer: peer == "a",
        )  # fmt: skip
        other: Any = lambda *_: ({"other": 1}, b"")  # noqa: E731
        exchange = ChunkExchange(calls, lambda id: None, lambda: True, self.retained)
        self.handle = self.b.or_else(exchange.or_else(other))
        self.chunks = exchange

    def exchange(self, peer: str, body: dict[str, Any], _: object, payload: bytes = b"") -> Answer:
        assert peer == "b"
        return self.request("a", body, payload)

    def request(self, peer: str, body: dict[str, Any], payload: bytes = b"") -> Answer:
        found = self.handle(peer, json.loads(json.dumps(body)), payload)
        assert found is not None
        return found


def test_one_node_sends_and_gets_back() -> None:
    """Through both halves, as a connection carries it."""

    async def test() -> None:
        net = Net()
        hashes = [2**64 - 1, 4, 5]
        assert await net.a.held("b", "a,b", 77, hashes) == b"\1\0\1"
        assert net.requested == [("a,b", 77)]
        assert await net.a.retain("b", "a,b", PROCESS, hashes) == b"\1\1\1"
        memory = room_for([(0, 0)] * 2)
        os.pwrite(memory.fileno(), content(4) + content(5), 0)
        await net.a.send_content("b", "a,b", PROCESS, [4, 5], memory)
        assert await net.a.retain("b", "a,b", PROCESS, hashes) == b"\1\0\0"
        rank = FarRank("b", PROCESS, retained=True)
        found = await net.chunks.fetch(rank, "a,b", [(0, 4), (1, 6), (2, 5)])
        assert (found.examined, found.found) == (3, (0, 2))
        assert os.pread(found.memory.fileno(), 2 * m.CHUNK, 0) == content(4) + content(5)
        # Of nobody else's process, and of no other job.
        for peer, nodes in (("c", "a,b"), ("a", "a,b,c")):
            body = {"op": "chunks", "nodes": nodes, "process": PROCESS, "chunks": [[0, 4]], "retained": True}
            assert await asyncio.to_thread(net.request, peer, body) == ({"examined": 1, "found": []}, b"")
        await net.a.retain("b", "a,b", PROCESS, ())
        assert net.retained.reserved == 0

    asyncio.run(asyncio.wait_for(test(), 20))


def test_who_may_have_something_kept() -> None:
    async def test() -> None:
        net = Net()
        some = array("Q", [1, 2]).tobytes()
        retain: dict[str, Any] = {"op": "retain", "nodes": "a,b", "process": PROCESS}
        send = {"op": "content", "nodes": "a,b", "process": PROCESS, "hashes": [1]}
        held = {"op": "held", "nodes": "a,b", "round": 3}
        refusals: list[tuple[str, dict[str, Any], bytes, type[XmigError]]] = [
            ("c", retain, some, Forbidden), ("b", retain, some, Forbidden),
            ("a", retain | {"nodes": "a,c,b"}, some, Forbidden),
            ("a", retain | {"nodes": "a,b,c"}, some, Unavailable), ("a", retain, some[:-1], ProtocolError),
            ("a", retain | {"process": "../x"}, some, ProtocolError), ("a", retain | {"more": 1}, some, ProtocolError),
            ("a", retain, array("Q", range(9)).tobytes(), Conflict), ("a", send, content(1), Unavailable),
            ("a", send, content(1)[:-1], ProtocolError), ("a", send | {"hashes": []}, b"", ProtocolError),
            ("a", send | {"hashes": [2**64]}, content(1), ProtocolError), ("c", held, some, Forbidden),
            ("a", held | {"round": 0}, some, ProtocolError), ("a", held, b"", ProtocolError),
            ("a", held | {"nodes": "a,b,c"}, some, Unavailable),
        ]  # fmt: skip
        for peer, body, payload, error in refusals:
            with pytest.raises(error):
                await asyncio.to_thread(net.request, peer, body, payload)
        assert net.retained.reserved == 0
        assert net.request("a", {"op": "piece"}) == ({"other": 1}, b"")
        assert [net.b.longest(lambda peer: 7)(peer) for peer in "ac"] == [32 * MIB, 7]

    asyncio.run(asyncio.wait_for(test(), 20))


def test_the_last_rank_ends_while_something_is_to_be_retained() -> None:
    async def test() -> None:
        net = Net()
        retain = net.retained.retain

        def retain_and_end(owner: Owner, hashes: Sequence[int]) -> bytes:
            net.ranks.clear()
            net.b.forget("a,b")
            return retain(owner, hashes)

        net.retained.retain = retain_and_end  # type: ignore[method-assign]
        with pytest.raises(Unavailable):
            await net.a.retain("b", "a,b", PROCESS, [1])
        assert net.retained.reserved == 0

    asyncio.run(asyncio.wait_for(test(), 20))


@pytest.mark.parametrize("bits", [b"", b"\1", b"\1\2", b"\1\1\1"])
def test_what_is_no_answer(bits: bytes) -> None:
    async def test() -> None:
        net = Net()
        net.handle = lambda *_: ({}, bits)
        with pytest.raises(ProtocolError):
            await net.a.retain("b", "a,b", PROCESS, [1, 2])

    asyncio.run(asyncio.wait_for(test(), 20))


def test_nothing_is_sent_without_a_rate() -> None:
    job: Any = SimpleNamespace(nodes="a,b")
    alone: Any = SimpleNamespace(nodes=None)
    assert UniqueCopies("a", {}, most_bytes=1, rate=0).neighbour_of(job) is None
    sending = UniqueCopies("b", {}, most_bytes=0, rate=1)
    copy = sending.neighbour_of(job)
    assert copy is not None
    assert copy.node == "a"
    assert sending.neighbour_of(alone) is None


def test_the_daemon_of_the_next_node_is_another_one() -> None:
    """It has lost what it retained: nothing survives by it until it has all again, without another round."""

    async def run() -> None:
        processes: dict[str, Any] = {}
        unique, there, content = UniqueCopies("a", processes, most_bytes=0, rate=1e12), set[int](), list[int]()
        copy = unique.neighbour_of(SimpleNamespace(nodes="a,b"))  # type: ignore[arg-type]
        assert copy is not None

        async def retain(node: str, nodes: str, process: str, hashes: Sequence[int]) -> bytes:
            return bytes(one not in there for one in hashes)

        async def send_content(node: str, nodes: str, process: str, hashes: Sequence[int], memory: Fd) -> None:
            there.update(hashes)
            content.extend(hashes)

        async def read_chunks(chunks: Sequence[m.ChunkHash]) -> Any:
            memory = Fd(os.open("/dev/null", os.O_RDONLY))
            return SimpleNamespace(memory=memory, found=range(len(chunks)), examined=len(chunks))

        async def until_there() -> None:
            async with asyncio.timeout(20):
                while copy.snapshot != 3:
                    await asyncio.sleep(0)

        unique.others = SimpleNamespace(retain=retain, send_content=send_content)
        process: Any = SimpleNamespace(
            row=SimpleNamespace(id=PROCESS), job=SimpleNamespace(nodes="a,b"), neighbour_copy=copy,
            read_chunks=read_chunks,
        )  # fmt: skip
        processes[PROCESS] = process
        unique._send(process, 3, {5: 4096, 6: 8192})
        await until_there()
        unique.reaches("b", False)
        assert not copy.reached
        unique.session("c")
        assert (copy.snapshot, content) == (3, [5, 6])
        there.clear()
        unique.session("b")
        unique.reaches("b", True)
        assert (copy.snapshot, copy.bytes, copy.behind_bytes) == (0, 0, 2 * m.CHUNK)
        await until_there()
        assert (copy.reached, content) == (True, [5, 6, 5, 6])
        unique.close()

    asyncio.run(run())


def test_rounds_that_come_while_one_is_looked_at() -> None:
    """That one is looked at until its end, and then the newest."""

    async def run() -> None:
        unique, looked, go_on = UniqueCopies("a", {}, most_bytes=1, rate=0), list[str](), asyncio.Event()

        async def look(nodes: str, members: Sequence[Any]) -> None:
            looked.append(members[0].round)
            await go_on.wait()

        unique._look = look  # type: ignore[method-assign]
        for round in ("first", "second", "third"):
            unique.settled_here("a,b", [SimpleNamespace(row=SimpleNamespace(id=PROCESS), round=round)])  # type: ignore[list-item]
            await asyncio.sleep(0)
        go_on.set()
        while unique._looking:
            await asyncio.sleep(0)
        assert looked == ["first", "third"]

    asyncio.run(run())


def test_a_server_that_reports_no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its round is looked at again until it does."""
    monkeypatch.setattr("xmigd.supervisor.unique.UNANSWERED", 0.001)

    async def run() -> None:
        processes: dict[str, Any] = {}
        unique, looked = UniqueCopies("a", processes, most_bytes=1, rate=0), 0
        process: Any = SimpleNamespace(
            row=SimpleNamespace(id=PROCESS), grouped=True, copies=None, last_snapshot=SimpleNamespace(number=7)
        )
        processes[PROCESS] = process

        async def look(nodes: str, members: Sequence[Any]) -> None:
            nonlocal looked
            looked += 1
            assert (nodes, members) == ("a,b", [process])
            if looked == 3:
                process.copies = SimpleNamespace(snapshot=7)

        unique._look = look  # type: ignore[method-assign]
        unique.settled_here("a,b", [process])
        async with asyncio.timeout(20):
            while looked < 3 or unique._looking or unique._repeating:
                await asyncio.sleep(0)
        assert looked == 3

    asyncio.run(run())
