"""A program under supervision, as all parts of it find it: its machine gets events, in turn; its program is watched.
What the machine says is done on top of all (process.py); what a part calls lies below it:

  state, supervised, seated, requested, ranked, reports, process
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from xmigd import log
from xmigd.devices.busy import Busy
from xmigd.devices.header import Stall, stall
from xmigd.ipc import exits
from xmigd.ipc import messages as m
from xmigd.ipc.channel import Peer
from xmigd.ipc.fds import Fd, close_all, free
from xmigd.logs.log import JobLog
from xmigd.memory.fd_store import FdStore
from xmigd.memory.handles import MAX_HANDLES, JobMemory, make_handle
from xmigd.memory.host_pool import HostPool
from xmigd.memory.quota import Quotas
from xmigd.mps.service import Mps, Seat
from xmigd.native import Layout
from xmigd.process import events as e
from xmigd.process.limits import Limits
from xmigd.process.machine import Machine
from xmigd.records import JobRow, LogLevel, LogSource, ProcessRow, Records
from xmigd.servers.server import Server, ServerHooks, ServerProgram
from xmigd.supervisor.copying import Copying
from xmigd.supervisor.far_chunks import FarChunks, Fetch
from xmigd.supervisor.moving import Moving
from xmigd.supervisor.preload import Preload
from xmigd.supervisor.state import ProcessState, now


class Supervised(ProcessState, ABC):
    """Events in turn, timers, the program, memory that is held."""

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
        admit: Callable[[Self], None],
        refuse: Callable[[Self, int, str], None],
        finished: Callable[[Self], None],
        being_lost: Callable[[Self], None],  # `held`: a server stands at `held_snapshot`, until `Salvaged`
        fd_store: FdStore,
        suspend_dir: Path,
        host_pool: HostPool,
        quotas: Quotas,
        snapshot_committed: Callable[[Self, m.Snapshot], None],
        rank_reported: Callable[[Self, Server, m.RankMessage], None],
        group_concerns: Callable[[Self, e.Instruction], None],
        fetch_chunks: Fetch,
        mps: Mps,
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
        # Each gets this process: the whole one, which no part knows.
        self._admit: Callable[[Any], None] = admit
        self._refuse: Callable[[Any, int, str], None] = refuse
        self._finished: Callable[[Any], None] = finished
        self._being_lost: Callable[[Any], None] = being_lost
        self._mps = mps
        self.seats: dict[int, Seat] = {}  # of its servers that are clients of MPS
        self.without_mps = ""  # why its last server is no client
        self._apart = ""  # why none of its servers is to be one
        self.held = False
        self.held_snapshot = 0  # 0: it holds less than a restoration needs
        self._snapshot_committed: Callable[[Any, m.Snapshot], None] = snapshot_committed
        self._rank_reported: Callable[[Any, Server, m.RankMessage], None] = rank_reported
        self._group_concerns: Callable[[Any, e.Instruction], None] = group_concerns
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

    @abstractmethod
    def _do(self, instruction: e.Instruction) -> None:
        """What the machine says."""

    @property
    @abstractmethod
    def hooks(self) -> ServerHooks:
        """What its servers call."""

    @abstractmethod
    def start_server(self, number: int, device: str, program: ServerProgram, user: Peer) -> None:
        """It gets this number."""

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

    def send_active(self, message: bytes) -> None:
        """To the server that has it, if one has."""
        if (server := self.server(self.machine.active)) is not None:
            server.send(message)

    def stall(self) -> Stall | None:
        """What its program would wait if its server died now, as its server tells. None: it has reported nothing
        yet."""
        if self.memory is None:
            return None
        try:
            return stall(self.memory.journal.fileno(), self._layout.stall_at)
        except (OSError, ValueError):
            return None

    def _expected(self, at: int) -> int | None:
        """What was expected at that moment, ns."""
        found = self.stall()
        return None if found is None else found.expected(at)

    def collect_lines(self) -> None:
        """What its program has reported goes into the job's log."""
        if self.memory is not None:
            self.job_log.collect(self.job, self.row.id, self.memory.journal.fileno())

    def _note(self, text: str, *, source: LogSource = "xmigd", level: LogLevel = "info") -> None:
        self.job_log.line(self.job, text, source=source, level=level, process=self.row.id)

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
        free(handle.fd for handle in self.handles.values())
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
            free([handle.fd])
            self.moving.source_dropped(handle)
            self._preload.dropped(handle)

    def _drop_lost_memory(self) -> None:
        lost = [
            handle.id for handle in self.handles.values()
            if handle.ordinal in self._lost_ordinals and handle.kind in ("device", "shadow") and not handle.on_host
        ]  # fmt: skip
        self.fd_store.lost(self.row.id, lost)
        for number in lost:
            self.drop_handle(number)
