"""Loops that wait for something end when they are cancelled."""

from __future__ import annotations

import asyncio

from xmigd.waiting import happens


def test_is_cancelled_at_the_same_moment() -> None:
    async def loop(event: asyncio.Event) -> None:
        while True:
            event.clear()
            await happens(event, 60)

    async def run() -> None:
        event = asyncio.Event()
        task = asyncio.create_task(loop(event))
        for _ in range(3):
            await asyncio.sleep(0)
        event.set()
        task.cancel()
        await asyncio.wait([task], timeout=5)
        assert task.cancelled()

    asyncio.run(run())


def test_says_whether_it_happened() -> None:
    async def run() -> None:
        event = asyncio.Event()
        assert not await happens(event, 0.01)
        event.set()
        assert await happens(event, 0.01)

    asyncio.run(run())
