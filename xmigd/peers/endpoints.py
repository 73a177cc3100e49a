"""Peers: the daemons of other nodes."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Response

from xmigd.api.dependencies import OperatorCaller, provided
from xmigd.api.routing import make_router
from xmigd.peers.schemas import IdentityInfo, PeerInfo, PeerRequest
from xmigd.peers.service import Peers

router = make_router("/v1")
ThePeers = Annotated[Peers, provided(Peers)]
LINKS = {"remove_peer": {"operationId": "remove_peer", "parameters": {"peer": "$response.body#/name"}}}


@router.get("/identity", operation_id="get_identity")
async def get_identity(peers: ThePeers, _: OperatorCaller) -> IdentityInfo:
    """What operators of other nodes enter to make this node a peer of theirs. For operators."""
    return peers.identity()


@router.get("/peers", operation_id="list_peers")
async def list_peers(peers: ThePeers, _: OperatorCaller) -> list[PeerInfo]:
    """The nodes that this one knows, by their names, and whether they are connected. For operators."""
    return peers.listed()


@router.post(
    "/peers",
    operation_id="add_peer",
    status_code=201,
    responses={201: {"description": "It is known.", "links": LINKS}},
)
async def add_peer(peers: ThePeers, _: OperatorCaller, wanted: PeerRequest, response: Response) -> PeerInfo:
    """Let a node be a peer. The other one has to know this node, too, before they are connected."""
    info = await peers.add(wanted)
    response.headers["Location"] = f"/v1/peers/{info.name}"
    return info


@router.delete("/peers/{peer}", operation_id="remove_peer", status_code=204)
async def remove_peer(peers: ThePeers, _: OperatorCaller, peer: Annotated[str, Path(max_length=64)]) -> None:
    """Know that node no more. Its connection ends, and what was sent and not received is gone."""
    await peers.remove(peer)
