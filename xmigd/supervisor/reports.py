"""What a process's servers report, and how they end."""

from __future__ import annotations

from functools import cached_property

from xmigd.errors import Conflict
from xmigd.ipc import messages as m
from xmigd.ipc import pidfd as pidfds
from xmigd.ipc.fds import Fd, close_all
from xmigd.process import events as e
from xmigd.servers.output import RATE
from xmigd.servers.server import Ending, Server, ServerHooks
from xmigd.supervisor.ranked import Ranked
from xmigd.supervisor.state import now


class Reports(Ranked):
    """Callers are its servers."""

    @cached_property
    def hooks(self) -> ServerHooks:
        return ServerHooks(
            started=self._server_started,
            failed=self._server_failed,
            message=self._server_reported,
            misbehaved=self._server_misbehaved,
            exited=self._server_exited,
            ending=self._server_ending,
            printed=self._server_printed,
        )

    def _server_started(self, server: Server) -> None:
        self._log.debug("server started", server=server.number, server_pid=server.pid)

    def _server_failed(self, server: Server, why: str) -> None:
        self._leave_mps(server.number, None, lost=False)
        self.tell(e.SpawnFailed(t=now(), server=server.number, reason=why))

    def _server_misbehaved(self, server: Server, why: str) -> None:
        self._log.warning("server misbehaved", server=server.number, server_pid=server.pid, why=why)
        self.tell(e.Misbehaved(t=now(), server=server.number, reason=why))

    def _server_printed(self, server: Server, line: str, dropped: int) -> None:
        """Among it what its program's kernels print, which natively goes to the program's standard output."""
        if dropped:
            why = f"more than {RATE:.0f} lines a second"
            self._log.warning("lines of the server dropped", server=server.number, lines=dropped, why=why)
            self._note(f"{dropped} lines that the GPU server printed were left out: {why}", level="warning")
        else:
            self._log.info("server prints", server=server.number, server_pid=server.pid, text=line)
            self._note(f"printed: {line}", source="server")

    def _server_ending(self, server: Server) -> None:
        if self._pidfd is not None and not pidfds.has_exited(self._pidfd):
            self.tell(e.Ending(t=now(), server=server.number))

    def _server_exited(self, server: Server, ending: Ending, since: int) -> None:
        self.servers.pop(server.number, None)
        self.free_slots()
        self.far_chunks.server_lost(server.number)
        if server.number == self.machine.active:
            if self._lost_ordinals:  # it may have reported memory since
                self._drop_lost_memory()
                self._lost_ordinals.clear()
            self.paused = False
            self.copying.server_lost(ending.text)
            if self._requested is not None and not self._requested[1].done():
                lost = Conflict(f"the server was lost: {ending.text}", hint="ask again when the process is running")
                self._requested[1].set_exception(lost)
        if self._pidfd is not None and pidfds.has_exited(self._pidfd):
            self._client_gone()  # both at once: the program's exit is the reason, nothing is to be recovered
        had_process = server.number == self.machine.active and self.machine.servers.get(server.number) != "spawning"
        self.tell(
            e.Exited(
                t=now(), server=server.number, status=ending.text, clean=ending.clean, killed=ending.killed,
                since=since, expected=self._expected(since or now()) if server.number == self.machine.active else None,
            )
        )  # fmt: skip
        self._leave_mps(server.number, ending, lost=had_process and self.state == "recovering")

    def _server_reported(self, server: Server, message: m.ServerMessage, fds: list[Fd], missing: bool) -> None:
        t, number = now(), server.number
        has_process = number == self.machine.active
        match message:
            case m.Hello():
                if message.pid != server.pid:
                    server.refuse("it says hello with another process's pid")
                else:
                    server.device_bytes = message.device_bytes
                    self.tell(e.Hello(t=t, server=number, warm_ms=message.warm_ms))
                    self._open_in_standby()
                    self._preload.snapshot(None if self.last_snapshot is None else self.last_snapshot.objects)
            case m.Preloaded():
                self._preload.loaded(server, message)
            case m.Unavailable():
                self.tell(e.Unavailable(t=t, server=number, error=message.error, text=message.text))
            case m.MemoryAdd():
                if has_process:
                    why = self.add_handle(message, fds, missing)
                elif self.moving.is_target(number):
                    why = self.moving.target_added(server, message, fds, missing)
                else:
                    why = "memory from a server without a job"
                if why is not None:
                    close_all(fds)
                    server.refuse(why)
                elif has_process and (handle := self.handles.get(message.id)) is not None:
                    self.fd_store.add(self.row.id, handle)
            case m.MemoryDrop():
                if has_process:
                    self.fd_store.drop(self.row.id, message.id)
                    self.drop_handle(message.id)
                elif self.moving.is_target(number):
                    self.moving.target_dropped(server, message.id)
            case m.Ready():
                self.generation = message.generation
                self.tell(e.Ready(t=t, server=number, generation=message.generation, opened=message.opened))
            case m.Opened():
                server.device_bytes = message.device_bytes
                self.tell(e.Opened(t=t, server=number))
                self._open_in_standby()
            case m.Joining():
                self.tell(e.Joining(t=t, server=number, joining=message.joining))
            case m.Phase():
                self.tell(
                    e.PhaseReached(
                        t=t, server=number, name=message.name, at=message.t, records=message.records,
                        compared=message.compared, differing=message.differing,
                        first_difference=message.first_difference,
                    )
                )  # fmt: skip
            case m.Snapshot():
                if has_process:
                    self.last_snapshot, self.differing = message, None
                    self.snapshot_ms += message.ms
                    self._busy_time.snapshot(self.stall(), t)
                    self.records.snapshot(self.row.id, message)
                    self._snapshot_committed(self, message)
                    self.tell(
                        e.SnapshotCommitted(
                            t=t, server=number, number=message.number, sequence=message.sequence, ms=message.ms,
                            off_device=message.off_device,
                        )
                    )  # fmt: skip
                    self._preload.snapshot(message.objects)
            case m.CopiesMade():
                if has_process:
                    self.copies = message
            case m.Fault():
                seat = self.seats.get(number)
                self.tell(
                    e.Faulted(
                        t=t, server=number, sequence=message.sequence, op=message.op, error=message.error,
                        text=message.text, at=message.t, after=message.after, until=message.until,
                        expected=self._expected(message.t) if has_process else None,
                        shared=seat is not None and self._mps.has_others(seat),
                    )
                )  # fmt: skip
                if seat is not None:  # its fault ends all of them
                    self._mps.condemn(seat.control, f"a fault in {self.job.name} or beside it: {message.text}")
            case m.ProgramError():
                self.tell(e.ProgramError(t=t, server=number, sequence=message.sequence, error=message.error))
            case m.Injected():
                self._log.info("an armed fault is injected", server=number, injection=message.id)
                self.tell(e.InjectionFires(t=t, server=number, id=message.id))
            case m.Garbage():
                self.tell(e.GarbageFound(t=t, server=number, position=message.position, text=message.text))
            case (
                m.Meet() | m.Communicator() | m.CommunicatorFailed() | m.CommunicatorPrepared() | m.GroupWanted()
                | m.GroupStopped() | m.GroupHeld() | m.GroupBusy() | m.GroupStuck() | m.ReplicasWanted()
                | m.MemoryShort()
            ):  # fmt: skip
                there_is = not isinstance(message, m.Meet | m.Communicator) or message.rank < message.ranks
                ahead = isinstance(message, m.Meet | m.CommunicatorPrepared)
                if there_is and (has_process or ahead or self.moving.target_takes(number)):
                    self._rank_reported(self, server, message)
                else:
                    server.refuse("a rank from a server without a job, or one that there is not")
            case m.Bye():
                self.tell(e.SaidBye(t=t, server=number, reason=message.reason))
            case m.Log():
                level = "warning" if message.level == "warning" else message.level
                getattr(self._log, level)("server says", server=number, text=message.text)
                if message.level in ("warning", "error"):  # "info" comes with each call that fails
                    self._note(message.text, source="server", level=message.level)
            case m.Paused() | m.Continued():
                self._log.info(f"server {message.type}", position=message.position)
                if has_process and self.machine.state == "losing":
                    self.held = isinstance(message, m.Paused)
                    self.held_snapshot = message.snapshot if isinstance(message, m.Paused) else 0
                    self._being_lost(self)
                elif has_process:
                    self.paused = message.type == "paused"  # one that an earlier daemon has paused says so, too
                    self.paused_snapshot = message.snapshot if isinstance(message, m.Paused) else 0
                    if not self.paused:
                        self._watch_client()  # it may have exited meanwhile
                    self._answered(message.type, message.position)
            case m.SuspendProgress() if has_process and self.copying.under_way:
                self.copying.reported(message, fds)
            case m.ChunksWanted():
                self.far_chunks.wanted(server, message)
            case m.ChunksRead():
                self.far_chunks.was_read(server, message)
            case m.SnapshotSlab() | m.SnapshotCopied() | m.SnapshotNotCopied():
                if has_process:
                    self.copying.reported(message, fds)
                else:
                    close_all(fds)
            case m.Announce() | m.Announced():
                close_all(fds)
                server.refuse(f"{message.type} from a server that is connected already")
            case _:
                if isinstance(message, m.HandedOver | m.Suspended):
                    self._works(number, "none")
                self.moving.reported(server, message)
