"""Requests of everybody, served in turn: whoever asks without a pause waits for themselves, not others for them.

Pages are made one after the other by one thread. A hundred requests of one user that are begun together are a hundred
pages until the next one of somebody else goes on.

Invariants:
  Of one user of this machine, or one address, at most EACH requests are worked on at once, and at most ALL of all.
  What waits is taken from each user in turn, and of each user from each browser in turn: an address may be a proxy.
  One request begins in each round of the event loop: most pages wait for nothing, and are made in one go; a new
  connection takes several rounds until it has requested.
  A turn ends when the answer begins: a stream of events has none. It does not last while a visitor's words are waited
  for. Who asks for health does not wait for one, and who has gone gets none.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from xmigd.connections.quotas import Place

EACH = 3
ALL = 6
HEALTH = frozenset({"/healthz", "/readyz"})
BROWSER = 256  # characters of its cookies that tell it from others


@dataclass(frozen=True, slots=True)
class _Waiting:
    place: Place
    turn: asyncio.Future[bool]  # False: it has gone


class Turns:
    def __init__(self, each: int = EACH, all_together: int = ALL) -> None:
        self._each = each
        self._all = all_together
        self._at_work: Counter[str] = Counter()  # by user
        self._total = 0
        self._next_round: asyncio.Handle | None = None
        # By user, by browser. Nothing empty is kept; the next in turn is the first.
        self._waiting: OrderedDict[str, OrderedDict[str, deque[_Waiting]]] = OrderedDict()

    async def take(self, place: Place, browser: str = "") -> bool:
        """Wait for this request's turn, which `leave` ends. False: nobody waits for the answer any more."""
        user = place.who.name
        if self._next_round is None and not self._waiting and self._may(user):
            self._begin(user)
            return True
        waiting = _Waiting(place, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(user, OrderedDict()).setdefault(browser, deque()).append(waiting)
        self._go_on()
        try:
            return await waiting.turn
        except asyncio.CancelledError:
            if waiting.turn.done() and not waiting.turn.cancelled() and waiting.turn.result():
                self.leave(place)  # it was given at the same moment
            raise

    def leave(self, place: Place) -> None:
        user = place.who.name
        self._at_work[user] -= 1
        if not self._at_work[user]:
            del self._at_work[user]
        self._total -= 1
        if self._waiting:
            self._go_on()

    def _may(self, user: str) -> bool:
        return self._total < self._all and self._at_work[user] < self._each

    def _begin(self, user: str) -> None:
        self._at_work[user] += 1
        self._total += 1
        self._go_on()

    def _go_on(self) -> None:
        """In the next round of the loop."""
        if self._next_round is None:
            self._next_round = asyncio.get_running_loop().call_soon(self._give)

    def _give(self) -> None:
        self._next_round = None
        # Whoever has the least at work; of those the one that has waited the longest for its turn.
        for user in sorted(self._waiting, key=self._at_work.__getitem__):
            if self._may(user) and (turn := self._next(user)) is not None:
                self._begin(user)
                turn.set_result(True)
                return

    def _next(self, user: str) -> asyncio.Future[bool] | None:
        """The next of this user's, who comes after all others then."""
        while browsers := self._waiting.get(user):
            browser, waiting = next(iter(browsers.items()))
            first = waiting.popleft()
            browsers.move_to_end(browser)
            if not waiting:
                del browsers[browser]
            self._waiting.move_to_end(user)
            if not browsers:
                del self._waiting[user]
            if first.turn.done():  # cancelled
                continue
            if first.place.kind != "over":
                return first.turn
            first.turn.set_result(False)
        return None


class InTurn:
    """Around an application behind our connections (xmigd.connections.http)."""

    def __init__(self, app: ASGIApp, turns: Turns) -> None:
        self._app = app
        self._turns = turns

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        place: Place | None = scope.get("state", {}).get("place")
        if place is None or scope["path"] in HEALTH:
            await self._app(scope, receive, send)
            return
        browser = Headers(scope=scope).get("cookie", "")[:BROWSER]
        mine = await self._turns.take(place, browser)
        if not mine:
            return
        answered = False

        def over() -> None:
            nonlocal mine
            if mine:
                mine = False
                self._turns.leave(place)

        async def receiving() -> Message:
            nonlocal mine
            over()
            message = await receive()
            if message["type"] == "http.request" and not answered:
                mine = await self._turns.take(place, browser)
            return message

        async def sending(message: Message) -> None:
            nonlocal answered
            answered = True
            over()
            await send(message)

        try:
            await self._app(scope, receiving, sending)
        finally:
            over()
