"""The descriptor store of a node without a service manager: a process (shim/store) that only holds descriptors.

It outlives the daemon: the next one finds it through `descriptors.sock` in the runtime directory, and is given
everything that it has. Towards the daemon it is what systemd's store is (xmigd/systemd.py). It ends when it has
nothing, and nobody to hold it for: once there is no daemon, with the last of the programs.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from xmigd import log
from xmigd.ipc.channel import peer_of
from xmigd.ipc.fds import Fd
from xmigd.ipc.outbox import Outbox
from xmigd.native import DESCRIPTOR_STORE

SOCKET = "descriptors.sock"
# Seconds that the store may take with each of the descriptors that it gives back. On a loaded machine it may get no
# processor for some; another one in its place would have nothing.
PATIENCE = 30.0
RENEW_AFTER = 1.0  # seconds after which one that was lost is replaced
BACKLOG = 4

logger = log.get("descriptor_store")


class Store(Protocol):
    """Who keeps descriptors for the next daemon."""

    @property
    def present(self) -> bool: ...

    def take_kept(self) -> list[tuple[str, Fd]]:
        """What an earlier daemon left, with its names, oldest first; once."""

    def keep(self, name: str, fd: Fd, process: str = "") -> None: ...

    def drop(self, name: str) -> None: ...

    def watch(self, process: str, pidfd: Fd) -> None:
        """What is kept for `process` is of no use once that has exited."""

    def when_reported(self, then: Callable[[], None]) -> None:
        """`then`, once everything of before is with it."""

    def when_renewed(self, then: Callable[[], None]) -> None:
        """`then`, each time that another one has taken its place, and has nothing."""


class DescriptorStore:
    """The store's process and the connection to it. Without the program there is none, and nothing else changes."""

    def __init__(self, native_dir: Path, runtime_dir: Path) -> None:
        """Finds the one that is there, or starts one."""
        self._renewed: list[Callable[[], None]] = []
        self._program = native_dir / DESCRIPTOR_STORE
        self._socket = runtime_dir / SOCKET
        self._loop = asyncio.get_running_loop()
        self._child: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._outbox: Outbox | None = None
        self._renewal: asyncio.TimerHandle | None = None
        self._kept: list[tuple[str, Fd]] = []
        found = self._find() or self._start()
        if found is None:
            logger.warning("no descriptor store", why="memory is lost if xmigd and a GPU server die at the same moment")
        else:
            self._begin(*found)

    @property
    def present(self) -> bool:
        return self._outbox is not None

    @property
    def pid(self) -> int:
        """Its process; 0: there is none."""
        return 0 if self._sock is None else peer_of(self._sock).pid

    def take_kept(self) -> list[tuple[str, Fd]]:
        kept, self._kept = self._kept, []
        return kept

    def keep(self, name: str, fd: Fd, process: str = "") -> None:
        self._send(f"FDSTORE=1\nFDNAME={name}\nPROCESS={process}", fd)

    def drop(self, name: str) -> None:
        self._send(f"FDSTOREREMOVE=1\nFDNAME={name}")

    def watch(self, process: str, pidfd: Fd) -> None:
        self._send(f"WATCH=1\nPROCESS={process}", pidfd)

    def when_reported(self, then: Callable[[], None]) -> None:
        if self._outbox is not None:
            self._outbox.when_empty(then)

    def when_renewed(self, then: Callable[[], None]) -> None:
        self._renewed.append(then)

    def close(self) -> None:
        """The daemon leaves. What the store has, it holds for the next one."""
        if self._renewal is not None:
            self._renewal.cancel()
        if self._sock is not None:
            self._loop.remove_reader(self._sock.fileno())
        outbox, self._outbox, self._sock = self._outbox, None, None
        if outbox is not None:
            outbox.close()

    # --- its process ------------------------------------------------------------------------------------------------

    def _find(self) -> tuple[socket.socket, list[tuple[str, Fd]]] | None:
        """One that an earlier daemon has started."""
        try:
            return self._connect()
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        except (OSError, EOFError) as error:
            logger.warning("the descriptor store of the last daemon does not answer", why=str(error))
            return None

    def _start(self) -> tuple[socket.socket, list[tuple[str, Fd]]] | None:
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with listening:
                self._socket.unlink(missing_ok=True)
                mask = os.umask(0o177)
                try:
                    listening.bind(str(self._socket))
                finally:
                    os.umask(mask)
                listening.listen(BACKLOG)
                self._child = subprocess.Popen(
                    [self._program, "--listen-fd", str(listening.fileno())], stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/", env={}, start_new_session=True,
                    pass_fds=(listening.fileno(),),
                )  # fmt: skip
            return self._connect()
        except (OSError, EOFError) as error:
            logger.warning("the descriptor store cannot be started", program=str(self._program), why=str(error))
            self._socket.unlink(missing_ok=True)
            return None

    def _connect(self) -> tuple[socket.socket, list[tuple[str, Fd]]]:
        """The connection, and what it has. Raises OSError, or EOFError: it is on its way out."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.settimeout(PATIENCE)
            sock.connect(str(self._socket))
            if peer_of(sock).uid not in (0, os.geteuid()):
                raise PermissionError("it belongs to another user")
            kept: list[tuple[str, Fd]] = []
            while True:
                data, numbers, _, _ = socket.recv_fds(sock, 1024, 1, socket.MSG_CMSG_CLOEXEC)
                if data == b"END=1":
                    return sock, kept
                if not data:
                    raise EOFError("it has ended")
                name = data.decode("ascii").removeprefix("FDNAME=")
                kept.extend((name, Fd(number)) for number in numbers)
        except BaseException:
            sock.close()
            raise

    def _begin(self, sock: socket.socket, kept: list[tuple[str, Fd]]) -> None:
        self._sock, self._kept = sock, kept
        self._outbox = Outbox(sock, None, "the descriptor store")
        self._loop.add_reader(sock.fileno(), self._ended)
        logger.info("descriptor store", store_pid=self.pid, descriptors=len(kept))

    def _ended(self) -> None:
        """It says nothing: what can be read is its end."""
        logger.error("the descriptor store has ended", why="another one is started")
        self.close()
        if self._child is not None:
            self._child.poll()
        self._renewal = self._loop.call_later(RENEW_AFTER, self._renew)

    def _renew(self) -> None:
        self._renewal = None
        found = self._start()
        if found is not None:
            self._begin(*found)
            for then in self._renewed:
                then()

    def _send(self, message: str, *fds: Fd) -> None:
        if self._outbox is not None:
            self._outbox.send(message, fds)
