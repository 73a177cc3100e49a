"""What several nodes do together, stage by stage: who has reached which, and whether somebody has given up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Literal

from xmigd.checkpoints.set_messages import Reached, Stage
from xmigd.errors import Conflict, Unavailable


class Exchange:
    """Lives in the event loop's thread. `failed` is called once, when somebody gives up."""

    def __init__(self, peers: Iterable[str]) -> None:
        self.peers = tuple(peers)
        self.decided = False  # by the one who leads: nothing can fail any more
        self.in_doubt: Literal["checkpoint", "restoration"] | None = None  # only the one who leads ends it
        self.failed: Callable[[str], None] = lambda why: None
        self._failure: tuple[str, str] | None = None
        self._reached: dict[tuple[Stage, str], Reached] = {}
        self._changed = asyncio.Event()

    def reached(self, peer: str, message: Reached) -> None:
        self._reached[message.stage, peer] = message
        self._changed.set()

    def fail(self, code: str, why: str) -> None:
        if self._failure is None:
            self._failure = (code, why)
            self._changed.set()
            self.failed(why)

    def check(self) -> None:
        """Raises Conflict: somebody has given up."""
        if self._failure is not None:
            code, why = self._failure
            raise Conflict(why, code=code)

    async def given_up(self) -> None:
        """Returns never. Raises Conflict once somebody has."""
        while True:
            self.check()
            self._changed.clear()
            await self._changed.wait()

    async def all(self, stage: Stage, within: float | None) -> list[Reached]:
        """Once all others have reached it. Raises Conflict, Unavailable: one has not within so many seconds."""
        try:
            async with asyncio.timeout(within):
                while missing := [one for one in self.peers if (stage, one) not in self._reached]:
                    self.check()
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise Unavailable(
                f"{', '.join(missing)} did not answer within {within:g} s", code="peer_unreachable"
            ) from None
        self.check()
        return [self._reached[stage, one] for one in self.peers]
