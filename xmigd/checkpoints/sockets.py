"""Sockets of a network namespace, as the kernel lists them: their states and what they are connected with.

Unix sockets come from sock_diag(7), because /proc/net/unix does not name their peers; the others from /proc/PID/net.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

NETLINK_SOCK_DIAG = 4  # not in Python's socket module, as everything below
_SOCK_DIAG_BY_FAMILY = 20
_REQUEST_DUMP = 0x301
_ERROR, _DONE = 2, 3
_SHOW = 0x1 | 0x4 | 0x8  # name, peer, connections that wait to be accepted
_NAME, _PEER, _WAITING, _SHUTDOWN = 0, 2, 3, 6

Reader = int | Literal["self"]  # the process whose network namespace it is

ESTABLISHED, CLOSED, LISTENING = 1, 7, 10  # tcp_states.h; of Unix sockets, too
SO_PASSCRED = 16


@dataclass(frozen=True, slots=True)
class UnixSocket:
    type: int
    state: int
    name: str  # empty: it has none; an abstract name begins with @
    peer: int  # the other end's inode; 0: none, or one that was not accepted yet
    waiting: tuple[int, ...]  # of one that listens: inodes of the other ends that it has not accepted; 0: closed ones
    shut_down: bool  # in both directions: the other end is closed


@dataclass(frozen=True, slots=True)
class InetSocket:
    local: str
    remote: str
    port: int  # the local one; 0: it is not bound
    state: int
    waiting: int  # of one that listens: connections that it has not accepted


def unix_sockets() -> dict[int, UnixSocket]:
    """Those of this process's network namespace, by their inodes. Raises OSError."""
    found: dict[int, UnixSocket] = {}
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_SOCK_DIAG) as sock:
        request = struct.pack("BBHIII8x", socket.AF_UNIX, 0, 0, 0xFFFFFFFF, 0, _SHOW)
        sock.send(struct.pack("IHHII", 16 + len(request), _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, 1, 0) + request)
        while True:
            data = sock.recv(1 << 16)
            while data:
                length, kind = struct.unpack_from("IH", data)
                if kind == _DONE:
                    return found
                if kind == _ERROR:
                    raise OSError(-struct.unpack_from("i", data, 16)[0], "Unix sockets cannot be listed (sock_diag)")
                inode, each = _unix_socket(data[16:length])
                found[inode] = each
                data = data[_aligned(length) :]


def _unix_socket(body: bytes) -> tuple[int, UnixSocket]:
    _, type_, state, inode = struct.unpack_from("BBBxI", body)
    attributes: dict[int, bytes] = {}
    at = 16
    while at + 4 <= len(body):
        length, kind = struct.unpack_from("HH", body, at)
        attributes[kind] = body[at + 4 : at + length]
        at += _aligned(max(length, 4))
    waiting = attributes.get(_WAITING, b"")
    name = attributes.get(_NAME, b"")
    text = (b"@" + name[1:] if name[:1] == b"\0" else name.rstrip(b"\0")).decode(errors="replace")
    return inode, UnixSocket(
        type=type_, state=state, name=text, peer=struct.unpack("I", attributes.get(_PEER, bytes(4)))[0],
        waiting=struct.unpack(f"{len(waiting) // 4}I", waiting), shut_down=attributes.get(_SHUTDOWN, b"\0")[0] == 3,
    )  # fmt: skip


def inet_sockets(pid: Reader, protocol: str) -> dict[int, InetSocket]:
    """Those of a process's network namespace, of `tcp` or `udp`, of both address families, by their inodes."""
    return {inode: each for inode, each in inet_rows(pid, protocol) if inode}


def inet_rows(pid: Reader, protocol: str) -> Iterator[tuple[int, InetSocket]]:
    """The same, also those without an inode: no process has them any more, and the kernel has not done with them."""
    for name in (protocol, f"{protocol}6"):
        for words in _rows(pid, name):
            local, remote = _address(words[1]), _address(words[2])
            port, waiting = int(words[1].rpartition(":")[2], 16), int(words[4].rpartition(":")[2], 16)
            yield int(words[9]), InetSocket(local, remote, port, int(words[3], 16), waiting)


def netlink_unread(pid: Reader) -> dict[int, int]:
    """Bytes that wait to be read, of the netlink sockets of a process's network namespace, by their inodes."""
    return {int(words[9]): int(words[4]) for words in _rows(pid, "netlink")}


def kernel_has_credentials_of_inet() -> bool:
    """Can SO_PASSCRED be read of a socket that is no Unix socket? Since Linux 6.16 it cannot. CRIU before 4.2 reads it
    of every socket, and gives up where it cannot."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        try:
            sock.getsockopt(socket.SOL_SOCKET, SO_PASSCRED)
        except OSError:
            return False
    return True


def _rows(pid: Reader, name: str) -> list[list[str]]:
    with contextlib.suppress(FileNotFoundError), open(f"/proc/{pid}/net/{name}") as file:  # no IPv6, no netlink
        return [line.split() for line in file.readlines()[1:]]
    return []


def _address(text: str) -> str:
    host, _, port = text.partition(":")
    raw = bytes.fromhex(host)
    packed = b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))
    if len(packed) == 4:
        return f"{socket.inet_ntop(socket.AF_INET, packed)}:{int(port, 16)}"
    text = socket.inet_ntop(socket.AF_INET6, packed)
    if text.startswith("::ffff:") and "." in text:  # an IPv4 connection of an IPv6 socket
        return f"{text[7:]}:{int(port, 16)}"
    return f"[{text}]:{int(port, 16)}"


def _aligned(length: int) -> int:
    return (length + 3) & ~3
