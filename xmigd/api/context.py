"""What handlers work with, and who calls."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from fastapi import Depends, Request
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from xmigd.database.writer import Writer
from xmigd.errors import Forbidden
from xmigd.settings import Settings
from xmigd.supervisor.channel import Peer
from xmigd.supervisor.supervisor import Supervisor


@dataclass(slots=True)
class Node:
    settings: Settings
    supervisor: Supervisor
    writer: Writer
    readers: Engine
    shims: list[Path]
    started_at: float
    tcp_address: str | None = None
    is_stopping: Callable[[], bool] = field(default=lambda: False)

    @contextmanager
    def read(self) -> Iterator[Session]:
        with Session(self.readers) as session:
            yield session


def _node(request: Request) -> Node:
    node: Node = request.app.state.node
    return node


def _caller(request: Request) -> Peer | None:
    """The process at the other end of api.sock (the kernel's word). None: somebody on TCP, who may only read."""
    peer: Peer | None = getattr(request.state, "peer", None)
    return peer


def _local_caller(request: Request) -> Peer:
    peer = _caller(request)
    if peer is None:
        raise Forbidden("this needs the local socket api.sock; over TCP one may only read", code="read_only")
    return peer


TheNode = Annotated[Node, Depends(_node)]
LocalCaller = Annotated[Peer, Depends(_local_caller)]


def check_may_control(caller: Peer, owner: int) -> None:
    """Owners control what is theirs; root and the daemon's own user control everything."""
    if caller.uid not in (0, os.geteuid(), owner):
        raise Forbidden(f"this belongs to user {owner}, not to user {caller.uid}")
