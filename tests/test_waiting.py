"""Loops that wait for something end when they are cancelled."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from xmigd.demo import node, nodes
from xmigd.waiting import happens


@pytest.mark.parametrize("closely", [False, True])
def test_what_passes_quickly_is_looked_for_closely(monkeypatch: pytest.MonkeyPatch, closely: bool) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("time.sleep", pauses.append)
    monkeypatch.setattr("time.monotonic", itertools.count().__next__)
    nodes.wait(lambda: len(pauses) == 9, "it does not hold", closely=closely)
    assert (set(pauses) == {node.SHORTEST_PAUSE}) == closely


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
