"""Who asks for pages without a pause waits for themselves; others are served in between."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from typing import Any

from tests import harness
from tests.connections.callers import HOG, OTHER, ask, crowd
from tests.daemon.conftest import MakeNode, make_node, peer_native
from tests.web.front import Front
from xmigd.connections.peers import user
from xmigd.connections.quotas import Place, Quotas
from xmigd.connections.turns import InTurn, Turns

__all__ = ["make_node", "peer_native"]

BUSY = 100  # connections


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


def places(*uids: int) -> list[Place]:
    quotas = Quotas(1000, 500)
    return [quotas.admit(user(uid)) for uid in uids]


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


class Asking:
    """Requests of places that have their turn, or wait for it, in the order in which they began."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self.began: list[str] = []
        self.tasks: set[asyncio.Task[None]] = set()

    def ask(self, name: str, place: Place, browser: str = "") -> asyncio.Event:
        done = asyncio.Event()

        async def work() -> None:
            if not await self.turns.take(place, browser):
                self.began.append(f"{name} has gone")
                return
            self.began.append(name)
            await done.wait()
            self.turns.leave(place)

        self.tasks.add(asyncio.ensure_future(work()))
        return done

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


def test_each_has_few_at_once_and_others_go_first() -> None:
    async def test() -> None:
        asking = Asking(Turns(each=2, all_together=3))
        hog, other, third = places(1, 2, 3)
        ends = [asking.ask(f"hog {number}", hog) for number in range(6)]
        await settle()
        assert asking.began == ["hog 0", "hog 1"]
        asking.ask("other", other)
        asking.ask("third", third)
        await settle()
        assert asking.began[2:] == ["other"]  # there is one more turn in all, and it is not the hog's
        ends[0].set()
        await settle()
        assert asking.began[3:] == ["third"]  # who waits since then comes before the hog's next, of those who may
        ends[1].set()
        await settle()
        assert asking.began[4:] == ["hog 2"]
        await asking.end()

    run(test)


def test_browsers_of_one_address_in_turn() -> None:
    async def test() -> None:
        asking = Asking(Turns(each=1, all_together=1))
        (proxy,) = places(1)
        first = asking.ask("at work", proxy)
        await settle()
        ends = [asking.ask(f"a {number}", proxy, "a") for number in range(3)]
        ends.append(asking.ask("b", proxy, "b"))
        for end in (first, *ends):
            end.set()
        await settle()
        assert asking.began == ["at work", "a 0", "b", "a 1", "a 2"]

    run(test)


def test_who_has_gone_gets_none() -> None:
    """Neither a connection that ended nor a request that was cancelled holds up, or keeps, a turn."""

    async def test() -> None:
        asking = Asking(Turns(each=1, all_together=1))
        first, gone, last = places(1, 1, 1)
        end = asking.ask("first", first)
        await settle()
        asking.ask("gone", gone)
        cancelled = asyncio.ensure_future(asking.turns.take(first))
        await settle()
        asking.ask("last", last).set()
        gone.leave()
        cancelled.cancel()
        end.set()
        await settle()
        assert asking.began == ["first", "gone has gone", "last"]
        assert await asyncio.wait_for(asking.turns.take(first), 60)
        asking.turns.leave(first)
        # Cancelled at the moment at which it is its turn.
        await asking.turns.take(first)
        late = asyncio.ensure_future(asking.turns.take(first))
        await settle()
        asking.turns.leave(first)
        await asyncio.sleep(0)
        late.cancel()
        await settle()
        assert await asyncio.wait_for(asking.turns.take(first), 60)

    run(test)


def test_one_begins_in_each_round_of_the_loop() -> None:
    async def test() -> None:
        asking = Asking(Turns(each=50, all_together=3))
        (hog,) = places(1)
        ends = [asking.ask(f"{number}", hog) for number in range(9)]
        await settle()
        for end in ends:
            end.set()
        before, most = len(asking.began), 0
        while len(asking.began) < 9:
            await asyncio.sleep(0)
            most, before = max(most, len(asking.began) - before), len(asking.began)
        assert most == 1

    run(test)


def test_a_turn_does_not_wait_for_a_visitor() -> None:
    """A body that does not come keeps nobody waiting, and an answer that is read slowly does not, either."""

    async def test() -> None:
        here, unread = asyncio.Event(), asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            if scope["path"] == "/slow":
                await receive()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})

        async def receive() -> Any:
            await here.wait()
            return {"type": "http.request", "body": b"", "more_body": False}

        sent: list[str] = []
        served = InTurn(app, Turns(each=1, all_together=1))
        slow, quick = places(1, 1)

        def request(path: str, place: Place, *, reads: bool) -> asyncio.Task[None]:
            async def send(message: Any) -> None:
                if not reads:
                    await unread.wait()
                if message["type"] == "http.response.start":
                    sent.append(path)

            scope = {"type": "http", "path": path, "headers": [], "state": {"place": place}}
            return asyncio.ensure_future(served(scope, receive, send))

        tasks = [request("/slow", slow, reads=True), request("/unread", quick, reads=False)]
        await settle()
        tasks.append(request("/quick", quick, reads=True))
        await settle()
        assert sent == ["/quick"]
        here.set()
        unread.set()
        await asyncio.gather(*tasks)
        assert sorted(sent) == ["/quick", "/slow", "/unread"]

    run(test)


@harness.needs_root
def test_others_do_not_wait_for_a_hundred_pages(make_node: MakeNode) -> None:
    """However slow this machine is: another user's page comes in a fraction of the time that the hog's take, each of
    which waits for a hundred."""
    node = make_node()
    node.start()
    with contextlib.ExitStack() as stack:
        target = stack.enter_context(Front(node)).address.removeprefix("http://")
        end = stack.enter_context(crowd("busy", target, BUSY, HOG))
        took: list[float] = []
        for _ in range(30):
            began = time.monotonic()
            assert ask(target, "/login", uid=OTHER)[0] == 200
            took.append(time.monotonic() - began)
        found = end()
        assert found["pages"] > BUSY, found
        assert sorted(took)[15] < found["page"] / 4, (sorted(took), found)
