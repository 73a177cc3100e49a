"""A program under supervision: carries events to its machine and does what the machine says."""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from xmigd import log
from xmigd.devices import header
from xmigd.devices.busy import Busy
from xmigd.devices.header import Stall, stall
from xmigd.devices.names import as_one, devices_of
from xmigd.errors import Conflict, Forbidden, NotFound, Unavailable
from xmigd.groups.meetings import Answer
from xmigd.ipc import exits
from xmigd.ipc import messages as m
from xmigd.ipc import pidfd as pidfds
from xmigd.ipc.channel import Peer
from xmigd.ipc.fds import Fd, close_all, read_only
from xmigd.logs.log import JobLog
from xmigd.memory.fd_store import FdStore
from xmigd.memory.handles import MAX_HANDLES, Handle, JobMemory, make_handle
from xmigd.memory.host_pool import HostPool
from xmigd.memory.quota import Quotas, Slots
from xmigd.memory.restored import restored_memory
from xmigd.native import Layout
from xmigd.process import events as e
from xmigd.process import migration_events as v
from xmigd.process.limits import Limits
from xmigd.process.machine import Machine
from xmigd.records import JobRow, LogLevel, LogSource, ProcessRow, Records
from xmigd.servers.output import RATE
from xmigd.servers.server import Ending, Server, ServerHooks, ServerProgram
from xmigd.supervisor.copying import Copying
from xmigd.supervisor.far_chunks import FarChunks, FarRank, Fetch, Found
from xmigd.supervisor.member import Member
from xmigd.supervisor.moving import Moving
from xmigd.supervisor.preload import Preload
from xmigd.supervisor.state import ProcessState

PAUSE_PATIENCE = 60.0  # seconds until a server is drained between two records


class Process(ProcessState):
    """One program and its servers."""

    node = ""  # this one (member.py)

    def __init__(
        self,
        *,
        row: ProcessRow,
        job: JobRow,
        pidfd: Fd,
        memory: JobMemory,
        program: ServerProgram,
        limits: Limits,
        stall_bound: float,
        snapshot_cost: float,
        layout: Layout,
        records: Records,
        job_log: JobLog,
        admit: Callable[[Process], None],
        refuse: Callable[[Process, int, str], None],
        finished: Callable[[Process], None],
        being_lost: Callable[[Process], None],  # `held`: a server stands at `held_snapshot`, until `Salvaged`
        fd_store: FdStore,
        suspend_dir: Path,
        host_pool: HostPool,
        quotas: Quotas,
        snapshot_committed: Callable[[Process, m.Snapshot], None],
        rank_reported: Callable[[Process, Server, m.RankMessage], None],
        group_concerns: Callable[[Process, e.Instruction], None],
        fetch_chunks: Fetch,
        faults: int = 0,
        recoveries: int = 0,
        unprotected: str = "",
    ) -> None:
        super().__init__(
            row=row, job=job, machine=Machine(limits, faults=faults, recoveries=recoveries), pidfd=pidfd,
            memory=memory, program=program, stall_bound=stall_bound, snapshot_cost=snapshot_cost, records=records,
            fd_store=fd_store, host_pool=host_pool, quotas=quotas,
        )  # fmt: skip
        self.snapshot_ms = 0.0  # that its snapshots have kept it waiting, all together
        self._busy_time = Busy()
        self.unprotected = unprotected  # why: it has the genuine driver, too; empty: it has not, as far as was seen
        self._requested: tuple[str, asyncio.Future[int]] | None = None  # an answer that the server owes
        self.differing: m.Differing | None = None  # what its next servers replace, as long as that is the last snapshot
        self._stopping = False  # its program was signalled to end
        self._lost_ordinals: set[int] = set()  # of its devices, until the server that had them has ended
        self._layout = layout
        self.job_log = job_log
        self._admit = admit
        self._refuse = refuse
        self._finished = finished
        self._being_lost = being_lost
        self.held = False
        self.held_snapshot = 0  # 0: it holds less than a restoration needs
        self._snapshot_committed = snapshot_committed
        self._rank_reported = rank_reported
        self._group_concerns = group_concerns
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._events: deque[e.Event] = deque()
        self._busy = False
        self._loop = asyncio.get_running_loop()
        self._log = log.get("process").bind(job=job.name, process=row.id[:12], pid=row.pid)
        self.moving = Moving(self, suspend_dir / row.id, tell=self.tell, start_server=self.start_server)
        self.copying = Copying(self)
        self.far_chunks = FarChunks(self, fetch_chunks)
        self._preload = Preload(self)
        self._watch_client()
        self.hooks = ServerHooks(
            started=self._server_started,
            failed=lambda server, why: self.tell(e.SpawnFailed(t=now(), server=server.number, reason=why)),
            message=self._server_reported,
            misbehaved=self._server_misbehaved,
            exited=self._server_exited,
            ending=self._server_ending,
            printed=self._server_printed,
        )

    # --- what others may ask ----------------------------------------------------------------------------------------

    @property
    def server_pid(self) -> int | None:
        """Of a suspended process: its holder's, once it has everything."""
        holder = self.machine.holder
        kept = self.state == "suspended" and holder is not None and self.machine.servers[holder] == "keeping"
        server = self.server(holder if kept else self.machine.active)
        return server.pid if server is not None and server.pid else None

    def stall(self) -> Stall | None:
        """What its program would wait if its server died now, as its server tells. None: it has reported nothing
        yet."""
        if self.memory is None:
            return None
        try:
            return stall(self.memory.journal.fileno(), self._layout.stall_at)
        except (OSError, ValueError):
            return None

    def busy_ns(self) -> int | None:
        """How long there was work for its server or its device, since this daemon knows it. None: its server has
        reported nothing."""
        return self._busy_time.total(self.stall(), now())

    def _expected(self, at: int) -> int | None:
        """What was expected at that moment, ns."""
        found = self.stall()
        return None if found is None else found.expected(at)

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

    def adopted(self, server: Server, announce: m.Announce, *, detour: bool = False) -> None:
        """Its server is `server`, which has outlived an earlier daemon; everything that it holds has been taken."""
        self.generation = generation = announce.generation
        self.keep_all(announce.changes)
        if announce.takes_backlog and not (announce.has_backlog and self.fd_store.follow_kept(self.row.id)):
            self.follow_backlog(server)
        self.servers[server.number] = server
        server.quota_slots = announce.quota_slots
        self.has_slots(announce.quota_slots)
        self.tell(e.Adopted(t=now(), opened=announce.opened, detour=detour))
        self.records.server_assigned(self.row.id, server.pid, server.start_time, generation)

    def restored(self, handles: dict[int, Handle], generation: int) -> None:
        """It comes from a checkpoint, with these."""
        self.handles, self.generation = handles, generation
        self.tell(e.Restored(t=now()))

    def orphaned(self, handles: dict[int, Handle], slots: Slots, why: str) -> None:
        """Its server is dead, and `handles` are all that it held: another one recovers it."""
        self.handles = handles
        self.has_slots(slots)
        self.tell(e.Orphaned(t=now(), reason=why, opened=bool(handles)))

    def tell(self, event: e.Event) -> None:
        """Give the machine an event and do what it says. Events that come of doing so wait their turn."""
        self._events.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._events:
                for instruction in self.machine.handle(self._events.popleft()):
                    self._do(instruction)
        finally:
            self._busy = False

    def add_handle(self, message: m.MemoryAdd, fds: list[Fd], missing: bool) -> str | None:
        """Hold a piece of memory. Returns why not, when the server was wrong to send it."""
        if missing or not fds:
            close_all(fds)
            why = "the daemon had no descriptor left to hold the process's memory (EMFILE): raise LimitNOFILE"
            self._log.error("memory cannot be held: the process cannot be recovered", why=why)
            self.tell(e.HandleMissed(t=now(), reason=why))
            return None
        if message.id in self.handles or len(self.handles) >= MAX_HANDLES:
            close_all(fds)
            return "memory that is held already" if message.id in self.handles else "more memory handles than allowed"
        handle = make_handle(message, fds[0])
        self.handles[message.id] = handle
        self.moving.source_added(handle)
        self._preload.added(handle)
        return None

    def drop_handle(self, number: int) -> None:
        """Its server needs it no longer."""
        if (handle := self.handles.pop(number, None)) is not None:
            handle.fd.close()
            self.moving.source_dropped(handle)
            self._preload.dropped(handle)

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

    def send_active(self, message: bytes) -> None:
        """To the server that has it, if one has."""
        if (server := self.server(self.machine.active)) is not None:
            server.send(message)

    def met(self, answer: Answer) -> None:
        """To a server whose rank of a communicator looks for the others."""
        server = self.server(answer.server)
        if server is None:
            return
        fields: dict[str, Any] = {"meeting": answer.meeting, "rank": answer.rank}
        if answer.offers:
            fields |= {"offers": list(answer.offers), "answer": answer.answer}
        elif answer.over:
            fields["over"] = True
        elif answer.refused:
            fields["refused"] = answer.refused
        else:
            fields["missing"] = answer.missing
        server.send(m.pack("met", **fields))

    @property
    def standby_communicators(self) -> int:
        """That its standby has made with those of the other ranks."""
        server = self.server(self.warm_standby)
        return 0 if server is None else server.communicators

    @property
    def warm_standby(self) -> int | None:
        number = self.machine.standby
        return number if number is not None and self.machine.servers[number] == "warm" else None

    # --- as a member of a group (member.py) --------------------------------------------------------------------------

    @property
    def active(self) -> int | None:
        return self.machine.active

    @property
    def grouped(self) -> bool:
        return self.machine.grouped

    @property
    def standing(self) -> bool:
        machine = self.machine
        if machine.active is None or machine.servers[machine.active] != "assigned":
            return False
        return machine.recovery is None or machine.recovery.restored is not None

    def rounds(self) -> tuple[int, int]:
        if self.memory is None:
            return 0, 0
        try:
            return header.rounds(self.memory.journal.fileno(), self._layout.group_at)
        except OSError:
            return 0, 0

    def forsaken(self) -> bool:
        return self.memory is not None and header.forsaken(self.memory.journal.fileno(), self._layout.group_at)

    def renewed(self) -> int:
        return 0 if self.memory is None else header.renewed(self.memory.journal.fileno(), self._layout.group_at)

    def suspended_at(self) -> int:
        return 0 if self.memory is None else header.suspended(self.memory.journal.fileno(), self._layout.group_at)

    def count_standby_bytes(self, counted: Sequence[int]) -> None:
        if self.memory is not None:
            header.count_standby_bytes(self.memory.journal.fileno(), self._layout.standby_bytes_at, counted)

    def server_devices(self) -> dict[int, str]:
        return {number: server.device for number, server in self.servers.items()}

    def note_made(self, number: int, communicators: int, device_bytes: int) -> None:
        if (server := self.server(number)) is not None:
            server.communicators, server.communicator_bytes = communicators, device_bytes

    def prepare_communicator(self, number: int, attempt: int, name: str) -> None:
        """One of its servers makes it, beside all others."""
        server, memory = self.server(number), self.memory
        if server is not None and memory is not None:
            message = m.pack("prepare_communicator", attempt=attempt, name=name)
            server.send(message, (memory.snapshot0, memory.snapshot1))

    def forget_communicator(self, number: int, attempt: int) -> None:
        if (server := self.server(number)) is not None:
            server.send(m.pack("forget_communicator", attempt=attempt))

    def device_lost(self, device: str, instead: str, why: str) -> None:
        """With its memory. What of this process lay there is gone, and its next servers get the other device."""
        names = devices_of(self.row.device)
        for server in list(self.servers.values()):
            if device in devices_of(server.device) and self.moving.is_target(server.number):
                server.kill()
        if device not in names or self.state == "suspended":
            return
        self._lost_ordinals |= {ordinal for ordinal, name in enumerate(names) if name == device}
        self._drop_lost_memory()
        self.moved_to(as_one([instead if name == device else name for name in names]))
        self.records.process_device(self.row.id, self.row.device)
        self._note(why, level="warning")
        self.tell(e.DeviceLost(t=now(), reason=why))
        if self.server(self.machine.active) is None:
            self._lost_ordinals.clear()  # nobody reports any more of it

    def _drop_lost_memory(self) -> None:
        lost = [
            handle.id for handle in self.handles.values()
            if handle.ordinal in self._lost_ordinals and handle.kind in ("device", "shadow") and not handle.on_host
        ]  # fmt: skip
        self.fd_store.lost(self.row.id, lost)
        for number in lost:
            self.drop_handle(number)

    def look(self) -> None:
        """How it stands is known at once."""

    def name_replicas(self, number: int, others: Iterable[Member]) -> None:
        near, far = [], []
        for other in others:
            if isinstance(other, Process):
                near.append(other)
            else:
                far.append(FarRank(other.node, other.row.id))
        self.name_ranks(number, near, far)

    def name_ranks(self, number: int, near: Iterable[Process], far: Sequence[FarRank]) -> None:
        """To a server of this process that has lost memory: the ranks that are at the same round, of this node and of
        others."""
        server = self.server(number)
        if server is None:
            return
        for other in near:
            if self._name_rank(server, other):
                for handle in other.handles.values():
                    if handle.kind == "shadow":
                        server.send(m.pack_replica(handle.message), (handle.fd,))
        if self.neighbour_copy is not None:  # first: it may have all that is missing
            far = [FarRank(self.neighbour_copy.node, self.row.id, retained=True), *far]
        self.far_chunks.named(number, far)
        server.send(m.pack("replicas_named", far=len(far)))

    async def read_chunks(self, chunks: Sequence[m.ChunkHash]) -> Found:
        """What of these its last snapshot has, for a rank of another node. Raises Unavailable: not now; Conflict."""
        return await self.far_chunks.read(chunks, self._standing_server)

    def _standing_server(self) -> Server:
        """Raises Unavailable, Conflict."""
        if self.state in ("losing", "lost", "ended"):
            raise Conflict("the rank is lost, or has ended")
        server = self.server(self.machine.active)
        if server is None or not self.standing or self.rounds()[0] != 0:
            raise Unavailable("the rank has not restored its memory yet")
        return server

    def copy_unique(self, others: Iterable[Process], most: int, elsewhere: Fd | None) -> None:
        """To host memory, at most so many bytes: what these ranks, on other devices, do not have, nor ranks of other
        nodes, of whose content these are the hashes."""
        server = self.server(self.machine.active)
        if server is None:
            return
        for other in others:
            self._name_rank(server, other)
        server.send(m.pack("copy_unique", bytes=most), () if elsewhere is None else (elsewhere,))

    def _name_rank(self, server: Server, other: Process) -> bool:
        if other.memory is None:
            return False
        try:
            files = [read_only(fd) for fd in (other.memory.snapshot0, other.memory.snapshot1)]
        except OSError as error:
            self._log.warning("a rank's memory is not looked at", other=other.row.id[:12], why=error.strerror)
            return False
        server.send(m.pack("replica_rank"), files)
        return True

    def collect_lines(self) -> None:
        """What its program has reported goes into the job's log."""
        if self.memory is not None:
            self.job_log.collect(self.job, self.row.id, self.memory.journal.fileno())

    def _note(self, text: str, *, source: LogSource = "xmigd", level: LogLevel = "info") -> None:
        self.job_log.line(self.job, text, source=source, level=level, process=self.row.id)

    async def spawned(self) -> None:
        """Every server that is being started has been, or has failed."""
        await asyncio.gather(*self._tasks)

    def leave(self) -> None:
        """The daemon is leaving; the program and its server stay."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self.far_chunks.close()
        for server in self.servers.values():
            server.forget()
        self.servers.clear()
        self._close_client()
        self._close_handles()
        self.moving.leave()
        self._close_log()
        memory, self.memory = self.memory, None
        if memory is not None:
            memory.close()

    # --- what servers say -------------------------------------------------------------------------------------------

    def _server_started(self, server: Server) -> None:
        self._log.debug("server started", server=server.number, server_pid=server.pid)

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
        self.tell(
            e.Exited(
                t=now(), server=server.number, status=ending.text, clean=ending.clean, killed=ending.killed,
                since=since, expected=self._expected(since or now()) if server.number == self.machine.active else None,
            )
        )  # fmt: skip

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
                self.tell(
                    e.Faulted(
                        t=t, server=number, sequence=message.sequence, op=message.op, error=message.error,
                        text=message.text, at=message.t, after=message.after, until=message.until,
                        expected=self._expected(message.t) if has_process else None,
                    )
                )  # fmt: skip
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
                self.moving.reported(server, message)

    # --- what the machine says --------------------------------------------------------------------------------------

    def _do(self, instruction: e.Instruction) -> None:
        match instruction:
            case e.Assign():
                self._assign(instruction)
            case e.Prepare():
                self._prepare(instruction)
            case e.Enter():
                self._enter(instruction)
            case e.Kill():
                self._log.info("killing a server", server=instruction.server, why=instruction.why)
                if (server := self.servers.get(instruction.server)) is not None:
                    server.kill()
            case e.Spawn():
                self._spawn(instruction)
            case e.Arm():
                if (server := self.servers.get(instruction.server)) is not None:
                    server.send(m.pack("inject", **m.pack_injection(instruction.injection)))
            case e.Admit():
                self._admit(self)
            case e.Refuse():
                self._log.warning("program refused", error=instruction.error, why=instruction.message)
                self._note(f"xmigd refused this process: {instruction.message}", level="error")
                self._refuse(self, instruction.error, instruction.message)
            case e.SignalClient():
                self._log.info("signalling the program", signal=instruction.signal, why=instruction.why)
                if self._pidfd is not None:
                    pidfds.send_signal(self._pidfd, instruction.signal)
            case e.SetTimer():
                self._clear_timer(instruction.name)
                self._timers[instruction.name] = self._loop.call_later(
                    instruction.seconds, self._timer_fired, instruction.name
                )
            case e.ClearTimer():
                self._clear_timer(instruction.name)
            case e.SaveState():
                self._log.info(f"process {instruction.state}", why=instruction.why)
                self.records.process_state(self.row.id, instruction.state, instruction.why)
                if instruction.state == "losing":  # its program may have ended before it is lost
                    self._note(f"the process is lost: {instruction.why}", level="error")
                if instruction.state == "lost" and not self.held:
                    self._being_lost(self)
                self._group_concerns(self, instruction)
            case e.GroupBroken() | e.AwaitGroup() | v.Waits():
                self._group_concerns(self, instruction)
            case v.AskHandover() if self.machine.grouped:
                self._group_concerns(self, instruction)
            case v.GiveTarget() | v.SaveMigration() | v.PrepareSuspend():
                self.moving.do(instruction)
                self._group_concerns(self, instruction)
            case e.SaveFault():
                self.records.fault(self.row.id, instruction.record)
            case e.SaveRecovery():
                self.records.recovery(self.row.id, instruction.record)
                self._log_recovery(instruction.record)
                self._group_concerns(self, instruction)
            case e.Release():
                self.fd_store.forget(self.row.id)
                self._release()
            case e.Finish():
                self._close_client()
                self._finished(self)
            case _:
                self.moving.do(instruction)

    def _spawn(self, instruction: e.Spawn) -> None:
        user = Peer(self.row.pid, self.row.uid, self.row.gid)
        program = replace(self.program, open_late=instruction.late)
        self.start_server(instruction.server, instruction.device or self.row.device, program, user)

    def start_server(self, number: int, device: str, program: ServerProgram, user: Peer) -> None:
        server = self.servers[number] = Server(number, device, self.hooks)
        about = f"{self.job.name}, process {self.row.id[:12]}"
        task = self._loop.create_task(server.spawn(program, user, about))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _assign(self, instruction: e.Assign) -> None:
        server = self.servers.get(instruction.server)
        if server is None or self.memory is None:
            return
        if instruction.mode == "fresh":
            self._close_handles()  # of a server that was lost before the program was let in
            self.keep_all(self.fd_store.next_change(self.memory))
        if instruction.mode == "lost":
            self.fd_store.forget(self.row.id)
        else:
            self._becomes_its(server, self.memory, recount=instruction.mode != "fresh")
        self._give(server, self.memory, instruction)
        self._note_server(server)

    def _prepare(self, instruction: e.Prepare) -> None:
        server = self.servers.get(instruction.server)
        if server is not None and self.memory is not None:
            one = instruction
            recovery = e.Assign(one.server, "recover", one.deliver, one.careful, one.injections)
            self._give(server, self.memory, recovery, ahead=True)

    def _enter(self, instruction: e.Enter) -> None:
        server = self.servers.get(instruction.server)
        if server is not None and self.memory is not None:
            self._becomes_its(server, self.memory)
            server.send(m.pack("enter"))
            self._note_server(server)

    def _becomes_its(self, server: Server, memory: JobMemory, *, recount: bool = True) -> None:
        if recount:
            self.fd_store.recount(self.row.id, self.fd_store.next_change(memory))
        self.generation += 1  # as the server counts, in the journal
        self.follow_backlog(server)

    def _give(self, server: Server, memory: JobMemory, instruction: e.Assign, *, ahead: bool = False) -> None:
        """All that it needs. `ahead`: it may prepare, and no more."""
        quota, fds = self.give_quota(server, self.quota_slots)
        packed = m.pack_assign(
            instruction, job=self.row.id, client_pid=self.row.pid, stall_bound=self.stall_bound,
            snapshot_cost=self.snapshot_cost, hang_timeout=self.machine.limits.hang_timeout,
            copies_on_host=self.copies is not None, ahead=ahead, differing=self.differing, quota=quota,
        )  # fmt: skip
        server.send(packed, fds)
        if instruction.mode == "recover":
            for handle in self.handles.values():
                server.send(handle.message, (handle.fd,))
            server.send(m.pack("go"))

    def _note_server(self, server: Server) -> None:
        # Written while the server works. It is no condition for going on: what a later daemon needs to find the
        # process again is what the server itself announces, the record only tells it which servers to wait for.
        self.records.server_assigned(self.row.id, server.pid, server.start_time, self.generation)

    def _log_recovery(self, record: e.RecoveryRecord) -> None:
        if record.outcome == "running":
            return
        total = (record.resumed - record.occurred) / 1e6 if record.resumed is not None else None
        self._log.info(
            f"recovery {record.outcome}", number=record.number, why=record.cause, attempts=record.attempts,
            ms=None if total is None else round(total, 1),
            expected_ms=None if record.expected is None else round(record.expected / 1e6, 1),
            records=record.records, differing=record.differing,
        )  # fmt: skip
        if record.outcome == "abandoned" and self.machine.unrecoverable is not None:
            # Its program has learnt it from the server, and ended before anything else was seen of that one.
            self._note(f"the process is lost: {self.machine.unrecoverable}", level="error")

    # --- small parts ------------------------------------------------------------------------------------------------

    def _timer_fired(self, name: str) -> None:
        self._timers.pop(name, None)
        self.tell(e.TimerFired(t=now(), name=name))

    def _clear_timer(self, name: str) -> None:
        if (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()

    def _watch_client(self) -> None:
        if self._pidfd is not None:
            self._loop.add_reader(self._pidfd.fileno(), self._client_gone)

    def _client_gone(self) -> None:
        if self.paused and not self._stopping and self._pidfd is not None:
            self._loop.remove_reader(self._pidfd.fileno())  # it may be restored somewhere else
            return
        if self._pidfd is not None:
            status = exits.exit_status(self._pidfd, self.row.pid, self.row.start_time)
            if status is not None:
                self.records.process_ended(self.row.id, exits.end_of(status))
        self._close_client()
        self.tell(e.ClientExited(t=now()))

    def _close_client(self) -> None:
        pidfd, self._pidfd = self._pidfd, None
        if pidfd is not None:
            self._loop.remove_reader(pidfd.fileno())
            pidfd.close()

    def _close_handles(self) -> None:
        close_all(handle.fd for handle in self.handles.values())
        self.handles.clear()

    def _close_log(self) -> None:
        self.collect_lines()
        self.job_log.over(self.row.id)

    def _release(self) -> None:
        self.has_slots(())
        self._close_handles()
        self.moving.release()
        self._close_log()
        memory, self.memory = self.memory, None
        if memory is not None:
            memory.close()


def now() -> int:
    return time.monotonic_ns()
