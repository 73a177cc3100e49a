"""Nodes with a network of their own on one machine: namespaces, joined by a bridge that is in one, too.

The machine's own network is not touched. Files are shared: a daemon's socket is reached from outside by its path.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from xmigd.errors import StartError

PLACES = Path("/run/netns")  # where `ip netns` has them
NETWORK = "10.77.0"
INTERFACE = "eth0"  # each node's own


def _ip(*words: str) -> None:
    """Raises StartError."""
    _execute("ip", *words)


def _execute(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise StartError(f"{' '.join(words)}: {done.stderr.strip()}", hint="networks are made by root, with iproute2")


class NetworkNode:
    """A namespace. `port` is the bridge's side of its wire."""

    def __init__(self, name: str, switch: str, place: int) -> None:
        self.name = name
        self.address = f"{NETWORK}.{place + 1}"
        self._switch = switch
        self._port = f"port{place}"

    @property
    def command(self) -> list[str]:
        """What comes before a command so that it is executed here. It becomes that command, with the same pid."""
        return ["nsenter", f"--net={PLACES / self.name}", "--"]

    def run(self, command: Sequence[str | Path], **options: Any) -> subprocess.Popen[Any]:
        """Start a command here. `options` go to Popen; whoever calls waits for its end."""
        return subprocess.Popen([*self.command, *map(str, command)], **options)

    def unplug(self) -> None:
        """Nothing comes or goes any more, and nobody is informed: packets are lost as behind a switch that failed."""
        _ip("-n", self._switch, "link", "set", self._port, "down")

    def plug(self) -> None:
        """As at first."""
        _ip("-n", self._switch, "link", "set", self._port, "up")

    @contextlib.contextmanager
    def unplugged(self) -> Iterator[None]:
        """Meanwhile; also if something fails meanwhile, so that others may use the node."""
        self.unplug()
        try:
            yield
        finally:
            self.plug()

    def link_down(self) -> None:
        """The node's own interface goes down: whoever sends here is refused by their own kernel."""
        _ip("-n", self.name, "link", "set", INTERFACE, "down")

    def link_up(self) -> None:
        """As at first."""
        _ip("-n", self.name, "link", "set", INTERFACE, "up")

    def slow(self, kilobits: int) -> None:
        """What comes here comes with so many kilobits a second, and what waits for longer than a second is lost. Not
        by netem, which not every kernel has."""
        words = ["tbf", "rate", f"{kilobits}kbit", "burst", "16kb", "latency", "1s"]
        _execute("tc", "-n", self._switch, "qdisc", "replace", "dev", self._port, "root", *words)

    def fast(self) -> None:
        """As at first."""
        _execute("tc", "-n", self._switch, "qdisc", "del", "dev", self._port, "root")


@contextlib.contextmanager
def nodes(count: int) -> Iterator[list[NetworkNode]]:
    """So many nodes that reach each other. What still runs in one at the end is killed with it. Raises StartError."""
    mark = f"xmig-{os.getpid()}-{secrets.token_hex(3)}"
    switch = f"{mark}-switch"
    made: list[str] = []

    def make(name: str) -> None:
        _ip("netns", "add", name)
        made.append(name)
        _ip("-n", name, "link", "set", "lo", "up")

    try:
        make(switch)
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        each = [NetworkNode(f"{mark}-{place}", switch, place) for place in range(count)]
        for place, node in enumerate(each):
            make(node.name)
            port = f"port{place}"
            _ip("link", "add", INTERFACE, "netns", node.name, "type", "veth", "peer", "name", port, "netns", switch)
            _ip("-n", node.name, "addr", "add", f"{node.address}/24", "dev", INTERFACE)
            _ip("-n", switch, "link", "set", port, "master", "bridge")
            _ip("-n", switch, "link", "set", port, "up")
            _ip("-n", node.name, "link", "set", INTERFACE, "up")
        yield each
    finally:
        for name in reversed(made):
            _end_all(name)
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _end_all(name: str) -> None:
    """A namespace lives as long as a process in it, and so would the wire."""
    found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False).stdout
    for pid in found.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), 9)
