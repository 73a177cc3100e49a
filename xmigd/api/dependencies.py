"""What handlers get: the services that they name, who calls, and parameters that many of them have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, cast

from fastapi import Depends, Query, Request

from xmigd.schemas import EXACT
from xmigd.security.callers import Caller

T = TypeVar("T")


class Services:
    """What there is for handlers, one of each class."""

    def __init__(self, *services: object) -> None:
        self._of = {type(service): service for service in services}

    def get(self, kind: type[T]) -> T:
        return cast(T, self._of[kind])


@dataclass(frozen=True)
class Provided:
    """What FastAPI takes for a function that a handler depends on; xmigd.api.dispatch has the service itself."""

    kind: type[Any]

    def __call__(self) -> Any:
        raise LookupError(f"there is no {self.kind.__name__}: the document alone has no services")


def provided(kind: type[Any]) -> Any:
    """The dependency of a handler that works with the node's one `kind`: ``Annotated[Jobs, provided(Jobs)]``."""
    return Depends(Provided(kind))


# Not one of these waits for anything; those that are no coroutines would be run in a thread each.
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


AnyCaller = Annotated[Caller, Depends(_any_caller)]  # who may look, at what they see
OperatingCaller = Annotated[Caller, Depends(_operating)]  # who may act, on what they see
OperatorCaller = Annotated[Caller, Depends(_operator)]  # who decides about the node

Limit = Annotated[int, Query(ge=1, le=1000)]
BeforeNumber = Annotated[int | None, Query(ge=0, le=EXACT, description="those with a smaller id")]
BeforeId = Annotated[str | None, Query(max_length=32, description="those that are older than this one")]
Id = Annotated[str | None, Query(max_length=32)]
