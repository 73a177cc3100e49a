"""`carrier.py SOCKET`: the network of a job on one of its nodes (docs/decisions/0099): a network namespace, and its
packets.

The namespace has the loopback device and one more (TUN). What programs send there, this process passes on to the same
process of the node whose address it is for, over TLS; what comes from there is for the programs. A connection is for
one direction: who sends has made it. The daemon gives this process the connections that come to the port for peers,
and says who the peers are. This process outlives the daemon, and ends with the program whose network it is, once what
that has sent last has arrived: the kernel sends it after the program has ended.

Nothing that comes is trusted: only who has the key of a node's certificate is heard, and only packets from that node's
address to this node's are passed on. As in any network, what finds no room is dropped; TCP sends it again.

A packet of IPv4 says how long it is, so packets follow each other on a connection with nothing in between.

A script of its own that imports nothing of xMIG: it needs CAP_NET_ADMIN, which the daemon's unit does not have
(carriers.py). Each message of the daemon is a packet of JSON to SOCKET.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import fcntl
import json
import os
import selectors
import signal
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

DEVICE = "xmig0"
MTU = 65_000  # bytes: each packet costs the same, and the kernel's loopback device has 65,536
QUEUE = 1 << 20  # bytes that wait for one node; what finds no room there is dropped
UNSENT = 256 << 10  # bytes of them that the kernel takes over before they can leave
BURST = 64  # packets, or records of TLS, before others have their turn
PIECE = 256 << 10  # bytes
STEP = 5.0  # seconds for a connection with TLS to begin
GUESTS = 8  # connections that have not shown whose they are
PAUSES = 0.1, 2.0  # seconds between attempts to connect, at first and at last
BEGINS_WITHIN = 60  # seconds
LINGER = 600.0  # seconds, at most, for what a program that has ended has sent
GONE = 3.0  # seconds without a connection after which nobody there will acknowledge it
LOOK_EVERY = 0.05  # seconds
UNSENT_STATES = {"04", "09", "0B"}  # tcp_states.h: FIN_WAIT1, LAST_ACK, CLOSING: an end that is not acknowledged
LASTING = 10.0  # seconds after which a connection was none that is refused again and again
PREFIX = b"N"  # what such a connection begins with, on the port for peers; the network's key follows
GIVEN_UP = 10_000  # ms after which what was sent and not received is a lost connection
MESSAGE = 1 << 16  # bytes
NEEDED = -900  # where memory is short, others end before this process, with which the job's connections would

NEWNET = 0x4000_0000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x1, 0x1000
SIOCGIFFLAGS, SIOCSIFFLAGS, SIOCSIFADDR, SIOCSIFNETMASK, SIOCSIFMTU, IFF_UP = 0x8913, 0x8914, 0x8916, 0x891C, 0x8922, 1
TCP_NOTSENT_LOWAT = 25
HEADER = 20  # bytes of IPv4: the length at 2, the sender at 12, the receiver at 16


def main() -> int:
    path = sys.argv[1]
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    listening.bind(path)
    listening.listen(16)
    if os.fork() > 0:
        os._exit(0)  # whoever has started this waits for that
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(nothing, standard)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.alarm(BEGINS_WITHIN)  # or whoever has started this is gone
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(str(NEEDED))
    try:
        Carrier(listening).run()
    finally:
        os.unlink(path)
    return 0


# --- devices ----------------------------------------------------------------------------------------------------------


def begin_loopback(addresses: Sequence[str]) -> None:
    """Of this thread's network, with these addresses, too. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        _set_up(sock, "lo")
        for number, address in enumerate(addresses):
            _give_address(sock, f"lo:{number}", address, 32)


def begin_tun(address: str, prefix: int) -> int:
    """The device of this thread's network that is ours: its descriptor. Raises OSError."""
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            fcntl.ioctl(sock, SIOCSIFMTU, struct.pack("16si20x", DEVICE.encode(), MTU))
            _give_address(sock, DEVICE, address, prefix)
            _set_up(sock, DEVICE)
    except BaseException:
        os.close(tun)
        raise
    return tun


def _set_up(sock: socket.socket, name: str) -> None:
    flags: int = struct.unpack_from("H", fcntl.ioctl(sock, SIOCGIFFLAGS, struct.pack("16s24x", name.encode())), 16)[0]
    fcntl.ioctl(sock, SIOCSIFFLAGS, struct.pack("16sH22x", name.encode(), flags | IFF_UP))


def _give_address(sock: socket.socket, name: str, address: str, prefix: int) -> None:
    mask = (0xFFFF_FFFF << (32 - prefix) & 0xFFFF_FFFF).to_bytes(4, "big")
    for request, value in ((SIOCSIFADDR, socket.inet_aton(address)), (SIOCSIFNETMASK, mask)):
        fcntl.ioctl(sock, request, struct.pack("16sHH4s16x", name.encode(), socket.AF_INET, 0, value))


def _enter(namespace: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace, NEWNET) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


# --- connections ------------------------------------------------------------------------------------------------------


def context_of(protocol: ssl._SSLMethod, identity: str, *certificates: str) -> ssl.SSLContext:
    """TLS with who has one of these certificates (PEM). Raises OSError."""
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    if protocol is ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # a session that is resumed would show no certificate
    context.load_cert_chain(identity)
    for certificate in certificates:
        context.load_verify_locations(cadata=certificate)
    return context


def _prepare(sock: socket.socket) -> None:
    """A node that is gone is noticed within ten seconds, and little waits where nothing can be dropped any more."""
    sock.settimeout(STEP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_NODELAY, 1), (socket.TCP_KEEPIDLE, 2), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 4),
        (socket.TCP_USER_TIMEOUT, GIVEN_UP), (TCP_NOTSENT_LOWAT, UNSENT),
    ):  # fmt: skip
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


class Sending:
    """To one node. A thread connects; all else is the loop's."""

    def __init__(self, carrier: Carrier, address: tuple[str, int], certificate: str) -> None:
        self.address = address
        self.certificate = certificate
        self.queue = bytearray()
        self._carrier = carrier
        self._tls: ssl.SSLSocket | None = None
        self._watched = 0  # events
        self._pause, self._since = PAUSES[0], time.monotonic()  # when it was connected or lost
        self._closed = False
        self._connect()

    def add(self, packet: bytes) -> bool:
        """Is it to be sent, with `flush`?"""
        if self._tls is None or len(self.queue) + len(packet) > QUEUE:
            return False
        self.queue += packet
        return True

    def flush(self) -> None:
        """As much as leaves now."""
        if self._tls is None:
            return
        try:
            while self.queue:
                with memoryview(self.queue) as view, view[:PIECE] as piece:
                    count = self._tls.send(piece)
                del self.queue[:count]
        except ssl.SSLWantWriteError:
            pass
        except OSError:
            self._lost()
            return
        self._watch(selectors.EVENT_READ | (selectors.EVENT_WRITE if self.queue else 0))

    @property
    def is_gone(self) -> bool:
        """The other network, as far as is known: that of a node whose daemon only is gone keeps its connections."""
        return self._tls is None and time.monotonic() - self._since > GONE

    def close(self) -> None:
        self._closed = True
        self._end()

    def _happened(self) -> None:
        """It can be written to, or has ended: nothing comes."""
        if self._tls is None:  # it was lost by what was called just before, in the same turn
            return
        try:
            if not self._tls.recv(1):
                self._lost()
                return
        except ssl.SSLWantReadError:
            pass
        except OSError:
            self._lost()
            return
        self.flush()

    def _connect(self) -> None:
        threading.Thread(target=self._connecting, daemon=True).start()

    def _connecting(self) -> None:
        while not self._closed:
            try:
                tls = self._connected()
            except (OSError, ValueError):  # its part of the job has not begun, or it is out of reach
                time.sleep(self._pause)
                self._pause = min(2 * self._pause, PAUSES[1])
                continue
            self._carrier.later(lambda: self._began(tls))  # noqa: B023
            return

    def _connected(self) -> ssl.SSLSocket:
        """Raises OSError, ValueError."""
        sock = socket.create_connection(self.address, STEP)
        try:
            _prepare(sock)
            sock.sendall(PREFIX + self._carrier.key.encode())
            context = context_of(ssl.PROTOCOL_TLS_CLIENT, self._carrier.identity, self.certificate)
            tls = context.wrap_socket(sock)
        except BaseException:
            sock.close()
            raise
        if tls.getpeercert(binary_form=True) != ssl.PEM_cert_to_DER_cert(self.certificate):
            tls.close()
            raise ValueError("somebody else is there")
        return tls

    def _began(self, tls: ssl.SSLSocket) -> None:
        if self._closed:
            tls.close()
            return
        tls.setblocking(False)
        self._tls, self._since = tls, time.monotonic()
        self._watch(selectors.EVENT_READ)

    def _lost(self) -> None:
        self._end()
        lasted, self._since = time.monotonic() - self._since > LASTING, time.monotonic()
        self._pause = PAUSES[0] if lasted else min(2 * self._pause, PAUSES[1])
        self._connect()

    def _end(self) -> None:
        self._watch(0)
        if self._tls is not None:
            self._tls.close()
        self._tls = None
        self.queue.clear()

    def _watch(self, events: int) -> None:
        if self._tls is None or events == self._watched:
            return
        if self._watched:
            self._carrier.selector.unregister(self._tls)
        if events:
            self._carrier.selector.register(self._tls, events, self._happened)
        self._watched = events


class Receiving:
    """From one node."""

    def __init__(self, carrier: Carrier, tls: ssl.SSLSocket, node: int) -> None:
        self.node = node
        self._carrier = carrier
        self._tls = tls
        self._addresses = carrier.addresses[node] + carrier.addresses[carrier.own]
        self._room = memoryview(bytearray(MTU + PIECE))
        self._filled = 0
        tls.setblocking(False)
        carrier.selector.register(tls, selectors.EVENT_READ, self.happened)
        carrier.soon.append(self.happened)  # TLS may have read some of it already

    def happened(self) -> None:
        if self._tls.fileno() < 0:
            return
        try:
            for _ in range(BURST):
                count = self._tls.recv_into(self._room[self._filled :])
                if not count:
                    break
                self._filled += count
                self._pass_on()
            else:
                self._carrier.soon.append(self.happened)
                return
        except ssl.SSLWantReadError:
            return
        except (OSError, ValueError):
            pass
        self.close()

    def _pass_on(self) -> None:
        """What is complete. Raises ValueError: they send what they must not."""
        room, at = self._room, 0
        while self._filled - at >= HEADER:
            length = room[at + 2] << 8 | room[at + 3]
            if room[at] >> 4 != 4 or not HEADER <= length <= MTU or room[at + 12 : at + 20] != self._addresses:
                raise ValueError("no packet of this node to us")
            if self._filled - at < length:
                break
            self._carrier.deliver(room[at : at + length])
            at += length
        room[: self._filled - at] = room[at : self._filled]
        self._filled -= at

    def close(self) -> None:
        if self._tls.fileno() >= 0:
            self._carrier.selector.unregister(self._tls)
            self._tls.close()
        self._carrier.receiving.discard(self)


# --- all of it --------------------------------------------------------------------------------------------------------


class Carrier:
    """One thread does all but begin connections."""

    def __init__(self, listening: socket.socket) -> None:
        self.selector = selectors.DefaultSelector()
        self.soon: collections.deque[Callable[[], None]] = collections.deque()  # to be called when others had a turn
        self.receiving: set[Receiving] = set()
        self.key = self.identity = ""
        self.addresses: list[bytes] = []
        self.own = 0
        self._listening = listening
        self._made: dict[str, Any] = {}
        self._sending: dict[bytes, Sending] = {}  # by their addresses
        self._certificates: dict[int, str] = {}  # of nodes
        self._guests: set[socket.socket] = set()
        self._tun = -1
        self._namespace = -1
        self._tables: list[TextIO] = []  # of connections there
        self._watched = -1  # a pidfd
        self._maker: socket.socket | None = None  # with whom this ends while nothing is watched
        self._holders: set[socket.socket] = set()  # of the daemon's connections
        self._over = False
        self._last = 0.0  # when this ends at the latest; 0: the program runs
        self._woken, self._waking = socket.socketpair()
        self._woken.setblocking(False)
        self._from_threads: collections.deque[Callable[[], None]] = collections.deque()
        self.selector.register(self._woken, selectors.EVENT_READ, self._wake)
        self.selector.register(listening, selectors.EVENT_READ, self._accept)

    def run(self) -> None:
        while not self._over:
            if self._last and (time.monotonic() > self._last or not self._is_unsent()):
                return
            for key, _ in self.selector.select(0 if self.soon else LOOK_EVERY if self._last else None):
                with contextlib.suppress(KeyError, ValueError):  # an earlier event has ended it
                    if self.selector.get_key(key.fileobj).data == key.data:
                        self.soon.append(key.data)
            for _ in range(len(self.soon)):
                self.soon.popleft()()

    def later(self, call: Callable[[], None]) -> None:
        """In the loop. Every thread may ask for that."""
        self._from_threads.append(call)
        self._waking.send(b"1")

    def deliver(self, packet: memoryview) -> None:
        if not self._holders:
            with contextlib.suppress(OSError):  # the device is down, or full
                os.write(self._tun, packet)

    def _wake(self) -> None:
        self._woken.recv(4096)
        while self._from_threads:
            self._from_threads.popleft()()

    def _packets(self) -> None:
        """What the programs send."""
        own, changed = self.addresses[self.own], set[Sending]()
        for _ in range(BURST):
            try:
                packet = os.read(self._tun, MTU)
            except BlockingIOError:
                break
            except OSError:  # a program has removed the device
                self.selector.unregister(self._tun)
                break
            # Root in there can send from other addresses, and let the device take more.
            if len(packet) < HEADER or packet[0] >> 4 != 4 or packet[12:16] != own or self._holders:
                continue
            if packet[2] << 8 | packet[3] != len(packet):
                continue
            sending = self._sending.get(packet[16:20])
            if sending is not None and sending.add(packet):
                changed.add(sending)
        for sending in changed:
            sending.flush()

    # --- what the daemon wants ----------------------------------------------------------------------------------------

    def _accept(self) -> None:
        connection, _ = self._listening.accept()
        self.selector.register(connection, selectors.EVENT_READ, lambda: self._message(connection))

    def _message(self, connection: socket.socket) -> None:
        try:
            content, given, _, _ = socket.recv_fds(connection, MESSAGE, 1)
        except OSError:
            content, given = b"", []
        sockets = [socket.socket(fileno=number) for number in given]
        if not content:
            self._left(connection)
            return
        message = json.loads(content)
        match message["do"]:
            case "make":
                self._answer(connection, self._make(message, connection))
            case "show":
                self._answer(connection, self._shown())
            case "watch":
                self._answer(connection, self._watch(message["pid"]))
            case "hold":
                self._holders.add(connection)
                self._answer(connection, {})
            case "release":
                held = connection in self._holders
                self._holders.discard(connection)
                self._answer(connection, {} if held else {"error": "they were not held"})
            case "leave":
                self._answer(connection, self._leave())
            case "node":
                self._node(message)
            case "connection":
                for sock in sockets:
                    self._come(sock)

    def _answer(self, connection: socket.socket, body: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # it has gone
            connection.send(json.dumps(body).encode())

    def _left(self, connection: socket.socket) -> None:
        self.selector.unregister(connection)
        connection.close()
        self._holders.discard(connection)
        if self._watched < 0 and connection is self._maker:
            self._over = True

    def _make(self, message: dict[str, Any], connection: socket.socket) -> dict[str, Any]:
        signal.alarm(0)
        self._made, self._maker = message, connection
        self.key, self.identity, self.own = message["key"], message["identity"], message["own"]
        self.addresses = [socket.inet_aton(each) for each in message["addresses"]]
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if ctypes.CDLL(None, use_errno=True).unshare(NEWNET) != 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            try:
                begin_loopback(message["loopback"])
                self._tun = begin_tun(message["addresses"][self.own], message["prefix"])
                self._namespace = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
                for name in ("tcp", "tcp6"):
                    with contextlib.suppress(FileNotFoundError):  # without IPv6
                        self._tables.append(open(f"/proc/thread-self/net/{name}"))  # noqa: SIM115
            finally:
                _enter(before)
        except OSError as error:
            self._over = True
            return {"error": f"{error.filename or 'a network'}: {error.strerror}"}
        finally:
            os.close(before)
        self.selector.register(self._tun, selectors.EVENT_READ, self._packets)
        if message["held"]:
            self._holders.add(connection)
        return self._shown() | (self._watch(message["watch"]) if message["watch"] else {})

    def _shown(self) -> dict[str, Any]:
        if self._namespace < 0:
            return {"error": "it has not begun"}
        inode = os.fstat(self._namespace).st_ino
        return {"pid": os.getpid(), "descriptor": self._namespace, "inode": inode, "made": self._made}

    def _watch(self, pid: int) -> dict[str, Any]:
        """From now on this ends with that process."""
        try:
            watched = os.pidfd_open(pid)
        except OSError as error:
            return {"error": f"process {pid}: {error.strerror}"}
        self._watched = watched
        self.selector.register(watched, selectors.EVENT_READ, self._end)
        return {}

    def _end(self) -> None:
        self.selector.unregister(self._watched)
        self._last = time.monotonic() + LINGER

    def _is_unsent(self) -> bool:
        """Anything of what the program has sent, before it ended, to somebody who is there."""
        there = {address for address, each in self._sending.items() if not each.is_gone}
        if any(self._sending[address].queue for address in there):
            return True
        for table in self._tables:
            table.seek(0)
            for words in map(str.split, table):
                if words[3] in UNSENT_STATES and _remote(words[2]) in there:
                    return True
        return False

    def _leave(self) -> dict[str, Any]:
        """For another network with the same key."""
        if not self._last:
            return {"error": "its program runs"}
        self._over = True
        return {}

    def _node(self, message: dict[str, Any]) -> None:
        """Where it is, and who; without a certificate nobody is to be heard."""
        number, certificate = message["number"], message["certificate"]
        address = (message["address"][0], message["address"][1])
        before = self._sending.get(self.addresses[number])
        if before is not None and (before.address, before.certificate) == (address, certificate):
            return
        if before is not None:
            before.close()
            del self._sending[self.addresses[number]]
        if self._certificates.get(number) != certificate:
            for each in [one for one in self.receiving if one.node == number]:
                each.close()
        self._certificates.pop(number, None)
        if certificate:
            self._certificates[number] = certificate
            self._sending[self.addresses[number]] = Sending(self, address, certificate)

    # --- who comes ----------------------------------------------------------------------------------------------------

    def _come(self, sock: socket.socket) -> None:
        if len(self._guests) >= GUESTS or not self._certificates:
            sock.close()
            return
        self._guests.add(sock)
        certificates = dict(self._certificates)
        threading.Thread(target=self._welcome, args=(sock, certificates), daemon=True).start()

    def _welcome(self, sock: socket.socket, certificates: dict[int, str]) -> None:
        """In a thread of its own."""
        found: tuple[ssl.SSLSocket, int] | None = None
        again = sock.dup()  # TLS takes the other one over
        ending = threading.Timer(STEP, _shut, [again])  # each read has that time, and so have all together
        ending.start()
        try:
            _prepare(sock)
            context = context_of(ssl.PROTOCOL_TLS_SERVER, self.identity, *certificates.values())
            tls = context.wrap_socket(sock, server_side=True)
            shown = tls.getpeercert(binary_form=True)
            found = tls, next(number for number, one in certificates.items() if ssl.PEM_cert_to_DER_cert(one) == shown)
        except (OSError, ValueError, StopIteration):
            pass
        ending.cancel()
        again.close()
        self.later(lambda: self._welcomed(sock, found, certificates))

    def _welcomed(
        self, sock: socket.socket, found: tuple[ssl.SSLSocket, int] | None, certificates: dict[int, str]
    ) -> None:
        self._guests.discard(sock)
        if found is None:
            sock.close()
            return
        tls, node = found
        if self._certificates.get(node) != certificates[node]:  # it is another one's since
            tls.close()
            return
        for each in [one for one in self.receiving if one.node == node]:
            each.close()  # of two, the newer
        self.receiving.add(Receiving(self, tls, node))


def _remote(text: str) -> bytes:
    """The address of IPv4 in a line of the kernel's, also as one of IPv6."""
    return int(text.partition(":")[0][-8:], 16).to_bytes(4, sys.byteorder)


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    sys.exit(main())
