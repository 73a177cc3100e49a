"""A process whose servers are started, on devices that run jobs at the same time as clients of MPS."""

from __future__ import annotations

import contextvars
from functools import partial

from xmigd.devices import header
from xmigd.ipc import messages as m
from xmigd.ipc.channel import Peer
from xmigd.mps.service import SHARE, Seat, Work
from xmigd.process import events as e
from xmigd.servers.server import Ending, Server, ServerProgram
from xmigd.supervisor.ahead import Ahead
from xmigd.supervisor.state import now
from xmigd.supervisor.supervised import Supervised


class Seated(Supervised):
    """Callers are what starts servers, and what hears of their ends."""

    ahead: Ahead | None = None  # what it resumes with first; None: there is none, or it was taken

    @property
    def is_mps_client(self) -> bool:
        return self.machine.active in self.seats

    def start_server(self, number: int, device: str, program: ServerProgram, user: Peer) -> None:
        server = self.servers[number] = Server(number, device, self.hooks)
        standby = number == self.machine.standby
        # It outlives the operation that may have wanted it, and its later lines in the log are not about that.
        task = self._loop.create_task(
            self._begin_server(server, program, user, standby=standby), context=contextvars.Context()
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def take_ahead(self, number: int, device: str) -> bool:
        """The server that has worked ahead of it becomes this one. False: there is none, on this device."""
        ahead, self.ahead = self.ahead, None
        if ahead is None or ahead.wanted.device != device:
            return False
        taken = ahead.take(self.hooks, number)
        if taken is None:
            return False
        server, seat, ready = taken
        self.servers[number] = server
        if seat is not None:
            self.seats[number] = seat
            seat.lost = partial(self._stranded, server)
        self.without_mps = "" if seat is not None else ahead.without_mps
        if ready:
            self.tell(e.Hello(t=now(), server=number, warm_ms=0.0))
        return True

    async def _begin_server(self, server: Server, program: ServerProgram, user: Peer, *, standby: bool) -> None:
        seat: Seat | str = self._apart
        if not self._apart:
            lost = partial(self._stranded, server)
            seat = await self._mps.join(server.device, user.uid, user.gid, standby=standby, lost=lost)
        environment = {}
        if isinstance(seat, Seat):
            self.seats[server.number] = seat
            environment = seat.control.environment
            if self.job.sm_share is not None:
                environment |= {SHARE: str(self.job.sm_share)}
        if not standby:
            self.without_mps = "" if isinstance(seat, Seat) else seat
        await server.spawn(program, user, f"{self.job.name}, process {self.row.id[:12]}", environment)

    def _take_seat_again(self, server: Server) -> None:
        """It has outlived an earlier daemon."""
        seat = self._mps.adopt(server.device, self.row.uid, server.pid, partial(self._stranded, server))
        if seat is not None:
            self.seats[server.number] = seat

    def _stranded(self, server: Server, why: str) -> None:
        self.tell(e.Stranded(t=now(), server=server.number, reason=why))

    def _leave_mps(self, server: int, ending: Ending | None, *, lost: bool) -> None:
        """Its server has ended, or could not be started. `lost`: it had the process, which lives on."""
        seat = self.seats.pop(server, None)
        if seat is None:
            return
        self._mps.left(seat)
        if seat.works and (lost or (ending is not None and not ending.clean)):
            # NVIDIA promises nothing of the others when a client ends whose work was not done.
            self._mps.condemn(seat.control, f"a server of {self.job.name} was lost, and perhaps its kernels ran")

    def _works(self, number: int, work: Work) -> None:
        """It is about to be given the process, or a part of its work; or it stands still, and its device is done."""
        seat, server = self.seats.get(number), self.servers.get(number)
        if seat is not None and server is not None:
            self._mps.works(seat, server.pid, work)

    def _kill(self, number: int, why: str) -> None:
        """A client of MPS that executes nobody's program has a moment to end by itself: what it copies and hashes are
        kernels, too, and its neighbours would pay for them."""
        if (server := self.servers.get(number)) is None:
            return
        seat = self.seats.get(number)
        if seat is not None and seat.work == "copies":
            server.end(why)
        else:
            server.kill()

    def _devices_open(self) -> int:
        """Those that its program uses, a bit each; some server executes for it in any case, on the first."""
        if self.memory is None:
            return 1
        return header.devices_open(self.memory.journal.fileno(), self._layout.devices_open_at) or 1

    def _open_in_standby(self) -> None:
        """What its program has begun to use since it was started."""
        number = self.machine.standby
        if number is None or self.machine.servers[number] != "warm":
            return
        server, devices = self.servers[number], self._devices_open()
        if devices & ~server.devices:
            server.devices |= devices
            server.send(m.pack("open", devices=devices))
