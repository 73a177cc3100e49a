"""What handlers work with, and who calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from fastapi import Depends, Query, Request
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from xmigd.api.cached import Cached
from xmigd.api.requests import Requests
from xmigd.api.schemas import EXACT
from xmigd.connections.quotas import Quotas
from xmigd.database.writer import Writer
from xmigd.devices.inventory import Inventory
from xmigd.driver_checkpoint.service import DriverMoves
from xmigd.errors import NotFound
from xmigd.events.bus import Bus
from xmigd.metrics.counts import Counts
from xmigd.metrics.series import Sampler
from xmigd.migrations.service import Moves
from xmigd.operations.service import Operations
from xmigd.policies.breaker import Breaker
from xmigd.policies.service import Policies
from xmigd.security.audit import Audit
from xmigd.security.callers import Caller
from xmigd.security.tokens import Tokens
from xmigd.settings import Settings
from xmigd.supervisor.supervisor import Supervisor


@dataclass(slots=True)
class Node:
    settings: Settings
    supervisor: Supervisor
    writer: Writer
    readers: Engine
    bus: Bus
    operations: Operations
    tokens: Tokens
    audit: Audit
    inventory: Inventory
    policies: Policies
    breaker: Breaker
    counts: Counts
    sampler: Sampler
    moves: Moves
    native: DriverMoves  # of programs that were not started under xMIG
    shims: list[Path]
    started_at: float
    connections: Quotas | None = None
    operators: int | None = None  # the operators' group
    tcp_address: str | None = None
    is_stopping: Callable[[], bool] = field(default=lambda: False)
    requests: Requests = field(default_factory=Requests)
    cached: Cached = field(init=False)

    def __post_init__(self) -> None:
        self.cached = Cached(self.writer)

    @contextmanager
    def read(self) -> Iterator[Session]:
        """The database, with all that has happened until now. It may wait for a write: not for the loop's thread."""
        self.writer.catch_up()
        with Session(self.readers) as session:
            yield session


# Not one of these waits for anything; those that are no coroutines would be run in a thread each.
async def _node(request: Request) -> Node:
    node: Node = request.app.state.node
    return node


async def _any_caller(request: Request) -> Caller:
    caller: Caller = request.state.caller
    return caller


async def _operating(request: Request) -> Caller:
    caller = await _any_caller(request)
    caller.check_scope("operate")
    return caller


async def _operator(request: Request) -> Caller:
    caller = await _any_caller(request)
    caller.check_operator()
    return caller


TheNode = Annotated[Node, Depends(_node)]
AnyCaller = Annotated[Caller, Depends(_any_caller)]  # who may look, at what they see
OperatingCaller = Annotated[Caller, Depends(_operating)]  # who may act, on what they see
OperatorCaller = Annotated[Caller, Depends(_operator)]  # who decides about the node
LocalCaller = OperatingCaller

Limit = Annotated[int, Query(ge=1, le=1000)]
BeforeNumber = Annotated[int | None, Query(ge=0, le=EXACT, description="those with a smaller id")]
BeforeId = Annotated[str | None, Query(max_length=32, description="those that are older than this one")]
Id = Annotated[str | None, Query(max_length=32)]


def check_may_control(caller: Caller, owner: int) -> None:
    """What belongs to somebody else is not there."""
    if not caller.sees(owner):
        raise NotFound("there is no such thing", hint="it may be somebody else's: operators see everything")
