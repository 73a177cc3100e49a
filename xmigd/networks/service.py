"""Networks of jobs on this node: each is a process (carrier.py), which this daemon tells who the other nodes are, and
gives the connections that come from there."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from xmigd import log
from xmigd.checkpoints import proc
from xmigd.checkpoints.manifest import Network
from xmigd.errors import Conflict, Forbidden, Unavailable
from xmigd.networks import carriers
from xmigd.networks.addresses import Addresses, addresses_of, check_range, own_addresses, routes
from xmigd.networks.carrier import PREFIX
from xmigd.networks.carriers import Carrier, Line
from xmigd.peers.known import split_address
from xmigd.peers.links import PeerLinks
from xmigd.store.objects import private_folder

TOPIC = "networks"  # which has no messages: it is to hear of peers
KEY = 32  # digits
STEP = 5.0  # seconds for the first bytes of a connection

logger = log.get("networks")


class Held:
    """A network whose packets are dropped until `release`."""

    def __init__(self, carrier: Carrier, line: Line) -> None:
        self.carrier = carrier
        self._line = line

    async def watch(self, pid: int) -> None:
        """From now on the network ends with this process. Raises Unavailable."""
        await self._line.request("watch", pid=pid)

    async def release(self) -> None:
        """What comes from now on arrives. Raises Unavailable: something may have arrived before."""
        try:
            await self._line.request("release")
        except Unavailable as error:
            raise Unavailable(f"packets were not held: {error.message}", code="packets_not_held") from None


class Networks:
    """Lives in the event loop's thread."""

    def __init__(self, *, links: PeerLinks, folder: Path, range: str, confined: bool) -> None:
        """`range`: of addresses. `confined`: this daemon is a unit of systemd."""
        self._links = links
        self._folder = folder
        self._range = range
        self._confined = confined
        self._carriers: dict[str, Carrier] = {}
        links.other_connections[PREFIX] = self.welcome

    async def find_left(self) -> None:
        """Those that an earlier daemon has started."""
        for path in sorted(self._folder.glob("*")) if self._folder.is_dir() else ():
            try:
                carrier = await carriers.found(path)
            except Unavailable as error:
                logger.warning("a network of a job is left out", key=path.name, why=error.message)
                continue
            if carrier is not None:
                self._add(carrier)

    async def begin(self, nodes: Sequence[str], job_name: str, uid: int, *, runner: int) -> tuple[Addresses, Path]:
        """For a program that begins, and with which this process ends: the network namespace. Raises Conflict, Invalid,
        Forbidden, Unavailable."""
        if uid != 0 or os.geteuid() != 0:
            raise Forbidden("only root's jobs have networks of their own", hint="run it, and xmigd, as root")
        addresses = addresses_of(self._range, nodes, self._links.node, job_name, uid)
        found = await asyncio.to_thread(routes)
        check_range(self._range, found)
        loopback = await asyncio.to_thread(own_addresses)
        carrier = await self._start(addresses, loopback, watch=runner)
        return addresses, carrier.namespace

    @contextlib.asynccontextmanager
    async def made_again(self, network: Network, nodes: Sequence[str], job_name: str, uid: int) -> AsyncIterator[Held]:
        """For a part that is restored, held. It stays if a process is watched meanwhile. Raises Conflict, Invalid,
        Unavailable."""
        addresses = addresses_of(network.range, nodes, self._links.node, job_name, uid)
        if addresses.own != network.place:
            raise Conflict("the part that is here is of another node", code="peer_lies")
        carrier = await self._start(addresses, network.loopback, held=True)
        try:
            yield Held(carrier, carrier.line)
        except BaseException:
            self._drop(carrier)
            raise

    def of(self, root: int) -> Network | None:
        """That of a process, as it is made again."""
        carrier = self._of(root)
        return None if carrier is None else Network(range=carrier.range, place=carrier.own, loopback=carrier.loopback)

    @contextlib.asynccontextmanager
    async def held(self, root: int) -> AsyncIterator[Held]:
        """Nothing that comes arrives, and nothing leaves, in the network of this process. Raises Unavailable."""
        carrier = self._of(root)
        if carrier is None:
            raise Unavailable("the network of the job is not this daemon's", code="packets_not_held")
        try:
            line = Line(carrier.path)
        except OSError as error:
            raise Unavailable(f"packets are not held: {error.strerror}", code="packets_not_held") from None
        try:
            await line.request("hold")
            yield Held(carrier, line)
        finally:
            line.close()

    def _of(self, root: int) -> Carrier | None:
        inode = inode_of(root)
        return next((one for one in self._carriers.values() if one.inode == inode), None)

    async def _start(
        self, addresses: Addresses, loopback: Sequence[str], *, watch: int = 0, held: bool = False
    ) -> Carrier:
        try:
            await asyncio.to_thread(private_folder, self._folder)
        except OSError as error:
            raise Unavailable(f"{self._folder} cannot be made: {error.strerror}", code="job_network_failed") from None
        carrier = await carriers.start(
            self._folder / addresses.key, confined=self._confined, key=addresses.key, nodes=addresses.nodes,
            own=addresses.own, range=addresses.range, prefix=addresses.prefix, addresses=addresses.all,
            loopback=list(loopback), identity=str(self._links.identity.file.resolve()), watch=watch, held=held,
        )  # fmt: skip
        self._add(carrier)
        return carrier

    def _add(self, carrier: Carrier) -> None:
        for one in [one for one in self._carriers.values() if one.line.ended or one.key == carrier.key]:
            self._drop(one)
        self._carriers[carrier.key] = carrier
        self._introduce(carrier, carrier.nodes)

    def _drop(self, carrier: Carrier) -> None:
        carrier.line.close()
        if self._carriers.get(carrier.key) is carrier:
            del self._carriers[carrier.key]

    def _introduce(self, carrier: Carrier, nodes: Sequence[str]) -> None:
        """Where they are, and who."""
        for number, name in enumerate(carrier.nodes):
            if name not in nodes or number == carrier.own:
                continue
            peer = self._links.peer(name)
            address, certificate = ("", 0), ""
            if peer is not None:
                address, certificate = split_address(peer.address), peer.certificate or ""
            if not carrier.line.post("node", number=number, address=address, certificate=certificate):
                logger.warning("the network of a job does not hear of a node", peer=name, key=carrier.key)

    # --- what comes ---------------------------------------------------------------------------------------------------

    async def welcome(self, sock: socket.socket) -> None:
        """A connection whose first byte is ours: whose it is, the carrier finds out. Raises OSError, ValueError."""
        with sock:
            content, loop = b"", asyncio.get_running_loop()
            async with asyncio.timeout(STEP):
                while len(content) < len(PREFIX) + KEY:
                    more = await loop.sock_recv(sock, len(PREFIX) + KEY - len(content))
                    if not more:
                        raise ValueError("the connection ended before it had begun")
                    content += more
            carrier = self._carriers.get(content[len(PREFIX) :].decode("ascii", "replace"))
            if carrier is not None:  # otherwise its part here has not begun: the other side comes again
                carrier.line.post("connection", sock)

    def session(self, peer: str) -> None:
        pass

    def up(self, peer: str) -> None:
        """Its certificate may be known now."""
        for carrier in self._carriers.values():
            self._introduce(carrier, [peer])

    def down(self, peer: str, why: str) -> None:
        """It may be known no more."""
        self.up(peer)

    def received(self, peer: str, body: dict[str, Any]) -> None:
        logger.warning("a message of a peer is left out", peer=peer)


def inode_of(pid: int) -> int:
    """Of its network namespace. 0: it has ended."""
    with contextlib.suppress(*proc.GONE, PermissionError):
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    return 0
