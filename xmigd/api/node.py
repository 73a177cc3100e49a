"""The node and its health."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from fastapi import APIRouter

from xmigd import __version__
from xmigd.api.context import AnyCaller, TheNode
from xmigd.api.schemas import CallerInfo, Health, NodeInfo
from xmigd.errors import NotReady

router = APIRouter()
MIN_FREE = 8 << 20  # bytes of the database's disk


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
    return NodeInfo(
        version=__version__,
        pid=os.getpid(),
        uid=os.geteuid(),
        started_at=node.started_at,
        runtime_dir=str(node.settings.runtime_dir),
        database=str(node.settings.database),
        tcp_address=node.tcp_address,
        devices=node.settings.device_names,
        processes=len(node.supervisor.processes),
        database_failure=node.writer.failure,
    )


@router.get("/healthz", operation_id="get_health")
async def healthz() -> Health:
    """The daemon's event loop turns."""
    return Health()


@router.get("/readyz", operation_id="get_readiness")
async def readyz(node: TheNode) -> Health:
    """Programs can be started, everything can be recorded, and every server of an earlier daemon has been found."""
    if why := node.writer.failure or ("xmigd is stopping" if node.is_stopping() else ""):
        raise NotReady(why)
    if why := _no_room(node.settings.database):
        raise NotReady(why, hint="make room on it")
    if expected := node.supervisor.expected:
        names = ", ".join(process[:12] for process in expected[:10])
        raise NotReady(f"the servers of {len(expected)} processes have not announced themselves yet: {names}",
                       hint="ask again", retry_after=1)  # fmt: skip
    return Health()


def _no_room(database: Path) -> str:
    """Said before the first write fails."""
    try:
        free = shutil.disk_usage(database.parent).free
    except OSError as error:
        return f"the folder of the database is gone: {error.strerror}"
    return f"the database's disk is full: {free >> 10} KiB are free" if free < MIN_FREE else ""
