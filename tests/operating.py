"""Services that carry out operations, in a loop and without a daemon."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from xmigd.operations.service import Operations

WITHIN = 60.0  # seconds


class Operating(Protocol):
    @property
    def operations(self) -> Operations: ...


T = TypeVar("T", bound=Operating)


def run_with(make: Callable[[], T], test: Callable[[T], Awaitable[None]]) -> None:
    """The test with what is made in its loop, to the end of what that publishes."""

    async def main() -> None:
        node = make()
        async with asyncio.timeout(WITHIN):
            await test(node)
        await node.operations._bus.close()

    asyncio.run(main())
