"""Who is at the other end of a connection, as the kernel says, before a byte of it is read."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
from dataclasses import dataclass

from xmigd.supervisor.channel import peer_of

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
    peer, ours = _plain(sock.getpeername()), _plain(sock.getsockname())
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
    """The user whose socket on this machine is connected from `peer` to `ours`; None: there is none, or the kernel does
    not tell. One question about one socket: reading /proc/net/tcp takes the longer the more connections there are."""
    family = socket.AF_INET6 if ":" in peer[0] else socket.AF_INET
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


def _plain(address: tuple[str, int] | tuple[str, int, int, int]) -> Address:
    """IPv4 as such, also on a socket of IPv6."""
    host = address[0].partition("%")[0]
    return host.removeprefix("::ffff:") if "." in host else host, address[1]
