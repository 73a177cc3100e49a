"""Which user of this machine is at the other end of a loopback connection, as the kernel's table of sockets has it."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from pathlib import Path


def uid_of(visitor: tuple[str, int], ours: tuple[str, int]) -> int | None:
    """The owner of the visitor's socket; None where it is not of this machine."""
    try:
        version = ipaddress.ip_address(visitor[0]).version
    except ValueError:
        return None
    table = Path("/proc/net/tcp6" if version == 6 else "/proc/net/tcp")
    wanted = [_packed(visitor), _packed(ours)]
    try:
        lines = table.read_text().splitlines()[1:]
    except OSError:
        return None
    for line in lines:
        columns = line.split()
        if columns[1:3] == wanted:
            return int(columns[7])
    return None


def may_be_local(visitor: tuple[str, int] | None, ours: tuple[str, int] | None) -> bool:
    """Ours, or root's."""
    return visitor is not None and ours is not None and uid_of(visitor, ours) in (0, os.geteuid())


def _packed(address: tuple[str, int]) -> str:
    """As the table writes it: words of 32 bits in this machine's order, in hexadecimal."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    packed = socket.inet_pton(family, address[0])
    words = (int.from_bytes(packed[i : i + 4], sys.byteorder) for i in range(0, len(packed), 4))
    return "".join(f"{word:08X}" for word in words) + f":{address[1]:04X}"
