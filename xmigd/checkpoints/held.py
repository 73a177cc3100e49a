"""`held.py`: while it runs, the kernel drops the packets that come for some connections; TCP sends them again later.

Both ends of a connection are written down as they are at different moments. While neither gets anything, that is the
same as at one moment: what one end has sent, and the other one has not got, is still in the queue of the first. It is
also what keeps the answer "there is no such connection" from one end that is restored before the other one is.

A table of nf_tables that belongs to a netlink socket: the kernel removes it with the socket, so nothing is left of it
if this process ends. `nft list ruleset` shows it.

A script of its own that imports nothing of xMIG, as it needs CAP_NET_ADMIN, which the daemon's unit does not have
(packets.py). A line of JSON comes to its input: `connections`, and of these `forgotten`, which belong to nobody any
more and would be in the way. It answers `held`, or what is wrong, and goes on until its input is closed. Then it says
`until now`: nothing has come in between.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import socket
import struct
import sys
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address

Connection = tuple[str, str]  # from where to where, as `10.0.0.1:80` or `[::1]:80`

NETLINK_SOCK_DIAG, NETLINK_NETFILTER = 4, 12  # not in Python's socket module, as everything below
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33
_REQUEST, _ACK, _CREATE, _APPEND = 0x1, 0x4, 0x400, 0x800
_ERROR = 2
# linux/netfilter/nf_tables.h
_BATCH_BEGIN, _BATCH_END, _NFTABLES = 0x10, 0x11, 10
_NEW_TABLE, _NEW_CHAIN, _NEW_RULE = (_NFTABLES << 8 | number for number in (0, 3, 6))
_NESTED = 0x8000
_INET, _IPV4, _IPV6 = 1, 2, 10  # address families of netfilter
_TABLE_IS_OWNED = 0x2
_LOCAL_IN, _BEFORE_OTHERS = 1, -300  # hook, and priority in it
_NETWORK, _TRANSPORT = 1, 2  # headers
_DROP = 0
_CHAIN = b"held\0"
# linux/sock_diag.h, linux/inet_diag.h
_DESTROY, _ANY_STATE, _NO_COOKIE = 21, 0xFFFFFFFF, 0xFFFFFFFF


def main() -> int:
    request = json.loads(sys.stdin.readline())
    try:
        with hold(request["connections"]):
            for connection in request["forgotten"]:
                forget(connection)
            print("held", flush=True)
            sys.stdin.read()  # until whoever has started this closes it, or ends
            print("until now", flush=True)
    except OSError as error:
        print(error.strerror or error, flush=True)
        return 1
    return 0


def hold(connections: Sequence[Connection]) -> socket.socket:
    """Until it is closed. Raises OSError: the kernel does not do it."""
    owner = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_NETFILTER)
    try:
        batch = _batch(f"xmig-{secrets.token_hex(8)}".encode() + b"\0", connections)
        owner.bind((0, 0))
        owner.settimeout(60)  # seconds; it answers at once
        for option in (SO_SNDBUFFORCE, SO_RCVBUFFORCE):
            owner.setsockopt(socket.SOL_SOCKET, option, 2 * len(batch) + (1 << 16))
        owner.send(batch)
        _check_answers(owner, len(connections) + 2)
    except BaseException:
        owner.close()
        raise
    return owner


def forget(connection: Connection) -> None:
    """End it, if there is one. Raises OSError."""
    (local, local_port), (remote, remote_port) = map(_host_and_port, connection)
    family = socket.AF_INET6 if local.version == 6 else socket.AF_INET
    addresses = local.packed.ljust(16, b"\0") + remote.packed.ljust(16, b"\0")
    request = (
        struct.pack("=BBBxI", family, socket.IPPROTO_TCP, 0, _ANY_STATE) + struct.pack(">HH", local_port, remote_port)
        + addresses + struct.pack("=III", 0, _NO_COOKIE, _NO_COOKIE)
    )  # fmt: skip
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_SOCK_DIAG) as sock:
        sock.send(struct.pack("=IHHII", 16 + len(request), _DESTROY, _REQUEST | _ACK, 1, 0) + request)
        error = -struct.unpack_from("=i", sock.recv(1 << 16), 16)[0]
        if error not in (0, errno.ENOENT):
            raise OSError(error, f"what is left of a connection cannot be ended: {os.strerror(error)}")


def _host_and_port(end: str) -> tuple[IPv4Address | IPv6Address, int]:
    host, _, port = end.rpartition(":")
    return ip_address(host.strip("[]")), int(port)


def _check_answers(owner: socket.socket, count: int) -> None:
    """Each message is answered, and the first error is that of all. Raises OSError."""
    while count:
        data = owner.recv(1 << 16)
        while len(data) >= 20:
            length, kind, _, _, _, error = struct.unpack_from("=IHHIIi", data)
            if kind == _ERROR and error:
                raise OSError(-error, f"packets are not held by nf_tables: {os.strerror(-error)}")
            count -= kind == _ERROR
            data = data[(length + 3) & ~3 :]


# --- messages ---------------------------------------------------------------------------------------------------------


def _batch(table: bytes, connections: Sequence[Connection]) -> bytes:
    """All of it, or nothing."""
    hook = _attribute(1, _number(_LOCAL_IN)) + _attribute(2, struct.pack(">i", _BEFORE_OTHERS))
    chain = _attribute(1, table) + _attribute(3, _CHAIN) + _attribute(4 | _NESTED, hook) + _attribute(7, b"filter\0")
    rules = [
        _attribute(1, table) + _attribute(2, _CHAIN) + _attribute(4 | _NESTED, b"".join(_rule(each)))
        for each in connections
    ]
    return b"".join((
        _message(_BATCH_BEGIN, 0, 0, b"", resource=_NFTABLES),
        _message(_NEW_TABLE, _ACK | _CREATE, _INET, _attribute(1, table) + _attribute(2, _number(_TABLE_IS_OWNED))),
        _message(_NEW_CHAIN, _ACK | _CREATE, _INET, chain),
        *(_message(_NEW_RULE, _ACK | _CREATE | _APPEND, _INET, rule) for rule in rules),
        _message(_BATCH_END, 0, 0, b"", resource=_NFTABLES),
    ))  # fmt: skip


def _rule(connection: Connection) -> list[bytes]:
    """What comes from the other end."""
    (destination, to_port), (source, by_port) = map(_host_and_port, connection)
    family, at = (_IPV6, 8) if source.version == 6 else (_IPV4, 12)
    width = len(source.packed)
    return [
        _meta(15), _is(bytes([family])),  # NFT_META_NFPROTO
        _meta(16), _is(bytes([socket.IPPROTO_TCP])),  # NFT_META_L4PROTO
        _payload(_NETWORK, at, width), _is(source.packed),
        _payload(_NETWORK, at + width, width), _is(destination.packed),
        _payload(_TRANSPORT, 0, 4), _is(struct.pack(">HH", by_port, to_port)),
        _expression(b"immediate\0", _attribute(1, _number(0)) + _attribute(2 | _NESTED, _attribute(2 | _NESTED,
                    _attribute(1, _number(_DROP))))),
    ]  # fmt: skip


def _meta(key: int) -> bytes:
    return _expression(b"meta\0", _attribute(2, _number(key)) + _attribute(1, _number(1)))


def _payload(header: int, at: int, width: int) -> bytes:
    numbers = enumerate((1, header, at, width), 1)
    return _expression(b"payload\0", b"".join(_attribute(kind, _number(value)) for kind, value in numbers))


def _is(value: bytes) -> bytes:
    """What was loaded before."""
    compared = _attribute(3 | _NESTED, _attribute(1, value))
    return _expression(b"cmp\0", _attribute(1, _number(1)) + _attribute(2, _number(0)) + compared)


def _expression(name: bytes, fields: bytes) -> bytes:
    return _attribute(1 | _NESTED, _attribute(1, name) + _attribute(2 | _NESTED, fields))


def _message(kind: int, flags: int, family: int, body: bytes, *, resource: int = 0) -> bytes:
    content = struct.pack(">BBH", family, 0, resource) + body
    return struct.pack("=IHHII", 16 + len(content), kind, _REQUEST | flags, 0, 0) + content


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def _number(value: int) -> bytes:
    return struct.pack(">I", value)


if __name__ == "__main__":
    sys.exit(main())
