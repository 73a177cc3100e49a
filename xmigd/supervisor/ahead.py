"""A server that works ahead of its process: for a program that comes from another node and still runs there, it takes
what has come of its content onto its device, round by round; for one that is restored from a checkpoint, all of it,
while CRIU is at work (docs/decisions/0100).

When the process is here it resumes with this server. Until then the server is nobody's: if it ends, the process is
resumed with another one, which copies everything, and nothing is lost.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from xmigd import log
from xmigd.devices.names import devices_of
from xmigd.ipc import messages as m
from xmigd.ipc.channel import Peer
from xmigd.ipc.fds import Fd, close_all
from xmigd.memory.handles import Handle
from xmigd.mps.service import SHARE, Mps, Seat
from xmigd.servers.server import Ending, Server, ServerHooks, ServerProgram

logger = log.get("ahead")


@dataclass(frozen=True, slots=True)
class Wanted:
    """`most_bytes`: of the program, on each of its devices."""

    job: str  # its name
    device: str
    user: Peer
    sm_share: int | None
    most_bytes: Sequence[int]
    several_nodes: bool = False  # its job has ranks on others, whose servers are to reach it


@dataclass(frozen=True, slots=True)
class _Content:
    memory: list[tuple[bytes, Fd]]
    snapshots: tuple[Fd, Fd]


class Ahead:
    """Of one process to come. Lives in the event loop's thread."""

    def __init__(
        self, wanted: Wanted, program: ServerProgram, mps: Mps, *, no_room: Callable[[str], None],
        over: Callable[[Ahead], None],
    ) -> None:  # fmt: skip
        """`no_room`: the device has none for the program. `over`: it is taken, or has ended."""
        self.wanted = wanted
        self.held = False  # has it made memory?
        self.without_mps = ""  # why it is no client
        self._mps = mps
        self._no_room = no_room
        self._over = over
        self._log = logger.bind(job=wanted.job, device=wanted.device)
        self._number = 0  # of rounds
        self._ready = False  # it takes content
        self._closed = False  # taken, or it has ended
        self._next: _Content | None = None  # until it is ready
        self._seat: Seat | None = None
        hooks = ServerHooks(
            started=lambda _: None, failed=self._failed, message=self._reported, misbehaved=self._failed,
            exited=self._exited, printed=self._printed,
        )  # fmt: skip
        self._server = Server(0, wanted.device, hooks)
        # It outlives the request that has it started.
        self._starting = asyncio.get_running_loop().create_task(self._start(program), context=contextvars.Context())

    @property
    def is_there(self) -> bool:
        """Or being started."""
        return not self._closed

    async def _start(self, program: ServerProgram) -> None:
        wanted, user = self.wanted, self.wanted.user
        seat = await self._mps.join(wanted.device, user.uid, user.gid, standby=False, lost=self._stranded)
        environment: dict[str, str] = {}
        if isinstance(seat, Seat):
            self._seat = seat
            environment |= seat.control.environment
            if wanted.sm_share is not None:
                environment[SHARE] = str(wanted.sm_share)
        else:
            self.without_mps = seat
        if self._closed:
            self._leave_mps(None)
            return
        await self._server.spawn(program, user, f"{wanted.job}, ahead of its process", environment)

    # --- what its owner does ------------------------------------------------------------------------------------------

    def give(self, handles: Mapping[int, Handle], snapshots: tuple[Fd, Fd]) -> None:
        """A round: what the program has by now. What an earlier one had, and this one has not, is forgotten."""
        if self._closed:
            return
        try:
            memory = [
                (handle.message, _again(handle.fd)) for handle in handles.values()
                if handle.kind == "image" or handle.on_host
            ]  # fmt: skip
            self._next = _Content(memory, (_again(snapshots[0]), _again(snapshots[1])))
        except OSError as error:
            self._log.warning("content does not come ahead", why=error.strerror)
            return
        if self._ready:
            self._send_next()

    def take(self, hooks: ServerHooks, number: int) -> tuple[Server, Seat | None, bool] | None:
        """The process is here, and its server gets this number. With it, whether it is ready; if not, the process
        hears it. None: there is none."""
        if self._closed or not self._server.pid:
            self.close()
            return None
        self._closed, self._next = True, None
        self._server.number = number
        self._server.hand_over(hooks)
        self._over(self)
        return self._server, self._seat, self._ready

    def close(self) -> None:
        """Nobody needs it any more, unless it was taken."""
        if not self._closed:
            self._end()

    # --- what its server does -----------------------------------------------------------------------------------------

    def _send_next(self) -> None:
        content, self._next = self._next, None
        if content is None:
            return
        self._number += 1
        if self._seat is not None:
            self._mps.works(self._seat, self._server.pid, "copies")
        most = list(self.wanted.most_bytes)
        self._server.send(m.pack("ahead", number=self._number, most_bytes=most), content.snapshots)
        for message, fd in content.memory:
            self._server.send(message, (fd,))
        self._server.send(m.pack("go"))

    def _reported(self, server: Server, message: m.ServerMessage, fds: list[Fd], missing: bool) -> None:
        close_all(fds)
        match message:
            case m.Hello() if message.pid == server.pid:
                server.device_bytes = message.device_bytes
                self._ready = True
                self._send_next()
            case m.Opened():
                server.device_bytes, self.held = message.device_bytes, True
            case m.Preloaded():
                server.preloaded_bytes = message.device_bytes
            case m.Round():
                self._log.info(
                    "content is ahead", round=message.number, copied_bytes=message.copied_bytes,
                    settled_bytes=message.settled_bytes, total_bytes=message.total_bytes, ms=round(message.ms, 1),
                )  # fmt: skip
            case m.MoveFailed():
                self._failed(server, message.text)
                if message.code == "no_room":
                    self._no_room(message.text)
            case m.Unavailable():
                self._failed(server, message.text)
            case m.Log():
                self._log.info("server says", text=message.text)
            case _:
                server.refuse(f"{message.type} from a server without a process")

    def _failed(self, server: Server, why: str) -> None:
        self._log.warning("content does not come ahead", why=why)
        if not server.pid:
            self._leave_mps(None)
        self._end()

    def _stranded(self, why: str) -> None:
        self._failed(self._server, why)

    def _end(self) -> None:
        if self._closed:
            return
        self._closed, self._next = True, None
        self._over(self)
        if self._seat is not None and self._seat.work == "copies":  # a client of MPS may end by itself
            self._server.end("its process does not come")
        else:
            self._server.kill()

    def _exited(self, _: Server, ending: Ending, __: int) -> None:
        if not self._closed:
            self._log.warning("content does not come ahead", why=f"its server was lost: {ending.text}")
        self._leave_mps(ending)
        self._end()

    def _leave_mps(self, ending: Ending | None) -> None:
        seat, self._seat = self._seat, None
        if seat is None:
            return
        self._mps.left(seat)
        if seat.works and ending is not None and not ending.clean:
            why = f"a server ahead of {self.wanted.job} was lost, and perhaps its kernels ran"
            self._mps.condemn(seat.control, why)

    def _printed(self, _: Server, line: str, dropped: int) -> None:
        if not dropped:
            self._log.info("server prints", text=line)


def held_by(aheads: Iterable[Ahead]) -> dict[str, int]:
    """Bytes of device memory that their servers have, by device."""
    held: dict[str, int] = {}
    for ahead in aheads:
        if ahead.held:
            for name, bytes in zip(devices_of(ahead.wanted.device), ahead.wanted.most_bytes, strict=False):
                held[name] = held.get(name, 0) + bytes
    return held


def _again(fd: Fd) -> Fd:
    return Fd(os.dup(fd.fileno()))
