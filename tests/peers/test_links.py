"""Links in one process, over real connections: what a peer with a valid certificate may do, and what it may not."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from xmigd.errors import Conflict
from xmigd.peers.certificates import Identity, client_context, open_identity
from xmigd.peers.connection import Connection
from xmigd.peers.frames import VERSION, Frame, FrameReader, Kind, frame
from xmigd.peers.known import KnownPeer, KnownPeers
from xmigd.peers.link import Link
from xmigd.peers.links import PeerLinks
from xmigd.peers.resolve import MOST, resolve

PATIENCE = 30.0


class Heard:
    """Who notes everything."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.whys: list[str] = []

    def session(self, peer: str) -> None:
        self.events.append("session")

    def received(self, peer: str, body: dict[str, Any]) -> None:
        self.events.append(body["n"])

    def down(self, peer: str, why: str) -> None:
        self.events.append("down")
        self.whys.append(why)

    def up(self, peer: str) -> None:
        self.events.append("up")


class End:
    """A node's links, and who hears of them."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.identity = open_identity(folder)
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.links = self._links()
        self.heard = Heard()
        self.links.register("test", self.heard)

    def _links(self) -> PeerLinks:
        known = KnownPeers(self.folder, self.name, self.identity)
        return PeerLinks(node=self.name, identity=self.identity, known=known, listening=self.socket)

    @property
    def known(self) -> KnownPeer:
        """As others enter it."""
        return KnownPeer(
            self.name, f"127.0.0.1:{self.socket.getsockname()[1]}", self.identity.fingerprint, self.identity.certificate
        )

    def send(self, to: End, number: int) -> bool:
        return self.links.send(to.name, {"topic": "test", "n": number})

    async def restart(self) -> None:
        """As a daemon that is started again."""
        await self.links.close()
        self.links, self.heard = self._links(), Heard()
        self.links.register("test", self.heard)
        await self.links.start()


@contextlib.asynccontextmanager
async def ends(*names: str) -> AsyncIterator[list[End]]:
    """Nodes that know each other."""
    with tempfile.TemporaryDirectory() as folder:
        made = []
        for name in names:
            (Path(folder) / name).mkdir()
            made.append(End(Path(folder) / name, name))
        for here in made:
            await here.links.start()
            for there in made:
                if here is not there:
                    await here.links.add(there.known)
        try:
            yield made
        finally:
            for here in made:
                await here.links.close()
                here.socket.close()


async def until(condition: Callable[[], bool], what: str) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.005)
    assert condition(), what


class Raw:
    """A peer that sends what it likes: it has the key of `identity`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str, to: str) -> None:
        self._reader, self._writer, self._frames = reader, writer, FrameReader()
        self.name, self.to = name, to

    @classmethod
    async def connect(cls, to: End, identity: Identity, name: str) -> Self:
        context = client_context(identity, to.identity.certificate)
        host, port = to.socket.getsockname()
        return cls(*await asyncio.open_connection(host, port, ssl=context), name, to.name)

    def send(self, kind: Kind, number: int = 0, content: dict[str, Any] | None = None) -> None:
        self._writer.write(frame(kind, number, content))

    def send_bytes(self, data: bytes) -> None:
        self._writer.write(data)

    async def next(self) -> Frame | None:
        """None: it is closed."""
        async with asyncio.timeout(PATIENCE):
            while (found := self._frames.next(messages=True)) is None:
                try:
                    data = await self._reader.read(4096)
                except OSError:
                    return None
                if not data:
                    return None
                self._frames.feed(data)
            return found

    async def until_closed(self) -> str:
        """Why, as it was reported."""
        why = ""
        while (found := await self.next()) is not None:
            if found.kind is Kind.END:
                why = found.json()["why"]
        return why

    def greet(self, session: str | None = None, received: int = 0) -> None:
        hello = {"node": self.name, "to": self.to, "session": session, "received": received}
        self.send(Kind.HELLO, VERSION, hello)

    async def begin(self) -> str:
        """With a node that leads: to the session."""
        found = await self.next()
        assert found is not None
        assert found.kind is Kind.HELLO
        self.greet()
        found = await self.next()
        assert found is not None
        assert found.kind is Kind.BEGIN
        self.send(Kind.RECEIVED, 0)
        return str(found.json()["session"])

    def close(self) -> None:
        self._writer.close()


@contextlib.asynccontextmanager
async def raw_peer(node: str, peer: str) -> AsyncIterator[tuple[End, Callable[[], Coroutine[Any, Any, Raw]]]]:
    """A node, and connections to it of a known peer that is not there otherwise."""
    async with ends(node, peer) as (end, other):
        await other.links.close()
        other.socket.close()
        made: list[Raw] = []

        async def connect() -> Raw:
            made.append(await Raw.connect(end, other.identity, peer))
            return made[-1]

        yield end, connect
        for each in made:
            each.close()


def test_sessions_connections_and_restarts() -> None:
    async def run() -> None:
        async with ends("a", "b") as (a, b):
            await until(lambda: a.links.connected("b") and b.links.connected("a"), "connected")
            assert (a.links.known(), b.links.known()) == (("b",), ("a",))
            assert a.send(b, 1)
            await until(lambda: b.heard.events == ["session", "up", 1], "it arrives")
            old = b.heard
            await b.restart()
            assert not b.links.tried("a")
            await until(lambda: a.heard.events == ["session", "up", "down", "session", "up"], "a new session")
            assert b.links.tried("a")
            assert (a.send(b, 2), old.events) == (True, ["session", "up", 1])
            await until(lambda: b.heard.events == ["session", "up", 2], "it arrives in the new one")
            await b.links.remove("a")
            assert b.heard.events[3:] == ["down"]
            assert not b.send(a, 3)
            await until(lambda: not a.links.connected("b"), "the other side notices")
            await b.links.add(a.known)
            await until(lambda: b.heard.events[4:] == ["session", "up"], "known again")

    asyncio.run(run())


def signed_by(identity: Identity, file: Path) -> Identity:
    """A new key, whose certificate this one has signed, as if it could."""
    pem = identity.file.read_bytes()
    signer = serialization.load_pem_private_key(pem, None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    issuer = x509.load_pem_x509_certificate(pem[pem.index(b"-----BEGIN CERT") :])
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "signed")]))
        .issuer_name(issuer.subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(issuer.not_valid_before_utc)
        .not_valid_after(issuer.not_valid_after_utc)
        .sign(signer, hashes.SHA256())
    )
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    private = key.private_bytes(encoding, form, serialization.NoEncryption())
    file.write_bytes(private + certificate.public_bytes(encoding) + identity.certificate.encode())
    return Identity(file, identity.certificate, identity.fingerprint)


def test_a_peer_lets_nobody_else_in(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """That its certificate is trusted says nothing of what it signs."""

    async def run() -> None:
        async with ends("a", "b") as (a, b):
            await until(lambda: a.links.connected("b"), "connected")
            raw = await Raw.connect(a, signed_by(b.identity, tmp_path / "signed.pem"), "b")
            assert await raw.next() is None
            raw.close()
            assert a.heard.events == ["session", "up"]

    asyncio.run(run())
    assert "a connection to this node is refused" in "".join(capfd.readouterr())


def test_names_of_hosts_are_looked_up_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = threading.Event()

    def nobody_answers(*_: object, **__: object) -> Any:
        answer.wait()
        return [(0, 0, 0, "", ("127.0.0.1", 1))]

    async def run() -> None:
        assert ("127.0.0.1", 7) in await resolve("localhost", 7)
        monkeypatch.setattr(socket, "getaddrinfo", nobody_answers)
        lookups = [asyncio.create_task(resolve(f"host{number}", 1)) for number in range(MOST)]
        await asyncio.sleep(0)
        with pytest.raises(OSError, match="nobody answers"):
            await resolve("another", 1)
        assert await resolve("::1", 1) == [("::1", 1)]  # no name
        lookups[0].cancel()
        answer.set()
        assert await asyncio.gather(*lookups[1:]) == [[("127.0.0.1", 1)]] * (MOST - 1)

    asyncio.run(run())


def test_a_peer_is_removed_while_another_one_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What TLS accepts is loaded beside the loop, and what is learned meanwhile is not lost."""

    async def run() -> None:
        async with ends("a", "b", "c") as (a, b, c):
            await until(lambda: a.links.connected("b") and a.links.connected("c"), "they are connected")
            await b.links.close()
            await a.links.remove("b")
            await a.links.add(replace(b.known, certificate=None))
            makes, may, made_for = asyncio.Event(), threading.Event(), a.links.trust.made_for
            loop = asyncio.get_running_loop()

            def late(trusted: Iterable[str]) -> Any:
                loop.call_soon_threadsafe(makes.set)
                assert may.wait(PATIENCE)
                return made_for(trusted)

            monkeypatch.setattr(a.links.trust, "made_for", late)
            removing = asyncio.ensure_future(a.links.remove("c"))
            async with asyncio.timeout(PATIENCE):
                await makes.wait()
            gone = await Raw.connect(a, c.identity, "c")
            assert await gone.next() is None
            gone.close()
            a.links.learned("b", b.identity.certificate)
            await asyncio.sleep(0)
            may.set()
            await removing
            raw = await Raw.connect(a, b.identity, "b")
            assert await raw.next() is not None  # a hello
            raw.close()

    asyncio.run(run())


def test_many_connections_at_once_make_one_session() -> None:
    """Both connect as soon as they can, again and again: they choose the same connection, and nothing is lost."""

    async def run() -> None:
        async with ends("a", "b") as (a, b):
            await until(lambda: a.links.connected("b") and b.links.connected("a"), "connected")
            for number in range(1, 201):
                assert a.send(b, number)
                assert b.send(a, number)
                if number % 10 == 0:
                    links = [each.links.links()[0] for each in (a, b)]
                    dialled = await asyncio.gather(*(link._dial() for link in (*links, *links)))
                    for link, connection in zip((*links, *links), dialled, strict=True):
                        assert connection is not None
                        link.welcome(connection)
                    await asyncio.sleep(0)
            for heard in (a.heard, b.heard):
                await until(lambda: heard.events.count(200) == 1, "all arrive")  # noqa: B023
                assert [event for event in heard.events if isinstance(event, int)] == list(range(1, 201))
                assert heard.events.count("session") == 1
            await until(lambda: a.links.connected("b") and b.links.connected("a"), "connected at the end")

    asyncio.run(run())


def test_of_two_connections_that_of_the_leader_stays() -> None:
    async def run() -> None:
        async with ends("a", "b") as (a, b):
            await until(lambda: a.links.connected("b") and b.links.connected("a"), "connected")
            (of_a,), (of_b,) = a.links.links(), b.links.links()

            async def both(first: Link, second: Link) -> tuple[Connection, Connection]:
                """A connection that one makes when there is none, and then one of the other's."""
                for link in (of_a, of_b):
                    if link._connection is not None:
                        link._connection.end("the test begins anew")
                made = []
                for link in (first, second):
                    connection = await link._dial()
                    assert connection is not None
                    link.welcome(connection)
                    made.append(connection)
                    if link is first:
                        await until(lambda: connection.established, "it is the connection")  # noqa: B023
                return made[0], made[1]

            leaders, others = await both(of_a, of_b)
            await until(lambda: others.closed, "the other one is not needed")
            assert leaders.established
            others, leaders = await both(of_b, of_a)
            await until(lambda: others.closed, "the other one is not needed")
            await until(lambda: leaders.established, "the leader's is the connection now")
            assert a.heard.events.count("session") == b.heard.events.count("session") == 1

    asyncio.run(run())


def test_what_cannot_be_sent_or_registered() -> None:
    async def run() -> None:
        async with ends("a", "b") as (a, b):
            with pytest.raises(Conflict):
                a.links.register("other", Heard())  # they have begun
            await until(lambda: a.links.connected("b"), "connected")
            for body in (
                {"n": 1},
                {"topic": 1},
                {"topic": "test", "x": float("nan")},
                {"topic": "t", "x": "x" * (1 << 20)},
            ):
                with pytest.raises(ValueError, match=r"\w"):
                    a.links.send("b", body)
            assert not a.links.send("nobody", {"topic": "test"})
            assert a.links.send("b", {"topic": "nobody's"})  # nobody there reads it
            longest = "x" * ((1 << 20) - len('{"topic":"test","n":1,"x":""}'))
            assert a.links.send("b", {"topic": "test", "n": 1, "x": longest})
            await until(lambda: b.heard.events == ["session", "up", 1], "the longest arrives")

    asyncio.run(run())


def test_a_user_that_fails_keeps_nothing_from_going_on(capfd: pytest.CaptureFixture[str]) -> None:
    async def run() -> None:
        async with ends("a", "b") as (a, b):
            await until(lambda: a.links.connected("b") and b.links.connected("a"), "connected")
            assert a.links.send("b", {"topic": "test"})  # no number: a KeyError
            assert a.send(b, 2)
            await until(lambda: b.heard.events == ["session", "up", 2], "the next one arrives")

    asyncio.run(run())
    assert "a user of the links failed" in "".join(capfd.readouterr())


def object_bytes(kind: Kind, number: int, content: bytes) -> bytes:
    return Frame(kind, number, content).encode()


TO_LEADERS = {
    "a gap": (frame(Kind.MESSAGE, 2, {"topic": "test", "n": 2}), "message 2 after 0"),
    "zero": (frame(Kind.MESSAGE, 0, {"topic": "test", "n": 2}), "message 0 after 0"),
    "no topic": (frame(Kind.MESSAGE, 1, {"n": 2}), "topic"),
    "no JSON": (object_bytes(Kind.MESSAGE, 1, b"{"), "no JSON"),
    "nested": (object_bytes(Kind.MESSAGE, 1, b"[" * 100_000), "no JSON"),
    "no object": (object_bytes(Kind.MESSAGE, 1, b"[1]"), "no object"),
    "a receipt for nothing": (frame(Kind.RECEIVED, 1), "1 messages of 0"),
    "a second hello": (frame(Kind.HELLO, VERSION, {}), "second hello"),
    "a begin": (frame(Kind.BEGIN, 0, {"session": "x", "new": True}), "not due"),
    "no kind": (bytes(13), "unknown kind"),
}


@pytest.mark.parametrize("name", TO_LEADERS)
def test_what_is_not_allowed_ends_the_connection_with_a_reason(name: str) -> None:
    async def run() -> None:
        data, why = TO_LEADERS[name]
        async with raw_peer("a", "b") as (a, connect):
            raw = await connect()
            session = await raw.begin()
            await until(lambda: a.heard.events == ["session", "up"], "established")
            raw.send_bytes(data)
            assert why in await raw.until_closed()
            await until(lambda: a.heard.events == ["session", "up", "down"], "down")
            assert why in a.heard.whys[0]
            # The session goes on: a well-behaved one is welcome.
            again = await connect()
            assert await again.next() is not None
            again.greet(session)
            found = await again.next()
            assert found is not None
            assert found.json() == {"session": session, "new": False}
            again.send(Kind.RECEIVED, 0)
            again.send(Kind.MESSAGE, 1, {"topic": "test", "n": 7})
            await until(lambda: a.heard.events[3:] == ["up", 7], "it goes on")

    asyncio.run(run())


@pytest.mark.parametrize(
    ("hello", "why"),
    [
        ({"node": "a"}, "both nodes are called 'a': give one of them another name by the setting node"),
        ({"node": "c"}, "'c'"), ({"to": "c"}, "'c'"), ({"node": None}, "None"), ({"session": 1}, "without a session"),
        ({"received": -1}, "received"), ({"received": "1"}, "received"), ({"received": None}, "received"),
    ],
)  # fmt: skip
def test_hellos_that_are_refused(hello: dict[str, Any], why: str) -> None:
    async def run() -> None:
        async with raw_peer("a", "b") as (a, connect):
            raw = await connect()
            raw.send(Kind.HELLO, VERSION, {"node": "b", "to": "a", "session": None, "received": 0} | hello)
            assert why in await raw.until_closed()
            raw = await connect()
            raw.send(Kind.HELLO, VERSION + 1, {"node": "b", "to": "a", "session": None, "received": 0})
            assert "version" in await raw.until_closed()
            raw = await connect()
            raw.send(Kind.MESSAGE, 1, {"topic": "test", "n": 1})
            assert "before the session" in await raw.until_closed()
            raw = await connect()
            raw.send(Kind.RECEIVED, 0)
            assert "before the session" in await raw.until_closed()
            assert a.heard.events == []

    asyncio.run(run())


@pytest.mark.parametrize(
    ("begin", "why"),
    [
        ({"session": "x", "new": False}, "does not exist"), ({"session": None, "new": True}, "without a session"),
        ({"session": "", "new": True}, "without a session"), ({"session": "x"}, "without a session"), ({}, "without"),
    ],
)  # fmt: skip
def test_begins_that_are_refused(begin: dict[str, Any], why: str) -> None:
    async def run() -> None:
        async with raw_peer("z", "b") as (z, connect):
            raw = await connect()
            raw.greet()
            assert await raw.next() is not None
            raw.send(Kind.BEGIN, 0, begin)
            assert why in await raw.until_closed()
            assert z.heard.events == []
            raw = await connect()
            raw.greet()
            raw.send(Kind.BEGIN, 0, {"session": "x", "new": True})
            await until(lambda: z.heard.events == ["session", "up"], "a good one")
            raw.send(Kind.BEGIN, 0, {"session": "x", "new": True})
            assert "not due" in await raw.until_closed()

    asyncio.run(run())


def test_messages_that_come_twice_count_once() -> None:
    async def run() -> None:
        async with raw_peer("a", "b") as (a, connect):
            raw = await connect()
            await raw.begin()
            for number in (1, 1, 2, 1, 2, 3):
                raw.send(Kind.MESSAGE, number, {"topic": "test", "n": number})
            await until(lambda: a.heard.events == ["session", "up", 1, 2, 3], "each once")

    asyncio.run(run())


def test_a_begin_that_is_lost_loses_no_session() -> None:
    """The other has begun it, and its confirmation was lost with the connection: the leader goes on with it."""

    async def run() -> None:
        async with raw_peer("a", "b") as (a, connect):
            raw = await connect()
            assert await raw.next() is not None
            raw.greet()
            found = await raw.next()
            assert found is not None
            session = found.json()["session"]
            raw.close()
            await raw.until_closed()
            assert a.heard.events == []
            raw = await connect()
            assert await raw.next() is not None
            raw.greet(session)
            found = await raw.next()
            assert found is not None
            assert found.json() == {"session": session, "new": False}
            raw.send(Kind.RECEIVED, 0)
            raw.send(Kind.MESSAGE, 1, {"topic": "test", "n": 1})
            await until(lambda: a.heard.events == ["session", "up", 1], "it is the session")

    asyncio.run(run())


def test_a_newer_connection_takes_the_place_of_one_that_is_gone() -> None:
    async def run() -> None:
        async with raw_peer("a", "b") as (a, connect):
            old = await connect()
            session = await old.begin()
            await until(lambda: a.heard.events == ["session", "up"], "established")
            new = await connect()
            assert await new.next() is not None
            new.greet(session)
            assert await new.next() is not None
            new.send(Kind.RECEIVED, 0)
            await old.until_closed()
            new.send(Kind.MESSAGE, 1, {"topic": "test", "n": 1})
            await until(lambda: a.heard.events == ["session", "up", 1], "without going down")

    asyncio.run(run())


def test_who_begins_nothing_is_closed() -> None:
    async def run() -> None:
        async with raw_peer("a", "b") as (a, connect):
            silent = [await connect() for _ in range(6)]
            for raw in silent[:2]:  # there are four at a time
                await raw.until_closed()
            for raw in silent[2:]:
                await raw.until_closed()  # after 5 s
            assert a.heard.events == []

    asyncio.run(run())


def test_a_flood_is_slowed_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xmigd.peers.connection.FRAMES_A_SECOND", 100)

    async def run() -> None:
        async with raw_peer("a", "b") as (a, connect):
            raw = await connect()
            await raw.begin()
            await until(lambda: a.heard.events == ["session", "up"], "established")
            loop = asyncio.get_running_loop()
            began = loop.time()
            for number in range(1, 301):
                raw.send(Kind.MESSAGE, number, {"topic": "test", "n": number})
            await until(lambda: a.heard.events[-1] == 300, "all arrive")
            assert loop.time() - began > 1.5  # 300 of which 100 come at once
            assert a.heard.events[2:] == list(range(1, 301))

    asyncio.run(run())
