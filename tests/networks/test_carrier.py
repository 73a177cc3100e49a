"""The process that is a job's network on a node, with the test as its daemon, and as the daemon of the other node."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import ssl
import struct
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from tests.harness import wait_until
from tests.namespaces import needs_networks
from xmigd.errors import Conflict, Unavailable
from xmigd.networks import carriers
from xmigd.networks.carrier import DEVICE, GUESTS, MTU, NEWNET, PREFIX, QUEUE, context_of
from xmigd.networks.carriers import Carrier, Line
from xmigd.peers.certificates import Identity, open_identity

pytestmark = needs_networks

OWN, OTHER, THIRD = "198.18.0.1", "198.18.0.2", "198.18.0.3"
KEY = "a" * 32
PROBE = b"?"
PORT = 4000
Kind = TypeVar("Kind")


class Node:
    """One of two nodes, with the third as a stranger."""

    def __init__(self, folder: Path) -> None:
        self.identities: dict[str, Identity] = {}
        for name in ("one", "two", "three"):
            (folder / name).mkdir()
            self.identities[name] = open_identity(folder / name)
        self.path = folder / KEY
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.listening.settimeout(30)
        self.carrier: Carrier

    async def begin(self, *, watch: int = 0, confined: bool = False) -> None:
        self.carrier = await carriers.start(
            self.path, confined=confined, key=KEY, nodes=["one", "two"], own=0, range="198.18.0.0/24", prefix=24,
            addresses=[OWN, OTHER], loopback=["192.0.2.7"], identity=str(self.identities["one"].file), watch=watch,
            held=False,
        )  # fmt: skip
        self.introduce(self.identities["two"].certificate)

    def introduce(self, certificate: str) -> None:
        self.carrier.line.post("node", number=1, address=self.listening.getsockname(), certificate=certificate)

    def inside(self, make: Callable[[], Kind]) -> Kind:
        """In the job's network."""
        made: list[Kind] = []

        def enter() -> None:
            with open(self.carrier.namespace) as namespace:
                assert ctypes.CDLL(None).setns(namespace.fileno(), NEWNET) == 0
            made.append(make())

        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        return made[0]

    def udp(self) -> socket.socket:
        def make() -> socket.socket:
            sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            sock.bind((OWN, PORT))
            sock.settimeout(30)
            return sock

        return self.inside(make)

    def comes(self) -> ssl.SSLSocket:
        """What the carrier sends to the other node."""
        sock, _ = self.listening.accept()
        sock.settimeout(30)
        assert sock.recv(len(PREFIX) + len(KEY), socket.MSG_WAITALL) == PREFIX + KEY.encode()
        identities = self.identities
        context = context_of(
            ssl.PROTOCOL_TLS_SERVER, str(identities["two"].file), identities["one"].certificate
        )  # fmt: skip
        return context.wrap_socket(sock, server_side=True)

    def connection(self) -> socket.socket:
        """To the carrier, as the daemon gives it."""
        with socket.create_server(("127.0.0.1", 0)) as listening:
            sock = socket.create_connection(listening.getsockname())
            sock.settimeout(30)
            theirs, _ = listening.accept()
            with theirs:
                assert self.carrier.line.post("connection", theirs)
        return sock

    def goes(self, who: str = "two") -> ssl.SSLSocket:
        """To the carrier, from this node."""
        context = context_of(
            ssl.PROTOCOL_TLS_CLIENT, str(self.identities[who].file), self.identities["one"].certificate
        )  # fmt: skip
        return context.wrap_socket(self.connection())


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.listening.close()


@contextlib.asynccontextmanager
async def begun(node: Node) -> AsyncIterator[Node]:
    await node.begin()
    try:
        yield node
    finally:
        node.carrier.line.close()  # with which it ends
        wait_until(lambda: not node.path.exists(), "it has ended")


def packet(content: bytes, source: str = OTHER, target: str = OWN) -> bytes:
    """Of UDP."""
    inner = struct.pack(">HHHH", PORT, PORT, 8 + len(content), 0) + content
    return of_ip(inner, socket.IPPROTO_UDP, source, target)


def of_ip(inner: bytes, protocol: int, source: str = OTHER, target: str = OWN) -> bytes:
    header = struct.pack(
        ">BBHHHBBH4s4s", 0x45, 0, 20 + len(inner), 0, 0, 64, protocol, 0, ip(source), ip(target)
    )  # fmt: skip
    return header[:10] + checksum(header) + header[12:] + inner


def checksum(content: bytes) -> bytes:
    total = sum(struct.unpack(f">{len(content) // 2}H", content))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return struct.pack(">H", ~total & 0xFFFF)


def ends(sock: ssl.SSLSocket) -> bool:
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        return sock.recv(1) == b""
    return True


def reaches(inside: socket.socket, comes: ssl.SSLSocket) -> None:
    """Return once that is so: what is sent before the carrier has noticed that it is connected is dropped."""
    usual = comes.gettimeout()
    comes.settimeout(0.1)
    for _ in range(300):
        inside.sendto(PROBE, (OTHER, PORT))
        with contextlib.suppress(TimeoutError):
            assert whole(comes)[28:] == PROBE
            comes.settimeout(usual)
            return
    raise AssertionError("nothing comes")


def received(comes: ssl.SSLSocket) -> bytes:
    """The next packet that is no probe."""
    while (found := whole(comes))[28:] == PROBE:
        pass
    return found


def whole(comes: ssl.SSLSocket) -> bytes:
    """A packet."""
    found = comes.recv(20)
    return found + comes.recv(struct.unpack_from(">H", found, 2)[0] - len(found))


def test_packets_go_and_come(node: Node) -> None:
    async def run() -> None:
        async with begun(node):
            with node.udp() as inside, node.comes() as comes, node.goes() as goes:
                reaches(inside, comes)
                inside.sendto(b"there", (OTHER, PORT))
                found = received(comes)
                assert (found[12:20], found[28:]) == (ip(OWN) + ip(OTHER), b"there")
                # Several in one record, one in several, and one that fills the device.
                for content in (b"back", b"again", b"x" * (MTU - 28)):
                    goes.sendall(packet(content))
                assert [inside.recv(1 << 16) for _ in range(2)] == [b"back", b"again"]
                assert len(inside.recv(1 << 16)) == MTU - 28
                # The host's own address is inside, and nobody else is.
                node.inside(lambda: socket.create_server(("192.0.2.7", 0)).close())

    asyncio.run(run())


def ip(address: str) -> bytes:
    return socket.inet_aton(address)


HOSTILE = {
    "from another node": packet(b"x", source=THIRD),
    "from this one": packet(b"x", source=OWN),
    "to another node": packet(b"x", target=THIRD),
    "to everybody": packet(b"x", target="198.18.0.255"),
    "no IPv4": b"\x60" + packet(b"x")[1:],
    "shorter than its header": packet(b"x")[:2] + struct.pack(">H", 19) + packet(b"x")[4:],
    "longer than the device takes": packet(b"x")[:2] + struct.pack(">H", MTU + 1) + packet(b"x")[4:],
}


def test_a_peer_that_lies(node: Node) -> None:
    """Its connection ends, nothing of it comes, and the next one is heard."""

    async def run() -> None:
        async with begun(node):
            with node.udp() as inside:
                for what, content in HOSTILE.items():
                    with node.goes() as goes:
                        goes.sendall(content + packet(what.encode()))
                        assert ends(goes), what
                with node.goes() as goes:
                    goes.sendall(packet(b"honest"))
                    assert inside.recv(100) == b"honest"

    asyncio.run(run())


def test_a_stranger_is_not_heard(node: Node) -> None:
    """Nor one who says nothing; and they keep nobody out for longer than a handshake may take."""

    async def run() -> None:
        async with begun(node):
            with node.udp() as inside, contextlib.ExitStack() as stack:
                with pytest.raises((OSError, AssertionError)), node.goes("three") as goes:  # noqa: PT012
                    goes.sendall(packet(b"strange"))
                    assert not ends(goes)
                for _ in range(GUESTS):
                    stack.enter_context(node.connection())
                goes = let_in(node)
                goes.sendall(packet(b"honest"))
                assert inside.recv(100) == b"honest"
                goes.close()

    asyncio.run(run())


def let_in(node: Node) -> ssl.SSLSocket:
    end = time.monotonic() + 30
    while True:
        try:
            return node.goes()
        except OSError:
            assert time.monotonic() < end, "it is not let in"
            time.sleep(0.1)


def test_a_peer_that_is_known_no_more(node: Node) -> None:
    async def run() -> None:
        async with begun(node):
            with node.udp() as inside, node.comes() as comes, node.goes() as goes:
                goes.sendall(packet(b"heard"))
                assert inside.recv(100) == b"heard"
                node.introduce("")
                assert ends(goes)
                assert ends(comes)
                with pytest.raises((ConnectionError, ssl.SSLError)):
                    node.goes()

    asyncio.run(run())


def test_held(node: Node) -> None:
    """Nothing comes and nothing goes, until it is released, or whoever holds it is gone."""

    async def run() -> None:
        async with begun(node):
            with node.udp() as inside, node.comes() as comes, node.goes() as goes:
                goes.sendall(packet(b"first"))
                assert inside.recv(100) == b"first"
                reaches(inside, comes)
                for release in (True, False):
                    line = Line(node.path)
                    await line.request("hold")
                    goes.sendall(packet(b"held"))
                    inside.sendto(b"held", (OTHER, PORT))
                    await line.request("show")  # by then it has both, and has left them out
                    wait_until(lambda: is_idle(node), "it has read all")
                    if release:
                        await line.request("release")
                        with pytest.raises(Unavailable):
                            await line.request("release")
                    line.close()
                    await node.carrier.line.request("show")
                    goes.sendall(packet(b"comes"))
                    inside.sendto(b"goes", (OTHER, PORT))
                    assert inside.recv(100) == b"comes"
                    assert received(comes)[28:] == b"goes"

    asyncio.run(run())


def is_idle(node: Node) -> bool:
    """Nothing waits for it: in its device, and in its connections."""
    return state_of(int(node.carrier.namespace.parts[2])) == "S"


def test_what_programs_must_not_send_does_not_leave(node: Node) -> None:
    """As root in their network: from another address, or more than fits. What comes behind it is whole."""

    def spoofed() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as sock:
            sock.sendto(packet(b"spoofed", source=THIRD, target=OTHER), (OTHER, 0))

    def larger() -> None:
        subprocess.run(["ip", "link", "set", DEVICE, "mtu", "65535"], check=True)

    async def run() -> None:
        async with begun(node):
            with node.udp() as inside, node.comes() as comes:
                reaches(inside, comes)
                node.inside(spoofed)
                node.inside(larger)
                inside.sendto(bytes(65_507), (OTHER, PORT))
                inside.sendto(b"whole", (OTHER, PORT))
                found = received(comes)
                assert (found[12:20], found[28:]) == (ip(OWN) + ip(OTHER), b"whole")

    asyncio.run(run())


def test_who_does_not_read_takes_no_more_than_its_share(node: Node) -> None:
    async def run() -> None:
        async with begun(node):
            with node.udp() as inside, node.comes():
                before = resident(node)
                for _ in range(4000):
                    inside.sendto(bytes(MTU - 28), (OTHER, PORT))
                await node.carrier.line.request("show")
                assert resident(node) - before < 16 * QUEUE

    asyncio.run(run())


def resident(node: Node) -> int:
    """Bytes."""
    pid = node.carrier.namespace.parts[2]
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_connection_that_is_lost_is_made_again(node: Node) -> None:
    """By whoever sends; and of two from one node the newer is heard."""

    async def run() -> None:
        async with begun(node):
            with node.udp() as inside:
                node.comes().close()
                with node.comes() as comes, node.goes() as before, node.goes() as goes:
                    assert ends(before)
                    goes.sendall(packet(b"comes"))
                    assert inside.recv(100) == b"comes"
                    reaches(inside, comes)

    asyncio.run(run())


def test_it_is_lost_as_something_is_sent(node: Node) -> None:
    """Both are noticed in the same turn: what is sent finds out first."""

    async def run() -> None:
        async with begun(node):
            with node.udp() as inside:
                pid = int(node.carrier.namespace.parts[2])
                with node.comes() as comes:
                    reaches(inside, comes)
                    os.kill(pid, signal.SIGSTOP)
                    wait_until(lambda: state_of(pid) == "T", "it stands still")
                    inside.sendto(b"lost", (OTHER, PORT))
                    comes.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
                os.kill(pid, signal.SIGCONT)
                with node.comes() as comes:
                    reaches(inside, comes)

    asyncio.run(run())


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_it_ends_with_the_program(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not with the daemon, whose successor finds it. Until then nobody has a network of the same name."""

    monkeypatch.setattr(carriers, "GOES_WITHIN", 0.1)

    async def run() -> None:
        with subprocess.Popen(["sleep", "600"]) as program:
            await node.begin(watch=program.pid)
            node.carrier.line.close()
            again = await carriers.found(node.path)
            assert again is not None
            assert (again.key, again.inode, again.nodes) == (KEY, node.carrier.inode, ("one", "two"))
            again.line.close()
            with pytest.raises(Conflict):
                await node.begin()
            program.kill()
        wait_until(lambda: not node.path.exists(), "it has ended")
        assert await carriers.found(node.path) is None

    asyncio.run(run())


def test_what_was_sent_last_arrives(node: Node) -> None:
    """The kernel sends it after the program has ended. A network that waits for that is in nobody's way."""

    async def run() -> None:
        with subprocess.Popen(["sleep", "600"]) as program:
            await node.begin(watch=program.pid)
            with node.comes() as comes, node.goes() as goes:
                listening = node.inside(lambda: socket.create_server((OWN, PORT)))
                goes.sendall(tcp(1, 0, SYN))
                begun = comes.recv(100)
                number = int.from_bytes(begun[24:28], "big")
                goes.sendall(tcp(2, number + 1, ACK))
                with listening, listening.accept()[0] as inside:
                    inside.sendall(b"the last")
                program.kill()
                program.wait()
                found = b""
                while b"the last" not in found:
                    found += comes.recv(1000)
                assert node.path.exists()  # nobody has acknowledged it
                before = node.carrier
                await node.begin()
                before.line.close()
        node.carrier.line.close()
        wait_until(lambda: not node.path.exists(), "both have ended")

    asyncio.run(run())


SYN, ACK = 2, 16


def tcp(sequence: int, acknowledged: int, flags: int) -> bytes:
    """Of the other node, without content."""
    header = struct.pack(">HHIIBBHHH", PORT, PORT, sequence, acknowledged, 5 << 4, flags, 60_000, 0, 0)
    pseudo = ip(OTHER) + ip(OWN) + struct.pack(">BBH", 0, socket.IPPROTO_TCP, len(header))
    header = header[:16] + checksum(pseudo + header) + header[18:]
    return of_ip(header, socket.IPPROTO_TCP)


def test_the_manager_starts_it_for_a_unit(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which has not the rights: as a unit of its own."""
    manager = tmp_path / "systemd-run"
    manager.write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/words\nwhile [ "$1" != -- ]; do shift; done; shift; exec "$@"'
    )
    manager.chmod(0o755)
    monkeypatch.setitem(carriers.ENVIRONMENT, "PATH", f"{tmp_path}:{carriers.ENVIRONMENT['PATH']}")

    async def run() -> None:
        await node.begin(confined=True)
        words = (tmp_path / "words").read_text()
        assert f"--unit=xmig-network-{KEY[:12]}-" in words
        assert "--property=Type=forking --property=Slice=xmig.slice" in words
        node.carrier.line.close()
        wait_until(lambda: not node.path.exists(), "it has ended")

    asyncio.run(run())


def test_why_there_is_none(node: Node) -> None:
    async def run() -> None:
        with pytest.raises(Unavailable, match="process 4194303"):
            await node.begin(watch=4194303)
        wait_until(lambda: not node.path.exists(), "nothing is left of it")

    asyncio.run(run())
