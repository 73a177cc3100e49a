"""Who is at the other end of a connection, as the kernel says, before a byte of it is read."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import os
import socket
import struct
import sys
from dataclasses import dataclass
from pathlib import Path

from xmigd.ipc.channel import peer_of

NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY = 4, 20  # linux/netlink.h, linux/sock_diag.h
NLM_F_REQUEST = 1
NETWORK_BITS = 64  # an IPv6 host can take any address of its network
HEADER = struct.Struct("=IHHII")  # nlmsghdr
REQUEST = struct.Struct("=BBBxI")  # the beginning of inet_diag_req_v2
COOKIE = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)  # any interface, any cookie
OWNER = struct.Struct("=II")  # of inet_diag_msg: idiag_uid, idiag_inode
OWNER_AT = HEADER.size + 4 + 48 + 12

Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Who:
    """Whose quota a connection counts against."""

    name: str  # as people read it: "user 1000", "address 192.0.2.7"
    root: bool = False


def who_is(sock: socket.socket) -> Who:
    """A user of this machine, also over TCP; otherwise an address. Raises OSError: the peer has gone."""
    if sock.family == socket.AF_UNIX:
        return user(peer_of(sock).uid)
    peer, ours = plain(sock.getpeername()), plain(sock.getsockname())
    uid = owner(peer, ours)
    if uid is not None:
        return user(uid)
    address = ipaddress.ip_address(peer[0])
    if address.version == 6:
        return Who(f"network {ipaddress.ip_network((address, NETWORK_BITS), strict=False)}")
    return Who(f"address {address}")


def user(uid: int) -> Who:
    return Who(f"user {uid}", root=uid == 0)


def owner(peer: Address, ours: Address) -> int | None:
    """The user whose socket on this machine is connected from `peer` to `ours`; None: there is none."""
    return (_ask if _kernel_answers() else _look_up)(peer, ours)


def _ask(peer: Address, ours: Address) -> int | None:
    """One question to the kernel about one socket."""
    family = _family(peer)
    try:
        addresses = b"".join(socket.inet_pton(family, host).ljust(16, b"\0") for host, _ in (peer, ours))
        ports = struct.pack("!HH", peer[1], ours[1])
        request = REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0xFFFFFFFF) + ports + addresses + COOKIE
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as kernel:
            header = HEADER.pack(HEADER.size + len(request), SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, 0, 0)
            kernel.send(header + request)
            answer = kernel.recv(4096, socket.MSG_DONTWAIT)  # the kernel has answered within the call before
    except OSError:
        return None
    with contextlib.suppress(struct.error):
        if HEADER.unpack_from(answer)[1] == SOCK_DIAG_BY_FAMILY:
            uid, inode = OWNER.unpack_from(answer, OWNER_AT)
            return int(uid) if inode else None  # a socket that its program has closed is nobody's
    return None


def _look_up(peer: Address, ours: Address) -> int | None:
    """Where the kernel may not be queried: in its table, which takes the longer the more connections there are."""
    wanted = [_packed(peer), _packed(ours)]
    try:
        lines = Path("/proc/net/tcp6" if ":" in peer[0] else "/proc/net/tcp").read_text().splitlines()[1:]
    except OSError:
        return None
    for line in lines:
        columns = line.split()
        if columns[1:3] == wanted:
            return int(columns[7]) if columns[9] != "0" else None
    return None


@functools.cache
def _kernel_answers() -> bool:
    """Queried once about a connection of our own: a container may not have, or not allow, what answers."""
    with (
        contextlib.suppress(OSError),
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_connection(listening.getsockname()) as ours,
    ):
        return _ask(ours.getsockname(), ours.getpeername()) == os.geteuid()
    return False


def _family(address: Address) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address[0] else socket.AF_INET


def _packed(address: Address) -> str:
    """As the table writes it: words of 32 bits in this machine's order, in hexadecimal."""
    packed = socket.inet_pton(_family(address), address[0])
    words = (int.from_bytes(packed[i : i + 4], sys.byteorder) for i in range(0, len(packed), 4))
    return "".join(f"{word:08X}" for word in words) + f":{address[1]:04X}"


def plain(address: tuple[str, int] | tuple[str, int, int, int]) -> Address:
    """IPv4 as such, also on a socket of IPv6."""
    host = address[0].partition("%")[0]
    return host.removeprefix("::ffff:") if "." in host else host, address[1]
