"""What is being sent is given up at once: when somebody cancels, and when the program has stood still for too long."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from xmigd.errors import Cancelled, Conflict, Unavailable, XmigError
from xmigd.operations.operation import Operation
from xmigd.transfers.departures import Leaving, _unless_given_up
from xmigd.transfers.wire import Closing, lost

CHUNK = bytes(1 << 20)
NONE: Any = None


def leaving(max_standstill_ms: float | None = None) -> Leaving:
    found = Leaving("t", (), 1, "two", (), NONE, max_standstill_ms, NONE)
    found.stopped_at = None if max_standstill_ms is None else time.monotonic()
    return found


def sends_for_ever(closing: Closing, sent: threading.Event | None = None) -> None:
    """To somebody who takes nothing. Raises Unavailable."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_connection(listening.getsockname()) as sock,
        closing.of(sock),
    ):
        try:
            while True:
                sock.send(CHUNK)
                if sent is not None:
                    sent.set()
        except OSError as error:
            raise lost(error) from None


async def given_up(
    calls: Callable[[Closing], Any], of: Leaving, *, cancel: threading.Event | None = None
) -> XmigError:  # fmt: skip
    """The error. It is cancelled after `cancel`."""
    operation = Operation(NONE, lambda *_: None)
    running = asyncio.ensure_future(_unless_given_up(operation, of, calls))
    if cancel is not None:
        await asyncio.to_thread(cancel.wait)
        operation.cancelled.set()
    with pytest.raises(XmigError) as caught:
        await asyncio.wait_for(running, 10)
    return caught.value


def test_somebody_cancels() -> None:
    sent = threading.Event()
    error = asyncio.run(given_up(partial(sends_for_ever, sent=sent), leaving(), cancel=sent))
    assert isinstance(error, Cancelled)
    assert error.process_location == "source"


def test_it_has_stood_still_for_long_enough() -> None:
    error = asyncio.run(given_up(sends_for_ever, leaving(300.0)))
    assert isinstance(error, Conflict)
    assert (error.code, error.process_location) == ("downtime", "source")


def test_a_connection_that_is_lost_by_itself() -> None:
    def fails(_: Closing) -> None:
        raise lost(ConnectionResetError())

    assert isinstance(asyncio.run(given_up(fails, leaving(60_000.0))), Unavailable)


def test_one_that_is_opened_too_late() -> None:
    """The next one of several: it ends like those before it."""
    closing = Closing()
    closing.close()
    with pytest.raises(Unavailable):
        sends_for_ever(closing)


def test_descriptors_of_others_are_left_alone() -> None:
    """A connection that is over does not lend its number to what is closed later."""
    closing = Closing()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        with socket.create_connection(listening.getsockname()) as sock, closing.of(sock):
            number = sock.fileno()
        with socket.create_connection(listening.getsockname()) as other:
            assert other.fileno() == number
            closing.close()
            other.sendall(b"x")


def test_who_receives_is_woken_up() -> None:
    closing, ended = Closing(), threading.Event()
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_connection(listening.getsockname()) as sock,
    ):

        def receive() -> None:
            with closing.of(sock):
                assert sock.recv(1) == b""
            ended.set()

        thread = threading.Thread(target=receive)
        thread.start()
        closing.close()
        assert ended.wait(10)
        thread.join()
