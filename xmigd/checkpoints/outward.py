"""TCP connections that lead out of a process tree, in the network of the machine or that of its job."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Iterable, Mapping, Sequence

from xmigd.checkpoints import proc, sockets
from xmigd.checkpoints.apart import own_network
from xmigd.checkpoints.manifest import MOST_CONNECTIONS, Connection, host_and_port
from xmigd.checkpoints.movable import processes_of
from xmigd.errors import Conflict, NotFound


def outward(root: int) -> tuple[Connection, ...]:
    """Those that are established and whose other ends are not in the tree, each once. Blocks. Raises NotFound,
    Conflict: too many."""
    pids = processes_of(root)
    whose = root if own_network(root) else proc.machine()
    try:
        network, listed = proc.namespaces(whose)["net"], sockets.inet_sockets(whose, "tcp")
    except proc.GONE:
        raise NotFound(f"there is no process {root}", hint="its program has ended") from None
    found: dict[tuple[str, str], int] = {}
    for pid in pids:
        with contextlib.suppress(*proc.GONE):
            if proc.namespaces(pid)["net"] != network:
                continue
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(*proc.GONE):
                    link = os.readlink(f"/proc/{pid}/fd/{name}")
                    each = listed.get(int(link[8:-1])) if link.startswith("socket:[") else None
                    if each is not None and each.state == sockets.ESTABLISHED:
                        found.setdefault((each.local, each.remote), pid)
    made = [
        Connection(local=local, remote=remote, pid=pid)
        for (local, remote), pid in sorted(found.items()) if (remote, local) not in found
    ]  # fmt: skip
    if len(made) > MOST_CONNECTIONS:
        raise Conflict(
            f"the program has {len(made)} connections with others, {MOST_CONNECTIONS} are written down at most",
            code="not_movable",
        )  # fmt: skip
    return tuple(made)


def ends(connections: Iterable[Connection]) -> frozenset[tuple[str, str]]:
    return frozenset((each.local, each.remote) for each in connections)


def check_both_ends(parts: Mapping[str, Sequence[Connection]]) -> None:
    """By nodes: is the other end of each in the part of another one? Raises Conflict."""
    found = {node: ends(connections) for node, connections in parts.items()}
    for node, connections in parts.items():
        others = frozenset[tuple[str, str]]().union(*(each for name, each in found.items() if name != node))
        for each in connections:
            if ipaddress.ip_address(host_and_port(each.local)[0]).is_link_local:
                raise Conflict(
                    f"process {each.pid} on {node} has a TCP connection from {each.local}, an address of one link, "
                    "which cannot be made again", code="not_movable", hint="let the nodes use other addresses",
                )  # fmt: skip
            if (each.remote, each.local) not in others:
                raise Conflict(
                    f"process {each.pid} on {node} has a TCP connection from {each.local} to {each.remote}, whose "
                    "other end is in no process of the job", code="not_movable", hint="close it before the dump",
                )  # fmt: skip


def check_free(connections: Iterable[Connection]) -> None:
    """Can they be made again here? Blocks. Raises Conflict."""
    wanted = ends(connections)
    for host in {host_and_port(local)[0] for local, _ in wanted}:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            try:
                sock.bind((host, 0))
            except OSError as error:
                raise Conflict(
                    f"the program had connections from {host}, which is no address of this node: {error.strerror}",
                    code="address_missing", hint="restore it on the node that has this address",
                ) from None  # fmt: skip
    for inode, each in sockets.inet_rows(proc.machine(), "tcp"):
        if inode and (each.local, each.remote) in wanted:
            raise Conflict(
                f"there is a connection from {each.local} to {each.remote}, which the program would have, too",
                code="address_in_use", hint="end what has it",
            )  # fmt: skip


def left_behind(connections: Iterable[Connection]) -> frozenset[tuple[str, str]]:
    """Those of which the kernel still knows something, of programs that have ended: for a minute, or longer. Blocks."""
    wanted = ends(connections)
    found = {(each.local, each.remote) for inode, each in sockets.inet_rows(proc.machine(), "tcp") if not inode}
    return wanted & found
