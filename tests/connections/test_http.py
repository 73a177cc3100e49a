"""HTTP as strangers send it: whole, in pieces, ahead of the answer, too much of it, or none at all."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from xmigd.api.gate.bodies import Bodies
from xmigd.api.server import make_server
from xmigd.connections import http
from xmigd.connections.http import MAX_AHEAD, MAX_HEAD, SLICE, GuardedProtocol, HttpServer
from xmigd.connections.listener import bind_unix
from xmigd.connections.quotas import Quotas
from xmigd.errors import NotHttp
from xmigd.settings import Settings

PATIENCE = 30.0
HEAD = b"Host: localhost\r\n"
GET = b"GET /%d HTTP/1.1\r\n" + HEAD + b"\r\n"
CHUNKED = b"POST / HTTP/1.1\r\n" + HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
last = contextvars.ContextVar("last", default="")


class App:
    """Answers with the path, and remembers what it has seen. /stream goes on until nobody listens any more."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, bytes]] = []
        self.before: list[str] = []  # what the context had that each came with
        self.names: list[set[bytes]] = []
        self.listeners = 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.answer = b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", True
        self.before.append(last.get())
        last.set(scope["path"])
        while more and scope["method"] == "POST" and scope["path"] != "/early":
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message["body"], message["more_body"]
        self.requests.append((scope["path"], body))
        self.names.append({name for name, _ in scope["headers"]})
        await self.may_answer.wait()
        if scope["path"] == "/stream":
            await self._stream(receive, send)
            return
        answer = self.answer or scope["path"].encode()
        length = (b"content-length", b"%d" % len(answer))
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": answer})

    async def _stream(self, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        self.listeners += 1
        while (await receive())["type"] != "http.disconnect":
            pass
        self.listeners -= 1


@contextlib.asynccontextmanager
async def served(app: ASGIApp, folder: Path, *, patience: float = PATIENCE) -> AsyncIterator[HttpServer]:
    """On a socket in `folder`."""
    settings = Settings(runtime_dir=folder, request_timeout=patience, idle_timeout=60)
    server = make_server(app, settings, Quotas(64, 32, 32))
    server.lifespan = server.config.lifespan_class(server.config)
    sock = bind_unix(folder / "http.sock", 1, 0o600)
    await server.startup([sock])
    try:
        yield server
    finally:
        for each in server.servers:
            each.close()
        sock.close()
        for connection in list(server.server_state.connections):
            connection.transport.abort()
        for task in server.server_state.tasks:
            task.cancel()
        await asyncio.gather(*server.server_state.tasks, return_exceptions=True)


Connect = Callable[[], Awaitable["Peer"]]


def run(
    test: Callable[[App, HttpServer, Connect], Awaitable[None]], folder: Path, *, patience: float = PATIENCE
) -> None:
    async def all_of_it() -> None:
        app = App()
        peers: list[Peer] = []

        async def connect() -> Peer:
            peers.append(Peer(*await asyncio.open_unix_connection(folder / "http.sock")))
            return peers[-1]

        async with asyncio.timeout(PATIENCE), served(app, folder, patience=patience) as server:
            try:
                await test(app, server, connect)
            finally:
                for peer in peers:
                    peer.writer.transport.abort()
                    with contextlib.suppress(OSError):
                        await peer.writer.wait_closed()

    asyncio.run(all_of_it())


class Peer:
    """Another program, connected to it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self) -> tuple[int, bytes]:
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        return int(head[9:12]), await self.reader.readexactly(int(length.partition(b":")[2]))

    async def refusal(self) -> tuple[int, str]:
        """Status and code of the only answer, after which it ends."""
        status, body = await self.answer()
        assert await self.reader.read() == b""
        return status, json.loads(body)["code"]


def protocol(server: HttpServer) -> GuardedProtocol:
    [found] = server.server_state.connections
    assert isinstance(found, GuardedProtocol)
    return found


def test_requests_that_are_sent_ahead_are_answered_in_order(tmp_path: Path) -> None:
    """In whatever pieces they come. Each has a context of its own, though it begins where the one before it ends."""
    count = 40
    sent = b"".join(GET % number for number in range(count))

    async def test(app: App, _: HttpServer, connect: Connect) -> None:
        for size in (1, 7, len(GET % 0), 1000, len(sent)):
            peer = await connect()
            for at in range(0, len(sent), size):
                peer.send(sent[at : at + size])
                if size < 1000:
                    await asyncio.sleep(0)
            for number in range(count):
                assert await peer.answer() == (200, b"/%d" % number)
            peer.writer.close()
        assert set(app.before) == {""}

    run(test, tmp_path)


def test_few_requests_are_begun_at_once(tmp_path: Path) -> None:
    """Each is more in memory than on its way: what is sent ahead stays as it came."""
    small = b"GET / HTTP/1.0\r\n\r\n"
    kept = b"GET / HTTP/1.1\r\nHost:a\r\n\r\n"
    count = MAX_AHEAD // len(kept) // 2

    async def test(app: App, server: HttpServer, connect: Connect) -> None:
        app.may_answer.clear()
        peer = await connect()
        peer.send(kept * count)
        while not app.requests:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert len(protocol(server).pipeline) <= SLICE // len(small)
        assert len(app.requests) == 1
        app.may_answer.set()
        for _ in range(count):
            assert await peer.answer() == (200, b"/")

    run(test, tmp_path)


def test_what_is_sent_ahead_has_an_end(tmp_path: Path) -> None:
    """Nobody reads it, so the peer cannot send more; and if a handler lets it, it is over."""

    async def test(app: App, server: HttpServer, connect: Connect) -> None:
        app.may_answer.clear()
        peer = await connect()
        peer.send(GET % 1)
        while not app.requests:
            await asyncio.sleep(0.01)
        peer.send(GET % 2 * (4 * MAX_AHEAD // len(GET)))
        with contextlib.suppress(ConnectionError):
            while server.server_state.connections:
                assert len(protocol(server)._ahead) <= MAX_AHEAD
                protocol(server).flow.resume_reading()
                await asyncio.sleep(0.001)

    run(test, tmp_path)


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),  # TLS
        b"GET / HTTP/2.0\r\n" + HEAD + b"\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + HEAD + HEAD + b"\r\n",
        b"GET /\xff HTTP/1.1\r\n" + HEAD + b"\r\n",
        b"GET / HTTP/1.1\r\n" + HEAD + b"A b: c\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + HEAD + b"A: b\r\n c\r\n\r\n",
        b"GET / HTTP/1.1\n" + HEAD + b"\n",
        b"CONNECT a:1 HTTP/1.1\r\n" + HEAD + b"\r\n",
        b"POST / HTTP/1.1\r\n" + HEAD + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\n" + HEAD + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        b"POST / HTTP/1.1\r\n" + HEAD + b"Content-Length: -3\r\n\r\nabc",
        CHUNKED + b"xyz\r\n",
        b"POST / HTTP/1.1\r\n" + HEAD + b"Upgrade: h2c\r\nConnection: Upgrade\r\nContent-Length: 3\r\n\r\nabc",
        b"GET / HTTP/1.1\r\n" + HEAD + b"A: " + b"x" * (MAX_HEAD + 2 * SLICE),
        b"GET /" + b"x" * (MAX_HEAD + 2 * SLICE),
        b"\r\n" * (MAX_HEAD // 2 + SLICE),
        CHUNKED + b"1;" + b"x" * (MAX_HEAD + 2 * SLICE),
        CHUNKED + b"0\r\n" + b"A: b\r\n" * (MAX_HEAD // 6 + SLICE),
    ],
    ids=lambda sent: repr(sent[:40] + b" ... " + sent[-12:]),
)  # fmt: skip
def test_what_is_no_request_is_not_done(tmp_path: Path, sent: bytes) -> None:
    async def test(app: App, _: HttpServer, connect: Connect) -> None:
        peer = await connect()
        peer.send(sent)
        assert await peer.refusal() == (400, "not_http")
        assert app.requests == []

    run(test, tmp_path)


def test_an_answer_is_not_taken_for_that_of_another_request(tmp_path: Path) -> None:
    """What follows a request is no HTTP: nobody takes the refusal for the first one's answer."""

    async def test(app: App, _: HttpServer, connect: Connect) -> None:
        peer = await connect()
        peer.send(GET % 1 + b"this is no request\r\n\r\n")
        assert b" 400 " not in await peer.reader.read()

    run(test, tmp_path)


@pytest.mark.parametrize("stray", [b"x!", b"\x00" * SLICE * 2], ids=["within a slice", "more"])
def test_what_was_done_is_answered_though_something_stray_follows(tmp_path: Path, stray: bytes) -> None:
    """In the same packet; then it ends."""

    async def test(app: App, _: HttpServer, connect: Connect) -> None:
        peer = await connect()
        peer.send(GET % 1 + b"POST /2 HTTP/1.1\r\n" + HEAD + b"Content-Length: 2\r\n\r\n{}" + stray)
        assert [await peer.answer(), await peer.answer()] == [(200, b"/1"), (200, b"/2")]
        assert await peer.reader.read() == b""
        assert app.requests == [("/1", b""), ("/2", b"{}")]

    run(test, tmp_path)


def test_a_request_whose_body_is_none_is_refused_when_it_is_its_turn(tmp_path: Path) -> None:
    async def test(app: App, _: HttpServer, connect: Connect) -> None:
        peer = await connect()
        peer.send(GET % 1 + CHUNKED + b"xyz\r\n")
        assert await peer.answer() == (200, b"/1")
        assert await peer.refusal() == (400, "not_http")
        assert app.requests == [("/1", b"")]

    run(test, tmp_path)


@pytest.mark.parametrize("later", [False, True], ids=["at once", "later"])
def test_a_stream_ends_with_its_connection(tmp_path: Path, later: bool) -> None:
    """Also if requests were sent ahead, behind it."""

    async def test(app: App, _: HttpServer, connect: Connect) -> None:
        peer = await connect()
        stream = b"GET /stream HTTP/1.1\r\n" + HEAD + b"\r\n"
        peer.send(stream if later else stream + GET % 2 + GET % 3)
        while not app.listeners:
            await asyncio.sleep(0.01)
        if later:
            peer.send(GET % 2)
            await asyncio.sleep(0.1)  # so that it is there before the end
            peer.send(GET % 3)
        peer.writer.close()
        while app.listeners:
            await asyncio.sleep(0.01)
        assert [path for path, _ in app.requests] == ["/stream"]

    run(test, tmp_path)


def test_an_old_client_gets_no_chunks(tmp_path: Path) -> None:
    """Neither of a stream nor of what has a length."""

    async def test(app: App, _: HttpServer, connect: Connect) -> None:
        peer, streams = await connect(), await connect()
        peer.send(b"GET /1 HTTP/1.0\r\n\r\n")
        assert await peer.answer() == (200, b"/1")
        assert await peer.reader.read() == b""
        streams.send(b"GET /stream HTTP/1.0\r\n\r\n")
        head = await streams.reader.readuntil(b"\r\n\r\n")
        assert b"connection: close" in head
        assert b"transfer-encoding" not in head
        assert await streams.reader.readexactly(5) == b"first"

    run(test, tmp_path)


def test_an_offer_to_upgrade_is_ignored(tmp_path: Path) -> None:
    async def test(app: App, _: HttpServer, connect: Connect) -> None:
        peer = await connect()
        peer.send(b"GET /1 HTTP/1.1\r\n" + HEAD + b"Upgrade: h2c\r\nConnection: Upgrade\r\n\r\n" + GET % 2)
        assert [await peer.answer(), await peer.answer()] == [(200, b"/1"), (200, b"/2")]

    run(test, tmp_path)


def test_headers_behind_a_body_are_none(tmp_path: Path) -> None:
    async def test(app: App, _: HttpServer, connect: Connect) -> None:
        peer = await connect()
        peer.send(b"POST /1 HTTP/1.1\r\n" + HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
                  b"3\r\nabc\r\n0\r\nAuthorization: Bearer x\r\n\r\n" + GET % 2)  # fmt: skip
        assert [await peer.answer(), await peer.answer()] == [(200, b"/1"), (200, b"/2")]
        assert app.requests == [("/1", b"abc"), ("/2", b"")]
        assert not any(b"authorization" in names for names in app.names)

    run(test, tmp_path)


def test_an_answer_before_the_body(tmp_path: Path) -> None:
    """The rest of the body is no request; and who does not send it loses the connection, without another answer."""

    async def test(app: App, _: HttpServer, connect: Connect) -> None:
        whole, part = await connect(), await connect()
        begun = b"POST /early HTTP/1.1\r\n" + HEAD + b"Content-Length: 3000\r\n\r\n"
        for peer in (whole, part):
            peer.send(begun)
            assert await peer.answer() == (200, b"/early")
        whole.send(b"x" * 3000 + GET % 2)
        assert await whole.answer() == (200, b"/2")
        part.send(b"x" * 2999)
        assert await part.reader.read() == b""

    run(test, tmp_path, patience=1.0)


def test_a_request_of_which_a_part_was_sent_ahead_has_a_deadline(tmp_path: Path) -> None:
    async def test(app: App, _: HttpServer, connect: Connect) -> None:
        peer = await connect()
        peer.send(GET % 1 + b"GET /2 HTTP/1.1\r\nHost:")
        assert await peer.answer() == (200, b"/1")
        assert await peer.refusal() == (408, "request_timeout")

    run(test, tmp_path, patience=1.0)


@pytest.mark.parametrize("stray", [b"", b"\r\n"], ids=["whole", "line ends"])
def test_a_connection_that_rests_ends(tmp_path: Path, stray: bytes) -> None:
    """Also if line ends, which are no request, were sent ahead, beyond a slice."""

    async def test(app: App, server: HttpServer, connect: Connect) -> None:
        server.config.timeout_keep_alive = 1
        peer = await connect()
        head = b"GET /1 HTTP/1.1\r\n" + HEAD + b"A: "
        peer.send(head + b"x" * (SLICE - len(head) - 4) + b"\r\n\r\n" + stray)
        assert await peer.answer() == (200, b"/1")
        assert await peer.reader.read() == b""

    run(test, tmp_path)


def test_a_deadline_is_for_one_request(tmp_path: Path) -> None:
    """Its answer may have come before its body; behind that, a connection rests, or the next request is awaited."""

    async def test(app: App, server: HttpServer, connect: Connect) -> None:
        server.config.timeout_keep_alive = 2
        rests, goes_on = await connect(), await connect()
        for peer in (rests, goes_on):
            peer.send(b"POST /early HTTP/1.1\r\n" + HEAD + b"Content-Length: 3000\r\n\r\n")
            assert await peer.answer() == (200, b"/early")
        rests.send(b"x" * 3000)
        goes_on.send(b"x" * 3000 + b"GET /2 HTTP/1.1\r\nHost:")
        assert await goes_on.refusal() == (408, "request_timeout")
        assert await rests.reader.read() == b""

    run(test, tmp_path, patience=1.0)


def test_who_does_not_read_loses_the_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if they send a little now and then."""
    monkeypatch.setattr(http, "UNREAD_TIMEOUT", 1.0)

    async def test(app: App, server: HttpServer, connect: Connect) -> None:
        app.answer = bytes(8 << 20)
        peer = await connect()
        peer.send(GET % 1)
        while not app.requests:
            await asyncio.sleep(0.01)
        little = (bytes([byte]) for byte in GET % 2 * 100)
        with contextlib.suppress(ConnectionError):
            while server.server_state.connections:
                peer.send(next(little))
                await asyncio.sleep(0.1)

    run(test, tmp_path)


def test_a_request_whose_peer_has_gone_is_not_done() -> None:
    """What has come of a body may be taken for a whole one."""
    done: list[Any] = []

    async def test() -> None:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            done.append(await receive())

        messages = iter([
            {"type": "http.request", "body": b"{}", "more_body": True}, {"type": "http.disconnect"},
        ])  # fmt: skip

        async def receive() -> Any:
            return next(messages)

        async def send(message: Any) -> None: ...

        scope = {"type": "http", "method": "POST", "headers": [], "state": {}}
        with pytest.raises(NotHttp):
            await Bodies(app)(scope, receive, send)

    asyncio.run(test())
    assert done == []
