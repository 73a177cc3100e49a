"""Chunks of device memory between nodes: who may have them, and what is no answer. That they are what they are to be
only the server knows that gets them (tests/collectives/test_far_replicas.py)."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from xmigd.errors import Conflict, Forbidden, NotFound, ProtocolError, Unavailable, XmigError
from xmigd.ipc import messages as m
from xmigd.memory.retained import Retained
from xmigd.supervisor.far_chunks import FarChunks, FarRank, Found, room_for
from xmigd.transfers.calls import answered
from xmigd.transfers.chunks import ChunkExchange

NOTHING = Retained(0)
ONE = FarRank("b", "1" * 32)
CHUNKS = [(0x1000, 2**64 - 1), (0x2000, 7), (0x3000, 9)]
CONTENT = bytes(range(256)) * (m.CHUNK // 256)


class FakeServer:
    number = 4

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.content: list[bytes] = []
        self.refused = ""

    def send(self, message: bytes, fds: Sequence[Any] = ()) -> None:
        self.sent.append(json.loads(message))
        self.content += [os.pread(fd.fileno(), 1 << 30, 0) for fd in fds]

    def refuse(self, why: str) -> None:
        self.refused = why


def chunks_of(server: FakeServer, fetch: Callable[..., Awaitable[Found]]) -> FarChunks:
    process: Any = SimpleNamespace(
        row=SimpleNamespace(id="2" * 32), job=SimpleNamespace(nodes="a,b"),
        machine=SimpleNamespace(active=server.number),
        server=lambda number: server if number == server.number else None,
    )  # fmt: skip
    return FarChunks(process, fetch)


def wanted(rank: int = 0) -> m.ChunksWanted:
    return m.ChunksWanted(type="chunks_wanted", rank=rank, chunks=tuple(CHUNKS))


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def in_time(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 20))


@pytest.mark.parametrize(
    ("answer", "content"),
    [
        ({"examined": 3, "found": [1]}, b""), ({"examined": 3, "found": [1]}, CONTENT + b"x"),
        ({"examined": 3, "found": []}, CONTENT), ({"examined": 0, "found": []}, b""),
        ({"examined": 4, "found": []}, b""), ({"examined": 3, "found": [3]}, CONTENT),
        ({"examined": 3, "found": [1, 1]}, CONTENT * 2), ({"examined": 3, "found": [-1]}, CONTENT),
        ({"examined": True, "found": []}, b""), ({"examined": 3}, b""), ({"examined": 3, "found": [], "x": 1}, b""),
        ({"examined": 3, "found": list(range(17))}, b""), ({}, b""),
    ],
)  # fmt: skip
def test_what_is_no_answer(answer: dict[str, Any], content: bytes) -> None:
    async def test() -> None:
        calls: Any = SimpleNamespace(exchange=lambda peer, body, closing: (answer, content))
        with pytest.raises(ProtocolError):
            await ChunkExchange(calls, lambda id: None, lambda: True, NOTHING).fetch(ONE, "a,b", CHUNKS)

    in_time(test)


def test_one_node_gives_and_another_gets() -> None:
    """Through both halves, as a connection carries it."""

    async def test() -> None:
        async def read(chunks: Sequence[m.ChunkHash]) -> Found:
            assert list(chunks) == CHUNKS
            memory = room_for(chunks)
            os.pwrite(memory.fileno(), CONTENT, 0)
            return Found(3, (1,), memory)

        process: Any = SimpleNamespace(job=SimpleNamespace(nodes="a,b"), read_chunks=read)
        nobody: Any = None
        settled: list[bool] = []
        other: Any = lambda *_: ({"other": 1}, b"")  # noqa: E731
        giving = ChunkExchange(nobody, {ONE.process: process}.get, lambda: bool(settled), NOTHING).or_else(other)

        def exchange(peer: str, body: dict[str, Any], _: object) -> tuple[dict[str, Any], bytes]:
            found = giving("a", json.loads(json.dumps(body)), b"")
            assert found is not None
            return found

        calls: Any = SimpleNamespace(exchange=exchange)
        found = await ChunkExchange(calls, lambda id: None, lambda: True, NOTHING).fetch(ONE, "a,b", CHUNKS)
        assert (found.examined, found.found) == (3, (1,))
        assert os.pread(found.memory.fileno(), m.CHUNK, 0) == CONTENT

        def request_of(peer: str, **changed: object) -> object:
            chunks = [list(one) for one in CHUNKS]
            return giving(
                peer, {"op": "chunks", "nodes": "a,b", "process": ONE.process, "chunks": chunks} | changed, b""
            )

        assert await asyncio.to_thread(giving, "c", {"op": "piece"}, b"") == ({"other": 1}, b"")
        refusals: list[tuple[str, dict[str, object], type[XmigError]]] = [
            ("c", {}, Forbidden), ("a", {"nodes": "a,b,c"}, Forbidden), ("a", {"process": "3" * 32}, Unavailable),
            ("a", {"chunks": []}, ProtocolError), ("a", {"chunks": [[1, 2]] * 513}, ProtocolError),
            ("a", {"chunks": [[1, 2**64]]}, ProtocolError), ("a", {"process": "../x"}, ProtocolError),
        ]  # fmt: skip
        for peer, changed, error in refusals:
            with pytest.raises(error):
                await asyncio.to_thread(request_of, peer, **changed)
        settled.append(True)  # nobody announces itself any more
        with pytest.raises(NotFound):
            await asyncio.to_thread(request_of, "a", process="3" * 32)

    in_time(test)


def test_a_node_that_is_not_in_reach_is_waited_for() -> None:
    async def test() -> None:
        server, requests = FakeServer(), 0

        async def fetch(rank: FarRank, nodes: str, chunks: Sequence[m.ChunkHash]) -> Found:
            nonlocal requests
            requests += 1
            assert (rank, nodes, list(chunks)) == (ONE, "a,b", CHUNKS)
            if requests < 3:
                raise Unavailable("the connection is lost")
            memory = room_for(chunks)
            os.pwrite(memory.fileno(), CONTENT, 0)
            return Found(2, (0,), memory)

        one = chunks_of(server, fetch)
        one.named(server.number, [ONE])
        one.wanted(server, wanted())  # type: ignore[arg-type]
        one.wanted(server, wanted())  # type: ignore[arg-type]
        assert "several at once" in server.refused
        await until(lambda: server.sent)
        assert server.sent == [{"type": "chunks_brought", "examined": 2, "found": [0], "why": ""}]
        assert server.content[0][: m.CHUNK] == CONTENT

    in_time(test)


def test_a_node_that_refuses_is_not_waited_for() -> None:
    async def test() -> None:
        server = FakeServer()

        async def fetch(*_: object) -> Found:
            raise ProtocolError("b answers what is no answer")

        one = chunks_of(server, fetch)
        one.wanted(server, wanted())  # type: ignore[arg-type]
        assert "was not named" in server.refused
        one.named(server.number, [ONE])
        one.wanted(server, wanted())  # type: ignore[arg-type]
        await until(lambda: server.sent)
        answer = {"examined": 0, "found": [], "why": "b answers what is no answer"}
        assert server.sent == [{"type": "chunks_brought"} | answer]

    in_time(test)


def test_a_server_that_is_lost_waits_for_nothing() -> None:
    """Neither the one that wants content nor the one that is to read it."""

    async def test() -> None:
        server, given_up = FakeServer(), asyncio.Event()

        async def fetch(*_: object) -> Found:
            try:
                await asyncio.sleep(60)
            finally:
                given_up.set()
            raise AssertionError

        one = chunks_of(server, fetch)
        one.named(server.number, [ONE])
        one.wanted(server, wanted())  # type: ignore[arg-type]
        reading = asyncio.create_task(one.read(CHUNKS, lambda: server))  # type: ignore[arg-type,return-value]
        await until(lambda: server.sent)
        one.server_lost(server.number)
        await given_up.wait()
        with pytest.raises(Unavailable, match="was lost"):
            await reading

    in_time(test)


@pytest.mark.parametrize("found", [(3,), (1, 1), (2, 1)])
def test_a_server_that_answers_something_else(found: tuple[int, ...]) -> None:
    async def test() -> None:
        server = FakeServer()

        async def fetch(*_: object) -> Found:
            raise AssertionError

        one = chunks_of(server, fetch)
        reading = asyncio.create_task(one.read(CHUNKS, lambda: server))  # type: ignore[arg-type,return-value]
        await until(lambda: server.sent)
        number = server.sent[0]["number"]
        assert server.sent[0]["chunks"] == [list(each) for each in CHUNKS]
        for each in (number - 1, number):  # the first is of an earlier request
            answer = m.ChunksRead(type="chunks_read", number=each, examined=3, found=found, why="")
            one.was_read(server, answer)  # type: ignore[arg-type]
        with pytest.raises(Conflict, match="not requested"):
            await reading

    in_time(test)


@pytest.mark.parametrize(
    ("status", "error"), [(429, Unavailable), (503, Unavailable), (409, Conflict), (404, Conflict)]
)
def test_what_may_be_requested_again(status: int, error: type[XmigError]) -> None:
    """A peer with too many connections may still be the only one that has the content."""
    with pytest.raises(error):
        answered("two", {"problem": {"status": status, "code": "busy", "detail": "not now", "hint": ""}})
