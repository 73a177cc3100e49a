"""The peers that this node knows: `peers.json` in the state directory, entered by operators.

A peer's certificate is not entered but learned: whoever first shows one with the entered fingerprint, and has its key,
is the peer. It is kept, because TLS can verify clients only against certificates that it has.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from xmigd.errors import Conflict, Invalid, NotFound, StartError
from xmigd.peers.certificates import LONGEST, Identity, fingerprint_of
from xmigd.peers.contract import NAME
from xmigd.peers.files import write_privately

FILE = "peers.json"
MOST = 1024  # each has a link, whose cost docs/measurements/fleet.md has
FINGERPRINT = r"^[0-9a-f]{64}$"
ADDRESS = r"^(\[[0-9A-Fa-f:.%a-z]{2,64}\]|[A-Za-z0-9._-]{1,253}):[0-9]{1,5}$"


def split_address(address: str) -> tuple[str, int]:
    """`host:port`, or `[host]:port`. Raises ValueError."""
    if not re.fullmatch(ADDRESS, address):
        raise ValueError(f'"{address}" is no address; write HOST:PORT, or [ADDRESS]:PORT for IPv6')
    host, _, port = address.rpartition(":")
    if not 1 <= int(port) <= 65535:
        raise ValueError(f"there is no port {port}")
    return host.strip("[]"), int(port)


@dataclass(frozen=True, slots=True)
class KnownPeer:
    """What an operator entered, and its certificate (PEM) once it is known. Raises ValueError: it cannot be one."""

    name: str
    address: str
    fingerprint: str
    certificate: str | None = None

    def __post_init__(self) -> None:
        for value, pattern in ((self.name, NAME), (self.fingerprint, FINGERPRINT)):
            if not re.fullmatch(pattern, value):
                raise ValueError(f'"{value}" does not match {pattern}')
        split_address(self.address)
        if self.certificate is not None:
            if len(self.certificate) > LONGEST or not self.certificate.isascii():
                raise ValueError(f"the certificate of {self.name} is no PEM")
            if fingerprint_of(self.certificate) != self.fingerprint:
                raise ValueError(f"the certificate of {self.name} has another fingerprint")


class KnownPeers:
    """All of them. What is changed is on the disk before it counts; `save` may take as long as the disk does."""

    def __init__(self, folder: Path, node: str, identity: Identity) -> None:
        """Raises StartError: the file cannot be read."""
        self._path = folder / FILE
        self._node = node
        self._identity = identity
        self._peers = _read(self._path)

    def __iter__(self) -> Iterator[KnownPeer]:
        return iter(tuple(self._peers.values()))  # at once: threads look, too

    def get(self, name: str) -> KnownPeer | None:
        return self._peers.get(name)

    def named(self, fingerprint: str) -> KnownPeer | None:
        """Whose certificate has this fingerprint."""
        return next((peer for peer in self if peer.fingerprint == fingerprint), None)

    def check(self, peer: KnownPeer) -> None:
        """Raises Invalid, or Conflict: it cannot be added."""
        if peer.fingerprint == self._identity.fingerprint:
            raise Invalid(f"{peer.name} is this node", hint="xmigctl peer show, on the other node, says what to enter")
        if peer.name == self._node:
            raise Invalid(
                f"this node is called {peer.name}, too: two nodes with one name cannot be peers",
                hint="give one of them another name by the setting node (XMIG_NODE), and start its xmigd again",
            )
        other = self.get(peer.name) or self.named(peer.fingerprint)
        if other is not None:
            raise Conflict(
                f"the peer {other.name} at {other.address} has this name or fingerprint", code="peer_exists",
                hint=f"remove it first: xmigctl peer rm {other.name}",
            )  # fmt: skip
        if len(self._peers) >= MOST:
            raise Conflict(f"there are {MOST} peers", code="too_many_peers", hint="remove one that is gone")

    def find(self, name: str) -> KnownPeer:
        """Raises NotFound."""
        if (found := self.get(name)) is None:
            raise NotFound(f"there is no peer {name[:64]!r}", hint="xmigctl peer list lists them")
        return found

    def put(self, peer: KnownPeer) -> None:
        self._peers[peer.name] = peer

    def drop(self, name: str) -> None:
        self._peers.pop(name, None)

    def learn(self, name: str, certificate: str) -> KnownPeer:
        """Its certificate. Raises ValueError: it is another's."""
        peer = self._peers[name] = replace(self._peers[name], certificate=certificate)
        return peer

    def content(self, *, also: KnownPeer | None = None, without: str = "") -> bytes:
        """The file, as it is to be."""
        peers = [asdict(peer) for peer in (*self, *((also,) if also else ())) if peer.name != without]
        return json.dumps({"peers": peers}, indent=1).encode() + b"\n"

    def write(self, content: bytes) -> None:
        """Waits for the disk. Raises OSError."""
        write_privately(self._path, content)


def _read(path: Path) -> dict[str, KnownPeer]:
    try:
        with contextlib.suppress(FileNotFoundError):
            entries: Any = json.loads(path.read_text("utf-8"))["peers"]
            peers = [KnownPeer(**entry) for entry in entries]
            if len(peers) > MOST or len({p.name for p in peers}) + len({p.fingerprint for p in peers}) < 2 * len(peers):
                raise ValueError("there are too many, or one is there twice")
            return {peer.name: peer for peer in peers}
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise StartError(
            f"{path} cannot be read: {error}", hint="correct it, or remove it and enter the peers again"
        ) from None
    return {}
