"""All links of this node, and the door at which peers knock.

Whoever connects has to show, in TLS, the certificate of a known peer and have its key, before a byte of theirs is read.
Strangers get no answer, and a line in the log that says which name they claim.
"""

from __future__ import annotations

import asyncio
import contextvars
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from typing import Any

from xmigd import log
from xmigd.errors import Conflict, Unavailable
from xmigd.peers.certificates import Identity, Trust, claims, fingerprint_of
from xmigd.peers.connection import CLOSING, STEP, Connection, describe
from xmigd.peers.contract import Body, Users
from xmigd.peers.frames import write_object
from xmigd.peers.known import KnownPeer, KnownPeers
from xmigd.peers.link import Link, check_length
from xmigd.text import harmless

# Connections that have not yet shown who they are. Beyond that newcomers are closed at once: peers come again.
GUESTS = 32
GUESTS_OF_ADDRESS = 8
QUIET = 10.0  # seconds between two lines about one address
ADDRESSES = 256  # that are remembered for that
# Attempts to connect in a second, of all links together: each takes a millisecond or two, and a thousand peers that are
# gone are to cost no more than a few. With as many peers as that each has its turn when it wants it.
ATTEMPTS = 64

logger = log.get("peers")


class PeerLinks:
    """Lives in the event loop's thread. See `xmigd.peers.contract.Links`."""

    def __init__(
        self, *, node: str, identity: Identity, known: KnownPeers, listening: socket.socket | None = None
    ) -> None:
        """`listening`: where peers connect; None: this node only connects to others."""
        self.node = node
        self.identity = identity
        self._known = known
        self._listening = listening
        self._accepting: int | None = None  # the descriptor that is watched
        self._links: dict[str, Link] = {}
        self._users: dict[str, Users] = {}
        # Connections for something else than messages, by their first byte. It returns when it is known who is there.
        self.other_connections: dict[bytes, Callable[[socket.socket], Awaitable[None]]] = {}
        self._started = self._closed = False
        self._guests: dict[asyncio.Task[None], str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.trust = Trust(identity)
        self._next_turn = 0.0
        self._writing = asyncio.Lock()
        self._unwritten = False  # certificates that were learned
        self._noted: dict[str, float] = {}

    def register(self, topic: str, users: Users) -> None:
        """Who gets messages with this topic, and hears of sessions and connections. Before `start`. Raises Conflict."""
        if self._started or topic in self._users:
            raise Conflict(f"the topic {topic} has its users, or the links have begun")
        self._users[topic] = users

    async def start(self) -> None:
        """Connect, and let others connect."""
        self._started = True
        await self._trust_known()
        for peer in self._known:
            self._links[peer.name] = Link(self, peer)
        if self._listening is not None:
            self._listening.setblocking(False)
            self._accept_from(self._listening)

    async def close(self) -> None:
        """Leave all peers, who hear why. Nothing is called any more."""
        self._closed = True
        if self._accepting is not None:  # a number: the socket may be closed already
            asyncio.get_running_loop().remove_reader(self._accepting)
        tasks = [*self._tasks, *self._guests]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(link.leave("the daemon stops") for link in self._links.values()))

    def known(self) -> Collection[str]:
        return tuple(self._links)

    def send(self, peer: str, body: Body) -> bool:
        if not isinstance(body.get("topic"), str):
            raise ValueError("a message needs a topic")
        content = write_object(body)
        check_length(content)
        link = self._links.get(peer)
        return link is not None and link.send(content)

    def connected(self, peer: str) -> bool:
        link = self._links.get(peer)
        return link is not None and link.is_up

    def tried(self, peer: str) -> bool:
        link = self._links.get(peer)
        return link.tried if link is not None else self._started  # nobody connects with whom nobody knows

    def peer(self, name: str) -> KnownPeer | None:
        """As it is known. Every thread may ask."""
        link = self._links.get(name)
        return None if link is None else link.peer

    def named(self, fingerprint: str) -> str | None:
        """The peer whose certificate has this fingerprint. Every thread may ask."""
        peer = self._known.named(fingerprint)
        return None if peer is None else peer.name

    def links(self) -> list[Link]:
        """In the order of their names."""
        return [self._links[name] for name in sorted(self._links)]

    async def add(self, peer: KnownPeer) -> Link:
        """It is on the disk when this returns. Raises Invalid, Conflict, or Unavailable."""
        async with self._writing:
            self._known.check(peer)
            await self._write(self._known.content(also=peer))
            self._known.put(peer)
            if peer.certificate is not None:
                self.trust.add(peer.certificate)
            # A link outlives the request, and its lines in the log are not about that.
            link = self._links[peer.name] = contextvars.Context().run(Link, self, peer)
        logger.info("a peer is known", peer=peer.name, address=peer.address, fingerprint=peer.fingerprint)
        return link

    async def remove(self, name: str) -> None:
        """Nobody with its certificate gets in any more. Raises NotFound, or Unavailable."""
        async with self._writing:
            self._known.find(name)
            await self._write(self._known.content(without=name))
            self._known.drop(name)  # from here on nobody is taken for it, whom TLS may accept yet
            link = self._links.pop(name)
            why = "this node does not know that peer any more"
            await link.leave(why)
            if link.is_up:
                link.is_up = False
                self.down(name, why)
            await self._trust_known()
        logger.info("a peer is removed", peer=name)

    async def turn(self) -> None:
        now = time.monotonic()
        self._next_turn = max(self._next_turn, now) + 1 / ATTEMPTS
        await asyncio.sleep(self._next_turn - 1 / ATTEMPTS - now)

    async def _trust_known(self) -> None:
        """TLS accepts the certificates of known peers, and no others. Made in a thread: the loop recovers programs."""
        loaded = frozenset(peer.certificate for peer in self._known if peer.certificate is not None)
        self.trust.server, self.trust.client = await asyncio.to_thread(self.trust.made_for, loaded)
        for peer in self._known:
            if peer.certificate is not None and peer.certificate not in loaded:  # learned meanwhile
                self.trust.add(peer.certificate)

    def learned(self, name: str, certificate: str) -> None:
        self._spawn(self._keep(name, certificate))

    def session(self, peer: str) -> None:
        for users in self._users.values():
            _call(users.session, peer)

    def received(self, peer: str, body: dict[str, Any]) -> None:
        users = self._users.get(body["topic"])
        if users is not None:
            _call(users.received, peer, body)
        elif self._may_note(f"{peer}'s topics"):
            logger.warning("a peer sends what nobody here reads", peer=peer, topic=body["topic"][:64])

    def down(self, peer: str, why: str) -> None:
        for users in self._users.values():
            _call(users.down, peer, why)

    def up(self, peer: str) -> None:
        for users in self._users.values():
            _call(users.up, peer)

    async def _keep(self, name: str, certificate: str) -> None:
        link = self._links.get(name)
        if link is None or fingerprint_of(certificate) != link.peer.fingerprint:
            return  # it was removed meanwhile
        link.peer = self._known.learn(name, certificate)
        self.trust.add(certificate)
        if self._unwritten:
            return  # whoever waits for the disk writes this one, too
        self._unwritten = True
        async with self._writing:
            self._unwritten = False
            try:
                await self._write(self._known.content())
            except Unavailable as error:  # it is learned again by the next daemon
                logger.warning("certificates of peers are not kept", why=error.message)

    async def _write(self, content: bytes) -> None:
        try:
            await asyncio.to_thread(self._known.write, content)
        except OSError as error:
            raise Unavailable(
                f"the known peers cannot be written: {error.strerror}", hint="nothing was changed"
            ) from None

    def _accept_from(self, listening: socket.socket) -> None:
        if not self._closed:
            self._accepting = listening.fileno()
            asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    def _accept(self, listening: socket.socket) -> None:
        # No task waits for it: cancelled in the wrong moment, it would lose what was accepted, which then stays open.
        loop = asyncio.get_running_loop()
        try:
            sock, address = listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:  # no descriptors: there may be some soon
            if self._may_note("accept"):
                logger.error("peers cannot connect", why=error.strerror)
            loop.remove_reader(listening)
            loop.call_later(0.1, self._accept_from, listening)
            return
        sock.setblocking(False)
        host = str(address[0])
        if len(self._guests) >= GUESTS or Counter(self._guests.values())[host] >= GUESTS_OF_ADDRESS:
            sock.close()
            self._refuse(host, "", "there are too many that have not shown who they are")
            return
        task = loop.create_task(self._welcome(sock, host))
        self._guests[task] = host
        task.add_done_callback(partial(self._is_welcomed, sock))

    def _is_welcomed(self, sock: socket.socket, task: asyncio.Task[None]) -> None:
        self._guests.pop(task, None)
        if task.cancelled():  # perhaps before it began: nobody else closes it
            sock.close()

    async def _welcome(self, sock: socket.socket, host: str) -> None:
        claimed: list[str] = []
        claims.set(claimed)
        connection = Connection(outgoing=False)
        try:
            async with asyncio.timeout(STEP):
                other = self.other_connections.get(await first_byte(sock))
            if other is not None:
                await other(sock)
                return
            async with asyncio.timeout(STEP):
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: connection, sock, ssl=self.trust.server, ssl_handshake_timeout=STEP,
                    ssl_shutdown_timeout=CLOSING,
                )  # fmt: skip
        except (OSError, ValueError) as error:
            sock.close()
            self._refuse(host, "".join(claimed), describe(error)[0])
            return
        except asyncio.CancelledError:
            connection.give_up()
            raise
        fingerprint = fingerprint_of(connection.certificate())
        peer = self._known.named(fingerprint)
        link = None if peer is None else self._links.get(peer.name)
        if link is None:
            connection.end("nobody knows it")
            self._refuse(host, "".join(claimed), f"nobody here has the fingerprint {fingerprint}")
            return
        link.welcome(connection)

    def _refuse(self, host: str, claimed: str, why: str) -> None:
        if self._may_note(host):
            name = harmless(claimed, 64) or None
            logger.warning("a connection to this node is refused", address=host, claims_to_be=name, why=why)

    def _may_note(self, about: str) -> bool:
        now = time.monotonic()
        if now - self._noted.get(about, -QUIET) < QUIET:
            return False
        if len(self._noted) >= ADDRESSES:
            self._noted.clear()
        self._noted[about] = now
        return True

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def first_byte(sock: socket.socket) -> bytes:
    """Of what comes, which is left there. Empty: nothing will come. Raises OSError."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sock, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(sock)
    return sock.recv(1, socket.MSG_PEEK)


def _call(callback: Any, *arguments: Any) -> None:
    try:
        callback(*arguments)
    except Exception:
        logger.exception("a user of the links failed", callback=callback.__qualname__)
