"""Servers that outlived an earlier daemon: they connect to control.sock and say what they have.

A process of the database is *expected* until its server has announced itself, or is known to be gone. A server that is
not expected (the database was lost or behind) is taken too, if its program is alive and belongs to the same user: no
record is worth a running program.

A process that was moving may have two servers: a source that stands still (or a holder) and a target that was
instructed to take. The target is the one if it lives. So whoever else announces the process is kept waiting until the
target has announced itself, and is killed then, or is taken once the target's exit was seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

from xmigd import log
from xmigd.devices import header
from xmigd.errors import ProtocolError
from xmigd.ipc import messages as m
from xmigd.ipc import pidfd as pidfds
from xmigd.ipc.channel import Peer, Received, peer_pidfd
from xmigd.ipc.fds import Fd, close_all
from xmigd.memory.handles import JobMemory
from xmigd.records import LiveProcess, ProcessRow
from xmigd.servers.server import Ending, Server, ServerHooks
from xmigd.supervisor.process import Process

logger = log.get("adoption")

ANNOUNCE_PATIENCE = 60.0
ENDED_ALONE = "its server ended while no daemon was there"


class Superseded(ProtocolError):
    """A holder of what its process does not need any more. It would try for as long as the program runs, and what it
    holds must never be taken for the process's state."""


@dataclass(slots=True)
class Expected:
    live: LiveProcess
    pidfd: Fd | None = None  # of the server that the database names, or else the journal, while it lives
    rival: Fd | None = None  # of the target to which the process was moving, while it lives
    waiting: list[Callable[[bool, str], None]] = field(default_factory=list)  # programs that ask about themselves


class Expectations:
    """The processes of the database whose fate is open."""

    def __init__(
        self,
        live: list[LiveProcess],
        grace: float,
        *,
        holder: Callable[[LiveProcess], int],
        rescue: Callable[[LiveProcess, str], str],
        lost: Callable[[LiveProcess, str], None],
        rival_gone: Callable[[str], None],
        settled: Callable[[], None],
    ) -> None:
        """`holder`: the pid of the server that lives and has the process, though the database does not name it; 0: none
        is known. `rescue` goes on without the server, or returns why that cannot be; `settled`: nobody's fate is open.
        """
        self._loop = asyncio.get_running_loop()
        self._rival_gone = rival_gone
        self._holder = holder
        self._rescue = rescue
        self._lost = lost
        self._settled = settled
        self._open: dict[str, Expected] = {}
        self._gone: dict[str, tuple[LiveProcess, str]] = {}  # with why; their programs may still ask
        for process in live:
            self._expect(process)
        self._timer = self._loop.call_later(grace, self._grace_is_over)
        if not live:
            self._loop.call_soon(settled)

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

    def rival(self, process: str) -> LiveProcess | None:
        """Does the target live to which the process was moving?"""
        expected = self._open.get(process)
        return None if expected is None or expected.rival is None else expected.live

    def settle(self, process: str, *, alive: bool, why: str) -> None:
        expected = self._open.pop(process, None)
        if expected is None:
            return
        self._forget(expected)
        if not alive:
            why_not = self._rescue(expected.live, why)
            alive = not why_not
            if why_not:
                why = f"{why}, and {why_not}"
                self._gone[process] = (expected.live, why)
                self._lost(expected.live, why)
        for callback in expected.waiting:
            callback(alive, why)
        if not self._open:
            self._settled()

    def close(self) -> None:
        self._timer.cancel()
        for expected in self._open.values():
            self._forget(expected)
        self._open.clear()

    def _forget(self, expected: Expected) -> None:
        for pidfd in (expected.pidfd, expected.rival):
            if pidfd is not None:
                self._loop.remove_reader(pidfd.fileno())
                pidfd.close()

    def _expect(self, live: LiveProcess) -> None:
        expected = Expected(live)
        self._open[live.row.id] = expected
        self._watch_rival(expected)
        pid = live.server_pid or 0
        if not pidfds.same_process(pid, live.server_start_time or 0):
            pid = self._holder(live)  # a newer server, of which there is no record
        with contextlib.suppress(OSError):
            if pid != 0:
                expected.pidfd = Fd(os.pidfd_open(pid))
                self._loop.add_reader(expected.pidfd.fileno(), self._server_gone, live.row.id)
        if expected.pidfd is None:
            # One that nobody knows may still come: until the grace is over. Unless the process's own journal, if that
            # was kept, says that there is none.
            self._loop.call_soon(self._rescue_early, live.row.id)

    def _rescue_early(self, process: str) -> None:
        expected = self._open.get(process)
        if expected is not None and expected.rival is None and not self._rescue(expected.live, ENDED_ALONE):
            self.settle(process, alive=True, why="")

    def _watch_rival(self, expected: Expected) -> None:
        move = expected.live.migration
        if move is None or not pidfds.same_process(move.target_pid or 0, move.target_start_time or 0):
            return
        with contextlib.suppress(OSError):
            expected.rival = Fd(os.pidfd_open(move.target_pid or 0))
            self._loop.add_reader(expected.rival.fileno(), self._target_gone, expected)

    def _target_gone(self, expected: Expected) -> None:
        assert expected.rival is not None
        self._loop.remove_reader(expected.rival.fileno())
        expected.rival.close()
        expected.rival = None
        self._rival_gone(expected.live.row.id)
        live = expected.live
        if _may_be_held(live):
            return
        if expected.pidfd is None and not pidfds.same_process(live.server_pid or 0, live.server_start_time or 0):
            self.settle(live.row.id, alive=False, why="its servers ended while no daemon was there")

    def _server_gone(self, process: str) -> None:
        expected = self._open[process]
        if expected.rival is not None and expected.pidfd is not None:  # its target has the process, or had it
            self._loop.remove_reader(expected.pidfd.fileno())
            expected.pidfd.close()
            expected.pidfd = None
            return
        if _may_be_held(expected.live) and expected.pidfd is not None:
            self._loop.remove_reader(expected.pidfd.fileno())
            expected.pidfd.close()
            expected.pidfd = None
            return
        self.settle(process, alive=False, why=ENDED_ALONE)

    def _grace_is_over(self) -> None:
        for name, expected in list(self._open.items()):
            if expected.pidfd is None and expected.rival is None:
                self.settle(name, alive=False, why=ENDED_ALONE)
            else:
                logger.warning("still waiting for a server", process=name[:12])


def _may_be_held(live: LiveProcess) -> bool:
    """Was it being suspended? Then its server's end is no loss: a holder may have everything, and announce itself."""
    return live.migration is not None and live.migration.kind == "suspend"


def _find(processes: dict[str, LiveProcess], job: str, pid: int) -> str | None:
    for name, live in processes.items():
        if live.row.pid == pid and job.partition(":")[0] in (name, live.row.job, live.row.origin):
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
    reported: list[m.ServerMessage] = field(default_factory=list)  # after its announcement, while it was parked
    parked: bool = False  # it has announced itself, and waits for what becomes of a target


def _is_program(row: ProcessRow | None, pid: int) -> bool:
    """Is it the recorded process's program? It may have become another user's since it began."""
    return row is not None and row.pid == pid and pidfds.same_process(pid, row.start_time)


class Adopter:
    """Takes connections of control.sock through their announcement."""

    def __init__(
        self,
        *,
        serving: Callable[[str], bool],
        known: Callable[[str], ProcessRow | None],
        make: Callable[[m.Announce, Peer, Fd, JobMemory], Process],
        rival: Callable[[str], LiveProcess | None],
        left_over: Callable[[str, int], bool],
        done: Callable[[Process, Server, m.Announce], None],
        failed: Callable[[str, str], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._serving = serving
        self._known = known
        self._make = make
        self._rival = rival
        self._left_over = left_over
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
            if isinstance(error, Superseded):
                with contextlib.suppress(OSError):
                    sock.send(m.pack("stop"), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            close_all(received.fds)
            sock.close()

    def rival_gone(self, process: str) -> None:
        """The target has ended. Whoever waited for that has the process."""
        adoptee = self._open.get(process)
        if adoptee is not None and adoptee.parked:
            self._take(adoptee)

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
        expected = m.expected_fds(message)
        if len(received.fds) != expected:
            raise ProtocolError(f"an announcement with {len(received.fds)} descriptors instead of {expected}")
        if message.pid != peer.pid:
            raise ProtocolError("it announces another process's pid")
        if message.keeps is not None and message.snapshot not in (None, header.snapshot(received.fds[0].fileno())):
            raise Superseded("the process has gone on since it was given to this holder")
        self._make_way(sock, peer, message)
        known = self._known(message.job)
        owner = None if known is None else known.uid
        if owner is not None and peer.uid not in (0, owner):
            raise ProtocolError("the process belongs to another user")
        client_owner = pidfds.owner(message.client_pid)
        if client_owner is None or (peer.uid not in (0, client_owner) and not _is_program(known, message.client_pid)):
            raise ProtocolError("its program is gone, or belongs to another user")
        client = Fd(os.pidfd_open(message.client_pid))
        pidfd = peer_pidfd(sock, peer.pid)
        process = self._make(message, peer, client, JobMemory(*received.fds))
        hooks = ServerHooks(
            started=lambda _: None,
            failed=lambda _, __: None,
            message=self._reported,
            misbehaved=self._misbehaved,
            exited=self._exited,
            printed=self._printed,
        )
        server = Server(0, message.device, hooks)
        server.takes_profiling = message.takes_profiling
        server.takes_sharing = message.takes_sharing
        adoptee = Adoptee(message, peer, server, client, process)
        self._open[message.job] = adoptee
        server.adopt(peer.pid, pidfd, sock, takes_output=message.takes_output)
        self._loop.call_later(ANNOUNCE_PATIENCE, self._too_slow, adoptee)

    def _make_way(self, sock: socket.socket, peer: Peer, message: m.Announce) -> None:
        """One process has one server. Of a source and its target the target is it, whoever comes first."""
        other = self._open.get(message.job)
        if other is not None and other.peer.pid != peer.pid and self._is_rival(message.job, peer.pid):
            del self._open[message.job]
            other.finished = True  # or not even begun: whoever it is, it stands still, or keeps what nobody needs now
            self._kill(other.server, "its target has the process")
            assert other.process is not None
            other.process.leave()
            return
        if other is None and not self._serving(message.job):
            return
        if self._left_over(message.job, peer.pid):  # nobody will ever tell it to go on
            with contextlib.suppress(OSError):
                pidfds.send_signal(peer_pidfd(sock, peer.pid), signal.SIGKILL)
        if other is None and message.keeps is not None:
            raise Superseded("this process has a server")
        raise ProtocolError("this process has a server")

    def _is_rival(self, process: str, pid: int) -> bool:
        live = self._rival(process)
        return live is not None and live.migration is not None and live.migration.target_pid == pid

    def _kill(self, server: Server, why: str) -> None:
        logger.info("killing a server", server_pid=server.pid, why=why)
        server.hand_over(
            ServerHooks(
                started=lambda _: None, failed=lambda _, __: None, misbehaved=lambda _, __: None,
                message=lambda _, __, fds, ___: close_all(fds), exited=lambda _, __, ___: None,
            )
        )  # fmt: skip
        server.kill()

    def _find(self, server: Server) -> Adoptee:
        return next(adoptee for adoptee in self._open.values() if adoptee.server is server)

    def _take(self, adoptee: Adoptee) -> None:
        assert adoptee.process is not None
        del self._open[adoptee.announce.job]
        adoptee.server.hand_over(adoptee.process.hooks)
        self._done(adoptee.process, adoptee.server, adoptee.announce)
        for message in adoptee.reported:
            adoptee.process.hooks.message(adoptee.server, message, [], False)

    def _reported(self, server: Server, message: m.ServerMessage, fds: list[Fd], missing: bool) -> None:
        adoptee = self._find(server)
        assert adoptee.process is not None
        match message:
            case m.MemoryAdd():
                why = adoptee.process.add_handle(message, fds, missing)
                if why is not None:
                    server.refuse(why)
            case m.Announced():
                adoptee.finished = True
                process = adoptee.announce.job
                if self._rival(process) is not None and not self._is_rival(process, server.pid):
                    adoptee.parked = True
                    logger.info("waiting for the target of a move", process=process[:12], server_pid=server.pid)
                else:
                    self._take(adoptee)
            case _ if adoptee.parked and not fds:
                adoptee.reported.append(message)
            case m.MemoryDrop():
                if (handle := adoptee.process.handles.pop(message.id, None)) is not None:
                    handle.fd.close()
            case m.Communicator() | m.GroupHeld() | m.GroupWanted() | m.GroupStuck() | m.CommunicatorFailed():
                adoptee.reported.append(message)
            case m.Log():
                logger.info("server says", server_pid=server.pid, text=message.text)
            case _:
                close_all(fds)
                server.refuse(f"{message.type} in the middle of an announcement")

    def _misbehaved(self, server: Server, why: str) -> None:
        logger.warning("server misbehaved", server_pid=server.pid, why=why)
        server.kill()

    def _printed(self, server: Server, line: str, dropped: int) -> None:
        adoptee = self._find(server)
        if adoptee.process is not None:
            adoptee.process.hooks.printed(server, line, dropped)

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
