"""Servers that outlived an earlier daemon: they connect to control.sock and say what they have.

A process of the database is *expected* until its server has announced itself, or is known to be gone. A server that is
not expected (the database was lost or behind) is taken too, if its program is alive and belongs to the same user: no
record is worth a running program.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

from xmigd import log
from xmigd.errors import ProtocolError
from xmigd.records import LiveProcess
from xmigd.supervisor import messages as m
from xmigd.supervisor import pidfd as pidfds
from xmigd.supervisor.channel import Peer, Received, peer_pidfd
from xmigd.supervisor.fds import Fd, JobMemory, close_all
from xmigd.supervisor.process import Process
from xmigd.supervisor.server import Ending, Server, ServerHooks

logger = log.get("adoption")

ANNOUNCE_PATIENCE = 60.0


@dataclass(slots=True)
class Expected:
    live: LiveProcess
    pidfd: Fd | None = None  # of the server that the database names, while it lives
    waiting: list[Callable[[bool, str], None]] = field(default_factory=list)  # programs that ask about themselves


class Expectations:
    """The processes of the database whose fate is open."""

    def __init__(self, live: list[LiveProcess], grace: float, lost: Callable[[LiveProcess, str], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._lost = lost
        self._open: dict[str, Expected] = {}
        self._gone: dict[str, tuple[LiveProcess, str]] = {}  # with why; their programs may still ask
        for process in live:
            self._expect(process)
        self._timer = self._loop.call_later(grace, self._grace_is_over)

    def __contains__(self, process: str) -> bool:
        return process in self._open

    @property
    def rows(self) -> list[LiveProcess]:
        return [expected.live for expected in self._open.values()]

    def wait(self, process: str, callback: Callable[[bool, str], None]) -> None:
        self._open[process].waiting.append(callback)

    def find(self, job: str, pid: int) -> str | None:
        """The process by its own id, or by its job's and its pid."""
        return _find({name: expected.live for name, expected in self._open.items()}, job, pid)

    def why_gone(self, job: str, pid: int) -> str | None:
        """Why nothing is left of the process; None if it was never expected."""
        name = _find({name: live for name, (live, _) in self._gone.items()}, job, pid)
        return None if name is None else self._gone[name][1]

    def take(self, process: str) -> LiveProcess | None:
        """Its server is here."""
        expected = self._open.get(process)
        return None if expected is None else expected.live

    def settle(self, process: str, *, alive: bool, why: str) -> None:
        expected = self._open.pop(process, None)
        if expected is None:
            return
        if expected.pidfd is not None:
            self._loop.remove_reader(expected.pidfd.fileno())
            expected.pidfd.close()
        if not alive:
            self._gone[process] = (expected.live, why)
            self._lost(expected.live, why)
        for callback in expected.waiting:
            callback(alive, why)

    def close(self) -> None:
        self._timer.cancel()
        for expected in self._open.values():
            if expected.pidfd is not None:
                self._loop.remove_reader(expected.pidfd.fileno())
                expected.pidfd.close()
        self._open.clear()

    def _expect(self, live: LiveProcess) -> None:
        expected = Expected(live)
        self._open[live.row.id] = expected
        pid = live.server_pid or 0
        if not pidfds.same_process(pid, live.server_start_time or 0):
            return  # a newer server, that the database does not know, may still come: until the grace is over
        with contextlib.suppress(OSError):
            expected.pidfd = Fd(os.pidfd_open(pid))
            self._loop.add_reader(expected.pidfd.fileno(), self._server_gone, live.row.id)

    def _server_gone(self, process: str) -> None:
        self.settle(process, alive=False, why="its server ended while no daemon was there")

    def _grace_is_over(self) -> None:
        for name, expected in list(self._open.items()):
            if expected.pidfd is None:
                self.settle(name, alive=False, why="its server ended while no daemon was there")
            else:
                logger.warning("still waiting for a server", process=name[:12], server_pid=expected.live.server_pid)


def _find(processes: dict[str, LiveProcess], job: str, pid: int) -> str | None:
    for name, live in processes.items():
        if live.row.pid == pid and job.partition(":")[0] in (name, live.row.job):
            return name
    return None


@dataclass(slots=True)
class Adoptee:
    """A server in the middle of announcing itself."""

    announce: m.Announce
    peer: Peer
    server: Server
    client: Fd
    process: Process | None = None
    finished: bool = False


class Adopter:
    """Takes connections of control.sock through their announcement."""

    def __init__(
        self,
        *,
        serving: Callable[[str], bool],
        owner: Callable[[str], int | None],
        make: Callable[[m.Announce, Peer, Fd, JobMemory], Process],
        done: Callable[[Process, Server, int], None],
        failed: Callable[[str, str], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._serving = serving
        self._owner = owner
        self._make = make
        self._done = done
        self._failed = failed
        self._open: dict[str, Adoptee] = {}

    def first(self, sock: socket.socket, peer: Peer, received: Received) -> None:
        """The first message of a connection."""
        try:
            self._begin(sock, peer, received)
        except (ProtocolError, OSError) as error:
            why = str(error) if isinstance(error, ProtocolError) else f"{error.strerror}"
            logger.warning("server refused", server_pid=peer.pid, uid=peer.uid, why=why)
            close_all(received.fds)
            sock.close()

    def close(self) -> None:
        for adoptee in self._open.values():
            adoptee.server.forget()
            if adoptee.process is not None:
                adoptee.process.leave()
        self._open.clear()

    def _begin(self, sock: socket.socket, peer: Peer, received: Received) -> None:
        if received.fds_missing:
            raise ProtocolError("the daemon has no descriptors left to take it")
        message = m.parse(received.data)
        if not isinstance(message, m.Announce):
            raise ProtocolError(f"it begins with {message.type} instead of an announcement")
        if len(received.fds) != 5:
            raise ProtocolError(f"an announcement with {len(received.fds)} descriptors instead of 5")
        if message.pid != peer.pid:
            raise ProtocolError("it announces another process's pid")
        if self._serving(message.job) or message.job in self._open:
            raise ProtocolError("this process has a server")
        owner = self._owner(message.job)
        if owner is not None and peer.uid not in (0, owner):
            raise ProtocolError("the process belongs to another user")
        client_owner = pidfds.owner(message.client_pid)
        if client_owner is None or (peer.uid != 0 and client_owner != peer.uid):
            raise ProtocolError("its program is gone, or belongs to another user")
        client = Fd(os.pidfd_open(message.client_pid))
        pidfd = peer_pidfd(sock, peer.pid)
        process = self._make(message, peer, client, JobMemory(*received.fds))
        hooks = ServerHooks(
            started=lambda _: None,
            failed=lambda _, __: None,
            message=self._said,
            misbehaved=self._misbehaved,
            exited=self._exited,
        )
        server = Server(0, message.device, hooks)
        adoptee = Adoptee(message, peer, server, client, process)
        self._open[message.job] = adoptee
        server.adopt(peer.pid, pidfd, sock)
        self._loop.call_later(ANNOUNCE_PATIENCE, self._too_slow, adoptee)

    def _find(self, server: Server) -> Adoptee:
        return next(adoptee for adoptee in self._open.values() if adoptee.server is server)

    def _said(self, server: Server, message: m.ServerMessage, fds: list[Fd], missing: bool) -> None:
        adoptee = self._find(server)
        assert adoptee.process is not None
        match message:
            case m.MemoryAdd():
                why = adoptee.process.add_handle(message, fds, missing)
                if why is not None:
                    server.refuse(why)
            case m.Announced():
                del self._open[adoptee.announce.job]
                adoptee.finished = True
                server.hand_over(adoptee.process.hooks)
                self._done(adoptee.process, server, adoptee.announce.generation)
            case m.MemoryDrop():
                if (handle := adoptee.process.handles.pop(message.id, None)) is not None:
                    handle.fd.close()
            case m.Log():
                logger.info("server says", server_pid=server.pid, text=message.text)
            case _:
                close_all(fds)
                server.refuse(f"{message.type} in the middle of an announcement")

    def _misbehaved(self, server: Server, why: str) -> None:
        logger.warning("server misbehaved", server_pid=server.pid, why=why)
        server.kill()

    def _exited(self, server: Server, ending: Ending, since: int) -> None:
        adoptee = self._find(server)
        del self._open[adoptee.announce.job]
        adoptee.finished = True
        if adoptee.process is not None:
            adoptee.process.leave()
        self._failed(adoptee.announce.job, f"its server ended while it announced itself: {ending.text}")

    def _too_slow(self, adoptee: Adoptee) -> None:
        if not adoptee.finished:
            logger.warning("server killed", server_pid=adoptee.server.pid, why="its announcement does not end")
            adoptee.server.kill()
