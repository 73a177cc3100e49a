"""Peers as operators see them."""

from __future__ import annotations

from xmigd.errors import Invalid
from xmigd.peers.known import KnownPeer
from xmigd.peers.link import Link
from xmigd.peers.links import PeerLinks
from xmigd.peers.schemas import IdentityInfo, PeerInfo, PeerRequest


class Peers:
    def __init__(self, links: PeerLinks, address: str | None) -> None:
        """`address`: where peers connect."""
        self._links = links
        self._address = address

    def identity(self) -> IdentityInfo:
        own = self._links.identity
        return IdentityInfo(
            node=self._links.node, address=self._address, fingerprint=own.fingerprint, certificate=own.certificate
        )

    def listed(self) -> list[PeerInfo]:
        """In the order of their names."""
        return [_info(link) for link in self._links.links()]

    async def add(self, wanted: PeerRequest) -> PeerInfo:
        """Raises Invalid, Conflict, or Unavailable."""
        try:
            peer = KnownPeer(wanted.name, wanted.address, wanted.fingerprint, wanted.certificate)
        except ValueError as error:
            raise Invalid(str(error), hint="xmigctl peer show, on the other node, says what to enter") from None
        return _info(await self._links.add(peer))

    async def remove(self, name: str) -> None:
        """Raises NotFound, or Unavailable."""
        await self._links.remove(name)


def _info(link: Link) -> PeerInfo:
    peer = link.peer
    return PeerInfo(
        name=peer.name, address=peer.address, fingerprint=peer.fingerprint, state=link.state, why=link.why,
        changed_at=link.changed_at,
    )  # fmt: skip
