"""The link to one peer: it connects again and again, and its session outlives its connections.

Of two daemons that with the smaller name *leads*: it sends its hello first and decides which session a connection goes
on with. The other's hello is an answer, and from that answer on it takes nothing from an older connection, so what the
hello says stays true. A new session counts for the leader once the other has confirmed it; so neither ever drops a
session that the other still has, unless its daemon has started anew.

Both connect. Of two connections that which the leader made stays, so both daemons choose the same.
"""

from __future__ import annotations

import asyncio
import secrets
import ssl
import time
from collections.abc import Collection
from typing import Any, Literal, Protocol

from xmigd import log
from xmigd.errors import ProtocolError
from xmigd.peers.certificates import Identity, Trust, client_context, fingerprint_of, server_name
from xmigd.peers.connection import (
    CLOSING,
    HEARTBEAT,
    HEARTBEATS,
    LONGEST_HEARTBEAT,
    STEP,
    Connection,
    Pace,
    describe,
)
from xmigd.peers.contract import LONGEST
from xmigd.peers.frames import VERSION, Frame, Kind, frame
from xmigd.peers.known import KnownPeer, split_address
from xmigd.peers.resolve import resolve
from xmigd.peers.session import MOST_KEPT, Session
from xmigd.text import harmless

# Seconds before an attempt: soon after a short disturbance, and then not so often that a peer that is gone costs
# anything.
FIRST_DELAY, LONGEST_DELAY = 0.1, 2.0
LATER = 1.0  # seconds that who does not lead leaves the leader, so that there are seldom two connections
PENDING = 4  # connections whose hello has not come, at most
BATCH = 64 << 10  # bytes that are written at once

State = Literal["connected", "unreachable", "refused"]
logger = log.get("peers")


class Hub(Protocol):
    """What a link needs of the node."""

    node: str
    identity: Identity
    trust: Trust

    def known(self) -> Collection[str]:
        """Names of all peers."""

    async def turn(self) -> None:
        """Until it is this link's turn to connect: all of them together make so many attempts a second."""

    def learned(self, name: str, certificate: str) -> None:
        """The certificate (PEM) with the fingerprint that was entered."""

    def session(self, peer: str) -> None: ...
    def received(self, peer: str, body: dict[str, Any]) -> None: ...
    def down(self, peer: str, why: str) -> None: ...
    def up(self, peer: str) -> None: ...


class Link:
    """Lives in the event loop's thread. Nothing that is called from outside calls a user before it returns."""

    def __init__(self, hub: Hub, peer: KnownPeer) -> None:
        self.peer = peer
        self.pace = Pace()
        self.is_up = False
        self.tried = False  # an attempt has ended, one way or the other
        self.state: State = "unreachable"
        self.why = "there was no attempt yet"
        self.changed_at = time.time()
        self._hub = hub
        self._leads = hub.node < peer.name
        self._loop = asyncio.get_running_loop()
        self._session = Session()
        self._proposed: str | None = None  # a session that the peer may have begun, and the leader has not
        self._connection: Connection | None = None  # whose hello has come
        self._pending: list[Connection] = []
        self._alone = asyncio.Event()
        self._alone.set()
        self._delay = FIRST_DELAY
        self._flushing = False
        self._left = False
        self._task = self._loop.create_task(self._connect())

    def send(self, content: bytes) -> bool:
        """See `Links.send`."""
        if self._session.id is None:
            return False
        if self._session.keep(content) is None:
            self._session.end()
            why = f"the session ends: {MOST_KEPT >> 20} MiB were sent and not received"
            logger.error("a session with a peer is given up", peer=self.peer.name, why=why)
            if self._connection is not None:
                self._connection.end(why, report=why)
            return False
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)
        return True

    def welcome(self, connection: Connection) -> None:
        """One that the peer has made, or this node; it is known that it is this peer's."""
        for old in self._pending[: 1 - PENDING]:
            old.end("it made many connections and greeted on none")
        self._pending.append(connection)
        connection.start(self)
        if self._leads:
            self._greet(connection)

    async def leave(self, why: str) -> None:
        """Close it for ever. Nobody hears of it here; the peer does."""
        self._left = True
        self._task.cancel()
        self._session.end()
        for connection in (*self._pending, *((self._connection,) if self._connection else ())):
            connection.end(why, report=why)
        await asyncio.gather(self._task, return_exceptions=True)

    async def _connect(self) -> None:
        while True:
            await self._alone.wait()
            await asyncio.sleep(self._delay + (0.0 if self._leads else LATER))
            if not self._alone.is_set():
                continue
            self._delay = min(2 * self._delay, LONGEST_DELAY)
            await self._hub.turn()
            if not self._alone.is_set():
                continue
            try:
                connection = await self._dial()
            except (OSError, ValueError) as error:  # SSLError and TimeoutError are OSErrors
                self._change("refused" if describe(error)[1] else "unreachable", describe(error)[0])
                continue
            if connection is not None:
                self.welcome(connection)
                await connection.over.wait()

    async def _dial(self) -> Connection | None:
        """A connection to the peer and nobody else. Raises OSError, also of TLS."""
        context = self._hub.trust.client
        if self.peer.certificate is None:
            context = client_context(self._hub.identity, anybody=True)
        async with asyncio.timeout(STEP):
            connection = await self._reach(context)
        der = connection.certificate()
        if fingerprint_of(der) != self.peer.fingerprint:
            connection.end("it is another one")
            self._change("refused", f"it has a certificate with another fingerprint: {fingerprint_of(der)}")
            return None
        if self.peer.certificate is None:
            self._hub.learned(self.peer.name, ssl.DER_cert_to_PEM_cert(der))
        return connection

    async def _reach(self, context: ssl.SSLContext) -> Connection:
        """At the first of its addresses that answers. Raises OSError: of the last one."""
        failed = OSError("it has no address")
        for host, port in await resolve(*split_address(self.peer.address)):
            connection = Connection(outgoing=True)
            try:
                await self._loop.create_connection(
                    lambda made=connection: made,  # type: ignore[misc]
                    host, port, ssl=context, server_hostname=server_name(self._hub.node),
                    ssl_handshake_timeout=STEP, ssl_shutdown_timeout=CLOSING,
                )  # fmt: skip
                return connection
            except OSError as error:
                failed = error
            except asyncio.CancelledError:
                connection.give_up()
                raise
        raise failed

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        match frame.kind:
            case Kind.HELLO:
                self._on_hello(connection, frame)
            case Kind.BEGIN:
                self._on_begin(connection, frame)
            case Kind.RECEIVED:
                self._on_received(connection, frame.number)
            case Kind.MESSAGE:
                self._on_message(frame)
            case Kind.END:
                why = harmless(str(frame.json().get("why", "")))
                connection.end(f"it ended the connection: {why}", refused=not connection.established)

    def on_read(self, connection: Connection) -> None:
        if connection.established and connection.can_write and self._session.received > connection.reported:
            self.on_beat(connection)

    def on_room(self, connection: Connection) -> None:
        self.on_read(connection)
        self._flush()

    def on_beat(self, connection: Connection) -> None:
        if connection.established and connection.can_write:
            connection.reported = self._session.received
            connection.write(frame(Kind.RECEIVED, self._session.received))

    def on_closed(self, connection: Connection) -> None:
        if connection in self._pending:
            self._pending.remove(connection)
        if self._left:
            return
        if connection is self._connection:
            self._connection = None
            self._alone.set()
        if self._connection is None:
            self._change("refused" if connection.refused else "unreachable", connection.why)
            self._go_down(connection.why)

    def _greet(self, connection: Connection) -> None:
        session = self._session
        hello = {
            "node": self._hub.node, "to": self.peer.name, "session": session.id, "received": session.received,
            "heartbeat": self._heartbeat(),
        }  # fmt: skip
        connection.write(frame(Kind.HELLO, VERSION, hello))

    def _heartbeat(self) -> float:
        """Seconds between two, as this node wants them."""
        return min(max(HEARTBEAT, len(self._hub.known()) / HEARTBEATS), LONGEST_HEARTBEAT)

    def _on_hello(self, connection: Connection, frame: Frame) -> None:
        if connection.greeted:
            raise ProtocolError("a second hello")
        connection.greeted = True
        hello = frame.json()
        theirs = hello.get("heartbeat")  # absent in earlier versions, which expect one each second
        if isinstance(theirs, int | float) and HEARTBEAT <= theirs <= LONGEST_HEARTBEAT:
            connection.beats_each(max(theirs, self._heartbeat()))
        names = (hello.get("node"), hello.get("to"))
        if frame.number != VERSION:
            why = f"version {VERSION} of the protocol is needed, and {names[0]!r} has {frame.number}"
        elif names[0] == self._hub.node:
            why = (
                f"both nodes are called {self._hub.node!r}: give one of them another name by the setting node "
                "(XMIG_NODE), start its xmigd again, and enter it by that name"
            )
        elif names != (self.peer.name, self._hub.node):
            why = f"here it is {self.peer.name!r} and this node {self._hub.node!r}; there {names[0]!r} and {names[1]!r}"
        else:
            why = ""
        if why:
            connection.end(why, report=why, refused=True)
        elif not self._attach(connection):
            connection.end("there is another connection", report="there is another connection")
        elif self._leads:
            self._decide(connection, hello)
        else:
            self._greet(connection)

    def _attach(self, connection: Connection) -> bool:
        """Is it the connection from now on? The older of two that the same node made is gone without this node's
        knowledge."""
        current = self._connection
        if (
            current is not None
            and not current.closed
            and current.outgoing != connection.outgoing
            and current.outgoing == self._leads
        ):
            return False
        self._pending.remove(connection)
        self._connection = connection
        self._alone.clear()
        if current is not None:
            current.end("another connection has taken its place")
        return True

    def _decide(self, connection: Connection, hello: dict[str, Any]) -> None:
        """The leader: which session it goes on with."""
        theirs, received = hello.get("session"), hello.get("received")
        if not (theirs is None or isinstance(theirs, str)) or not isinstance(received, int) or received < 0:
            raise ProtocolError("a hello without a session, or without what was received in it")
        is_known = theirs is not None and theirs == self._session.id and received <= self._session.sent
        is_new = not is_known and (theirs is None or theirs != self._proposed)
        if is_new:
            theirs = self._proposed = secrets.token_hex(16)
        connection.offer = theirs
        content = {"session": theirs, "new": is_new}
        connection.write(frame(Kind.BEGIN, self._session.received if is_known else 0, content))

    def _on_begin(self, connection: Connection, frame: Frame) -> None:
        if self._leads or connection is not self._connection or connection.established:
            raise ProtocolError("a begin that is not due")
        content = frame.json()
        id, is_new = content.get("session"), content.get("new")
        if not isinstance(id, str) or not 1 <= len(id) <= 64 or not isinstance(is_new, bool):
            raise ProtocolError("a begin without a session")
        if is_new:
            self._session.begin(id)
        elif id != self._session.id:
            raise ProtocolError("a session that does not exist is to go on")
        self._establish(connection, frame.number, is_new)

    def _on_received(self, connection: Connection, number: int) -> None:
        if connection.established:
            before = self._session.acknowledged
            self._session.acknowledge(number)
            if self._session.acknowledged > before:
                self._delay = FIRST_DELAY
        elif connection.offer is not None and connection is self._connection:
            is_new = self._session.id != connection.offer
            if is_new:
                self._session.begin(connection.offer)
            self._proposed = None
            self._establish(connection, number, is_new)
        else:
            raise ProtocolError("a receipt before the session")

    def _on_message(self, frame: Frame) -> None:
        body = frame.json()
        if not isinstance(body.get("topic"), str):
            raise ProtocolError("a message without a topic")
        if self._session.accept(frame.number):
            self._delay = FIRST_DELAY
            self._hub.received(self.peer.name, body)

    def _establish(self, connection: Connection, received: int, is_new: bool) -> None:
        """Both have the session. `received`: by the peer."""
        try:
            self._session.acknowledge(received)
        except ProtocolError:
            self._session.end()  # it would go wrong again and again
            raise
        connection.established = True
        self.on_beat(connection)
        if is_new:
            self._go_down("a new session begins")
            logger.info("a session with a peer begins", peer=self.peer.name)
            self._hub.session(self.peer.name)
        self._change("connected", "")
        if not self.is_up:
            self.is_up = True
            self._hub.up(self.peer.name)
        self._flush()

    def _flush(self) -> None:
        self._flushing = False
        connection, session = self._connection, self._session
        if connection is None or not connection.established:
            return
        while connection.can_write and max(connection.cursor, session.acknowledged) < session.sent:
            number = max(connection.cursor, session.acknowledged)
            parts, length = [], 0
            while number < session.sent and length < BATCH:
                number += 1
                parts.append(Frame(Kind.MESSAGE, number, session.kept[number]).encode())
                length += len(parts[-1])
            connection.cursor = number
            connection.write(b"".join(parts))

    def _go_down(self, why: str) -> None:
        if self.is_up:
            self.is_up = False
            self._hub.down(self.peer.name, why)

    def _change(self, state: State, why: str) -> None:
        self.tried = True
        if (state, why) == (self.state, self.why):
            return
        if state != self.state:
            self.changed_at = time.time()
        self.state, self.why = state, why
        if state == "connected":
            logger.info("a peer is connected", peer=self.peer.name, address=self.peer.address)
        else:
            logger.warning(f"a peer is {state}", peer=self.peer.name, address=self.peer.address, why=why)


def check_length(content: bytes) -> None:
    """Raises ValueError."""
    if len(content) > LONGEST:
        raise ValueError(f"a message of {len(content)} bytes; at most {LONGEST} are sent")
