"""A listening socket on the event loop.

asyncio's own server takes all connections that wait in one turn of the loop, thousands, and none for a second when
there are no descriptors: everybody else would wait for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Callable

from xmigd import log

ACCEPTS_PER_TURN = 64
logger = log.get("listener")


class Acceptor:
    """Gives each connection to `on_connection`, which then owns it. It does not own the listening socket."""

    def __init__(self, listening: socket.socket, name: str, on_connection: Callable[[socket.socket], None]) -> None:
        self._listening = listening
        self._name = name
        self._on_connection = on_connection
        # Given up for a moment to refuse a connection when there are no descriptors left: otherwise the listening
        # socket would stay readable and the loop would spin.
        self._spare: int | None = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._loop = asyncio.get_running_loop()
        listening.setblocking(False)
        self._loop.add_reader(listening.fileno(), self._acceptable)

    def close(self) -> None:
        if self._listening.fileno() >= 0:
            self._loop.remove_reader(self._listening.fileno())
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None

    async def wait_closed(self) -> None:
        """As of asyncio's servers."""

    def _acceptable(self) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                sock, _ = self._listening.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                self._cannot_accept(error)
                return
            sock.setblocking(False)
            self._on_connection(sock)

    def _cannot_accept(self, error: OSError) -> None:
        logger.error("a connection cannot be taken", socket=self._name, why=error.strerror)
        if error.errno in (errno.EMFILE, errno.ENFILE) and self._spare is not None:
            os.close(self._spare)
            self._spare = None
            with contextlib.suppress(OSError):
                self._listening.accept()[0].close()
        if self._spare is None:
            with contextlib.suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
