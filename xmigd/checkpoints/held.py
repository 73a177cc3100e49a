"""Packets of connections that are held: the kernel drops what comes for them, and its TCP sends it again later.

Both ends of a connection are written down as they are at different moments. While neither gets anything, that is the
same as at one moment: what one end has sent, and the other one has not got, is still in the queue of the first. It is
also what keeps the answer "there is no such connection" from one end that is restored before the other one is.

A table of nf_tables that belongs to a netlink socket: the kernel removes it with the socket, so nothing is left of it
if this process ends. `nft list ruleset` shows it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import struct
from collections.abc import AsyncIterator, Sequence
from ipaddress import IPv6Address, ip_address

from xmigd.checkpoints.manifest import Connection, host_and_port
from xmigd.errors import Unavailable

NETLINK_NETFILTER = 12  # not in Python's socket module, as everything below (linux/netfilter/nf_tables.h)
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33
_REQUEST, _ACK, _CREATE, _APPEND = 0x1, 0x4, 0x400, 0x800
_ERROR = 2
_BATCH_BEGIN, _BATCH_END, _NFTABLES = 0x10, 0x11, 10
_NEW_TABLE, _NEW_CHAIN, _NEW_RULE = (_NFTABLES << 8 | number for number in (0, 3, 6))
_NESTED = 0x8000
_INET, _IPV4, _IPV6 = 1, 2, 10  # address families of netfilter
_TABLE_IS_OWNED = 0x2
_LOCAL_IN, _BEFORE_OTHERS = 1, -300  # hook, and priority in it
_NETWORK, _TRANSPORT = 1, 2  # headers
_DROP = 0
_CHAIN = b"held\0"


class Held:
    """Until it is closed."""

    def __init__(self, connections: Sequence[Connection]) -> None:
        """Blocks. Raises OSError: the kernel does not do it."""
        self._socket: socket.socket | None = None
        if not connections:
            return
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
        self._socket = owner

    def close(self) -> None:
        """Whatever comes then arrives. Blocks. It may be called again."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


@contextlib.asynccontextmanager
async def held(connections: Sequence[Connection]) -> AsyncIterator[Held]:
    """Raises Unavailable."""
    try:
        made = await asyncio.to_thread(Held, connections)
    except OSError as error:
        raise Unavailable(
            f"the packets of {len(connections)} connections between nodes cannot be held: {error.strerror or error}",
            code="packets_not_held", hint="xmigd needs CAP_NET_ADMIN, and the kernel nf_tables (Linux 5.12 or later)",
        ) from None  # fmt: skip
    try:
        yield made
    finally:
        await asyncio.to_thread(made.close)


def _check_answers(owner: socket.socket, count: int) -> None:
    """Each message is answered, and the first error is that of all. Raises OSError."""
    while count:
        data = owner.recv(1 << 16)
        while len(data) >= 20:
            length, kind, _, _, _, error = struct.unpack_from("=IHHIIi", data)
            if kind == _ERROR and error:
                raise OSError(-error, "nf_tables refuses")
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
    (to, to_port), (by, by_port) = host_and_port(connection.local), host_and_port(connection.remote)
    source, destination = ip_address(by), ip_address(to)
    family, at = (_IPV6, 8) if isinstance(source, IPv6Address) else (_IPV4, 12)
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
