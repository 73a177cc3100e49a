"""Errors that nobody catches in xmig-web's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

import pytest
from anyio.abc import UNIXSocketStream

from xmigd.web.main import say_unless_late


@pytest.mark.parametrize("ours", [False, True])
def test_what_comes_for_a_reader_that_was_just_cancelled(caplog: pytest.LogCaptureFixture, ours: bool) -> None:
    """With the loop's own way it is logged as an error: should that end, anyio is mended, and ours can go."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(say_unless_late if ours else None)
        first, second = socket.socketpair()
        peer, end = socket.socketpair()
        with first, second, peer:
            async with await UNIXSocketStream.from_socket(end) as stream:
                reading = asyncio.ensure_future(stream.receive())
                while getattr(stream, "_receive_future", None) is None:  # it does not wait for news yet
                    await asyncio.sleep(0)
                # Both are seen in one pass of the loop, this one first.
                loop.add_reader(second, reading.cancel)
                first.send(b"go")
                peer.send(b"news")
                with contextlib.suppress(asyncio.CancelledError):
                    await reading
                loop.remove_reader(second)

    asyncio.run(main())
    assert ("invalid state" in caplog.text) != ours


def test_other_errors_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(say_unless_late)
        done: asyncio.Future[Any] = loop.create_future()
        done.set_result(None)

        def fail() -> None:
            done.set_result(None)

        loop.call_soon(fail)
        await asyncio.sleep(0.01)

    asyncio.run(main())
    assert "invalid state" in caplog.text
