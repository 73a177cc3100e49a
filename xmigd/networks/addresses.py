"""Addresses in the network of a job: which follow from its nodes, so that nobody gives them out."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import ipaddress
import json
import socket
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from xmigd.errors import Conflict, Invalid

SIOCGIFCONF = 0x8912
IFREQ = struct.Struct("16sHxx4s16x")  # name, family, address of IPv4
MOST_INTERFACES = 1024
KEPT = 2  # addresses of a range that are none of a node's: the first and the last one


@dataclass(frozen=True, slots=True)
class Addresses:
    """Of a job's nodes, in their order. All jobs have the same ones: each sees its own network only. `key`: by which
    the nodes' daemons mean the same network."""

    key: str  # 32 hexadecimal digits
    range: str
    nodes: tuple[str, ...]
    own: int  # the place of this node

    @property
    def all(self) -> tuple[str, ...]:
        first = ipaddress.IPv4Network(self.range)[1]
        return tuple(str(first + number) for number in range(len(self.nodes)))

    @property
    def prefix(self) -> int:
        return ipaddress.IPv4Network(self.range).prefixlen


def addresses_of(range: str, nodes: Sequence[str], node: str, job_name: str, uid: int) -> Addresses:
    """As this node has them. Raises Invalid."""
    if len(nodes) < 2 or node not in nodes:
        raise Invalid(f"a job's network leads from {node} to other nodes of the job", hint="name them all: --nodes")
    if len(nodes) > ipaddress.IPv4Network(range).num_addresses - KEPT:
        raise Invalid(f"{range} has no addresses for {len(nodes)} nodes", hint="set job_network, the same on each node")
    content = json.dumps([range, list(nodes), job_name, uid]).encode()
    return Addresses(hashlib.sha256(content).hexdigest()[:32], range, tuple(nodes), nodes.index(node))


def check_range(range: str, taken: Iterable[ipaddress.IPv4Network]) -> None:
    """Raises Conflict: one of these, to which this node has a route, has addresses in common with it. Programs of the
    job would not reach what is there, and whoever reads of such an address could mean either."""
    wanted = ipaddress.IPv4Network(range)
    for each in taken:
        if each.overlaps(wanted):
            raise Conflict(
                f"the networks of jobs have the addresses {range}, and this node has a route to {each}",
                code="job_network_in_use",
                hint="set job_network to a range to which no node has a route, the same on each node",
            )


def routes(table: Path = Path("/proc/net/route")) -> list[ipaddress.IPv4Network]:
    """Of this machine, and none that leads everywhere. Blocks."""
    found = []
    try:
        lines = table.read_text().splitlines()[1:]
    except OSError:  # no IPv4
        return []
    for line in lines:
        words = line.split()
        to, mask = (int.from_bytes(bytes.fromhex(words[number])[::-1], "big") for number in (1, 7))
        if mask:
            found.append(ipaddress.IPv4Network((to & mask, mask.bit_count())))
    return found


def own_addresses() -> list[str]:
    """This machine's, of IPv4. The loopback device of a program with a network of its own gets them: launchers connect
    their processes by the name of the host, which leads to one of these. They go with the program, whatever the
    addresses of other nodes are. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        buffer = ctypes.create_string_buffer(MOST_INTERFACES * IFREQ.size)
        listed = fcntl.ioctl(sock, SIOCGIFCONF, struct.pack("iP", len(buffer), ctypes.addressof(buffer)))
    found = (address for _, _, address in IFREQ.iter_unpack(buffer.raw[: struct.unpack_from("i", listed)[0]]))
    return [socket.inet_ntoa(address) for address in dict.fromkeys(found) if address[0] != 127]
