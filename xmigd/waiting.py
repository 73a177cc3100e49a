"""Waiting for something, for a while."""

from __future__ import annotations

import asyncio


async def happens(event: asyncio.Event, within: float) -> bool:
    """Is it set within so many seconds? Who is cancelled meanwhile is cancelled, also if it is set at that moment:
    `asyncio.wait_for` of Python 3.11 forgets that then, and a loop goes on for ever."""
    try:
        async with asyncio.timeout(within):
            await event.wait()
    except TimeoutError:
        return False
    return True
