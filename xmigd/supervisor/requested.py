"""What is requested of a process: that it pauses, goes on or ends; and how it begins under a new daemon."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace

from xmigd.errors import Conflict, Forbidden, NotFound, Unavailable
from xmigd.ipc import messages as m
from xmigd.ipc import pidfd as pidfds
from xmigd.ipc.fds import Fd, close_all
from xmigd.memory.handles import Handle
from xmigd.memory.quota import Slots
from xmigd.memory.restored import restored_memory
from xmigd.process import events as e
from xmigd.servers.server import Server
from xmigd.supervisor.ahead import Ahead
from xmigd.supervisor.seated import Seated
from xmigd.supervisor.state import now

PAUSE_PATIENCE = 60.0  # seconds until a server is drained between two records


class Requested(Seated):
    """Callers are services."""

    @property
    def server_pid(self) -> int | None:
        """Of a suspended process: its holder's, once it has everything."""
        holder = self.machine.holder
        kept = self.state == "suspended" and holder is not None and self.machine.servers[holder] == "keeping"
        server = self.server(holder if kept else self.machine.active)
        return server.pid if server is not None and server.pid else None

    def busy_ns(self) -> int | None:
        """How long there was work for its server or its device, since this daemon knows it. None: its server has
        reported nothing."""
        return self._busy_time.total(self.stall(), now())

    @property
    def standby_state(self) -> str | None:
        number = self.machine.standby
        return None if number is None else self.machine.servers[number]

    @property
    def standby_preloaded(self) -> bool:
        number = self.machine.standby
        server = None if number is None else self.servers.get(number)
        return server is not None and server.preloaded

    def holder_adopted(self, server: Server, generation: int, where: str) -> None:
        """It is suspended, and its holder has outlived an earlier daemon."""
        self.generation = generation
        self.servers[server.number] = server
        self.fd_store.forget(self.row.id)
        self.tell(e.HolderAdopted(t=now(), where=where))
        self.records.server_assigned(self.row.id, server.pid, server.start_time, generation)

    def adopted(
        self, server: Server, announce: m.Announce, *, detour: bool = False,
        interrupted: e.RecoveryRecord | None = None,
    ) -> None:  # fmt: skip
        """Its server is `server`, which has outlived an earlier daemon; everything that it holds has been taken."""
        self.generation = generation = announce.generation
        self._take_seat_again(server)
        self.keep_all(announce.changes)
        if announce.takes_backlog and not (announce.has_backlog and self.fd_store.follow_kept(self.row.id)):
            self.follow_backlog(server)
        self.servers[server.number] = server
        server.quota_slots = announce.quota_slots
        self.has_slots(announce.quota_slots)
        self.tell(
            e.Adopted(
                t=now(), opened=announce.opened, detour=detour, joining=announce.joining, interrupted=interrupted
            )
        )  # fmt: skip
        self.records.server_assigned(self.row.id, server.pid, server.start_time, generation)

    def restored(self, handles: dict[int, Handle], generation: int, ahead: Ahead | None) -> None:
        """It comes from a checkpoint, with these. `ahead`: the server that is to resume it; None: any."""
        self.handles, self.generation, self.ahead = handles, generation, ahead
        self.tell(e.Restored(t=now()))

    def orphaned(
        self, handles: dict[int, Handle], slots: Slots, why: str, interrupted: e.RecoveryRecord | None
    ) -> None:  # fmt: skip
        """Its server is dead, and `handles` are all that it held: another one recovers it."""
        self.handles = handles
        self.has_slots(slots)
        self.tell(e.Orphaned(t=now(), reason=why, opened=bool(handles), interrupted=interrupted))

    async def pause(self, *, at_snapshot: bool = False, with_group: Callable[[], None] | None = None) -> int:
        """Let its server stop between two records, drained, and take a snapshot there if that is wanted and possible:
        then `paused_snapshot` is its number. `with_group` requests that of its group instead. Returns the journal's
        position there. From then on the program's exit is not its end, until `unpause` or `stop`."""
        if self.machine.move is not None:
            raise Conflict("the process is being moved", code="already_moving")
        if self.state != "running" or self.paused:
            raise Conflict("the process is paused already" if self.paused else f"the process is {self.state}")
        self.paused, self.paused_snapshot = True, 0
        try:
            if with_group is not None:
                return await self._ask(lambda _: with_group(), "paused")
            return await self._ask(lambda server: server.send(m.pack("pause", snapshot=at_snapshot)), "paused")
        except Conflict:  # it was not requested, or was lost
            self.paused = False
            raise

    async def unpause(self, pid: int | None = None) -> int:
        """Go on; with the program in process `pid` if it was restored from a dump. Returns the journal's position."""
        if not self.paused:
            raise Conflict("the process is not paused")
        if pid is not None:
            self._move(pid)
        elif self._pidfd is None or pidfds.has_exited(self._pidfd):
            raise Conflict("the program has exited", hint="name the process in which it was restored (:rebind)")
        assert self.memory is not None
        if pid is None:
            position = await self._ask(lambda server: server.send(m.pack("continue")), "continued")
        else:
            message, shared = m.pack("rebind", client_pid=pid), self.memory.shared
            position = await self._ask(lambda server: server.send(message, shared), "continued")
        return position

    def let_go_on(self) -> None:
        """If it is paused, or is to be: not any more. Also of a pause by an earlier daemon that is not known yet."""
        self.send_active(m.pack("continue", if_paused=True))

    def not_paused(self) -> None:
        """It was to be with its group, and was not sent to it."""
        self.paused = False
        self._watch_client()  # it may have exited meanwhile

    def expect_end(self) -> None:
        """From now on the program's exit is its end, paused or not: nobody will restore it."""
        self._stopping = True

    async def _ask(self, request: Callable[[Server], None], answer: str) -> int:
        server = self.server(self.machine.active)
        if server is None or self._requested is not None:
            raise Conflict("its server is busy with something else")
        self._requested = (answer, self._loop.create_future())
        request(server)
        try:
            return await asyncio.wait_for(self._requested[1], PAUSE_PATIENCE)
        except TimeoutError:
            raise Unavailable(f"the server has not {answer}; it will when it can, or its log says why not") from None
        finally:
            self._requested = None

    def _answered(self, answer: str, position: int) -> None:
        if self._requested is not None and self._requested[0] == answer and not self._requested[1].done():
            self._requested[1].set_result(position)

    def _move(self, pid: int) -> None:
        assert self.memory is not None
        try:
            pidfd = Fd(os.pidfd_open(pid))
        except OSError:
            raise NotFound(f"there is no process {pid}") from None
        if pidfds.owner(pid) != self.row.uid:
            raise Forbidden(f"process {pid} is not this program: it belongs to another user")
        self._close_log()
        before, self.memory = self.memory, restored_memory(pid, self.memory)
        self.keep_all(self.fd_store.next_change(self.memory) - 1)  # its server waits
        close_all(before.shared)
        self._close_client()
        self._pidfd = pidfd
        self.fd_store.watch(self.row.id, pidfd)
        self.row = replace(self.row, pid=pid, start_time=pidfds.start_time(pid))
        self.records.process_moved(self.row.id, pid, self.row.start_time)
        self._log.info("program restored", pid=pid)

    def stop(self, why: str) -> None:
        """SIGTERM to the program, SIGKILL after the grace. One that is paused and dumped is given up instead. From now
        on the program's exit is its end, paused or not: nobody will restore it."""
        self._stopping = True
        if self.paused and (self._pidfd is None or pidfds.has_exited(self._pidfd)):
            self._close_client()
            self.tell(e.ClientExited(t=now(), reason=why))
        else:
            self.tell(e.StopRequested(t=now(), reason=why))
