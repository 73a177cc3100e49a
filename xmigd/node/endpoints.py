"""The node and its health."""

from __future__ import annotations

from typing import Annotated

from xmigd.api.dependencies import AnyCaller, provided
from xmigd.api.routing import make_router
from xmigd.node.schemas import CallerInfo, Health, NodeInfo
from xmigd.node.service import Node

router = make_router()
TheNode = Annotated[Node, provided(Node)]


@router.get("/v1/caller", operation_id="get_caller")
async def get_caller(caller: AnyCaller) -> CallerInfo:
    """Who you are to this daemon, and what you may do."""
    return CallerInfo(
        name=caller.name, scope=caller.scope, uid=caller.uid, operator=caller.is_operator,
        sees_everything=caller.owner is None,
    )  # fmt: skip


@router.get("/v1/node", operation_id="get_node")
async def get_node(node: TheNode, _: AnyCaller) -> NodeInfo:
    """This node and its daemon."""
    return node.info()


@router.get("/healthz", operation_id="get_health")
async def healthz() -> Health:
    """The daemon's event loop turns."""
    return Health()


@router.get("/readyz", operation_id="get_readiness")
async def readyz(node: TheNode) -> Health:
    """Programs can be started, everything can be recorded, and every server of an earlier daemon has been found."""
    node.check_ready()
    return Health()
