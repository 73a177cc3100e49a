"""The hands of a move: what the source and the target say, and what they, the holder and the database are sent.

The target's memory is kept apart from the source's until the target has resumed the program.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from xmigd import log
from xmigd.devices import header
from xmigd.devices.names import devices_of
from xmigd.errors import Conflict, ProcessLocation, Unavailable
from xmigd.ipc import messages as m
from xmigd.ipc.channel import Peer
from xmigd.ipc.fds import Fd, close_all, free
from xmigd.memory.backlog import Backlog
from xmigd.memory.handles import MAX_HANDLES, Handle, make_handle
from xmigd.process import events as e
from xmigd.process import migration_events as v
from xmigd.servers.server import HolderProgram, Server, ServerProgram
from xmigd.supervisor.state import ProcessState

logger = log.get("moving")

ID_STEP = 1 << 24  # a target's memory is numbered so far behind everything that the source may still number

Changed = Callable[[v.MigrationRecord], None]


class Moving:
    """Of one process."""

    def __init__(
        self,
        process: ProcessState,
        folder: Path,
        *,
        tell: Callable[[e.Event], None],
        start_server: Callable[[int, str, ServerProgram, Peer], None],
    ) -> None:
        self._process = process
        self._tell = tell  # the process's machine
        self._start_server = start_server
        self._folder = folder  # of files, when it is suspended to files
        self._incoming: dict[int, Handle] = {}
        self._first_id = 0
        self.communicators: tuple[int, ...] = ()  # of a rank: attempts that its target has made with the others
        self._changes = 0  # of the process's memory, as far as the target has reported
        self._backlog: Backlog | None = None  # the target's
        self._waiting: tuple[str, asyncio.Future[v.MigrationRecord], Changed] | None = None
        self.about: dict[str, str] = {}  # what lines in the log are about, while it is under way
        self._log = log.get("moving").bind(job=process.job.name, process=process.row.id[:12])

    # --- what is requested --------------------------------------------------------------------------------------------

    async def run(self, record: v.MigrationRecord, changed: Changed, *, ranks: bool = False) -> v.MigrationRecord:
        """Begin it, and wait for its end. `ranks`: with others, a resumption. Raises Conflict if it cannot begin."""
        why = self.why_not(record.kind)
        if why is not None:
            raise Conflict(why.text, code=why.code, phase="planning", process_location=self.place)
        future: asyncio.Future[v.MigrationRecord] = asyncio.get_running_loop().create_future()
        self._waiting = (record.id, future, changed)
        self.about = {} if record.operation is None else {"operation": record.operation}
        try:
            self._tell(v.MoveRequested(t=time.monotonic_ns(), record=record, ranks=ranks))
            return await future
        finally:
            self._waiting, self.about = None, {}

    def why_not(self, kind: v.Kind) -> v.Reason | None:
        """None: it may begin."""
        if self._process.paused:
            return v.Reason("paused", "the process is paused; let it continue first")
        alone = self._process.state == "running" and not self._process.machine.grouped
        if kind == "suspend" and alone and (nodes := self._process.job.nodes) is not None:
            text = f"its job has ranks on several nodes, {nodes}, and it has no communicator with any of them yet"
            return v.Reason("several_nodes", text)
        return self._process.machine.why_not_move(kind)

    @property
    def place(self) -> ProcessLocation:
        """As a problem says it, before or without a move."""
        location = self._process.location
        return location if location in ("host", "file", "lost") else "source"

    def cancel(self, why: str) -> None:
        self._tell(v.CancelRequested(t=time.monotonic_ns(), why=why))

    # --- what servers say -------------------------------------------------------------------------------------------

    def is_target(self, number: int) -> bool:
        move = self._process.machine.move
        return move is not None and move.target == number

    def target_takes(self, number: int) -> bool:
        """Is it one that has been given the process?"""
        move = self._process.machine.move
        return move is not None and move.target == number and move.target_took

    def target_added(self, server: Server, message: m.MemoryAdd, fds: list[Fd], missing: bool) -> str | None:
        """Hold it apart. Returns why not, when the target was wrong to send it."""
        if missing or not fds:
            close_all(fds)
            text = "the daemon had no descriptor left to hold the target's memory (EMFILE): raise LimitNOFILE"
            self._tell(v.TargetFailed(t=_now(), server=server.number, code="no_descriptors", text=text))
            return None
        taken = message.id < self._first_id or message.id in self._incoming or message.id in self._process.handles
        if taken or len(self._incoming) >= MAX_HANDLES:
            close_all(fds)
            return "memory of the target with a number that is not free"
        self._incoming[message.id] = make_handle(message, fds[0])
        self._changes += 1
        return None

    def target_dropped(self, server: Server, number: int) -> None:
        if (handle := self._incoming.pop(number, None)) is not None:
            self._changes += 1
            handle.fd.close()
        elif number in self._process.handles:
            server.refuse("the target drops memory of the source before it has the process")

    def source_added(self, handle: Handle) -> None:
        """What the target copies from has grown."""
        if self._reaches_target(handle) and (target := self._fed) is not None:
            target.send(_for_target(handle), (handle.fd,))

    def source_dropped(self, handle: Handle) -> None:
        if self._reaches_target(handle) and (target := self._fed) is not None:
            target.send(m.pack("memory", op="drop", id=handle.id))
        if handle.name.startswith("file:"):
            self._unlink(handle.name.partition(":")[2])

    def _reaches_target(self, handle: Handle) -> bool:
        """Shadows and images. Of shadows only those that its device can map: the source keeps more in its device memory
        than snapshots, and none of that is needed."""
        move = self._process.machine.move
        through_host = move is not None and move.record.path == "host"
        return handle.kind != "device" and (handle.kind != "shadow" or handle.on_host or not through_host)

    @property
    def _fed(self) -> Server | None:
        move = self._process.machine.move
        return self._process.server(move.target) if move is not None and move.feeding else None

    def reported(self, server: Server, message: m.ServerMessage) -> None:
        t, number = _now(), server.number
        match message:
            case m.RoundProgress():
                self._tell(
                    v.RoundProgress(t=t, server=number, number=message.number, copied_bytes=message.copied_bytes)
                )
            case m.Round():
                self._tell(
                    v.RoundDone(
                        t=t, server=number, number=message.number, total_bytes=message.total_bytes,
                        copied_bytes=message.copied_bytes, differing_bytes=message.differing_bytes, ms=message.ms,
                        loading_ms=message.loading_ms,
                    )
                )  # fmt: skip
            case m.SnapshotStands():
                self._tell(v.SnapshotStands(t=t, server=number, number=message.number))
            case m.MoveFailed() | m.ResumeFailed():
                self._tell(v.TargetFailed(t=t, server=number, code=message.code, text=message.text))
            case m.HandedOver():
                self._tell(
                    v.HandedOver(
                        t=t,
                        server=number,
                        snapshot=message.snapshot,
                        drained=message.drained_t,
                        snapshot_ms=message.snapshot_ms,
                    )
                )
            case m.HandoverFailed() | m.SuspendFailed():
                self._tell(v.HandoverFailed(t=t, server=number, text=message.text))
            case m.SuspendProgress():
                self._tell(
                    v.SuspendProgress(
                        t=t, server=number, done_bytes=message.done_bytes, total_bytes=message.total_bytes
                    )
                )
            case m.Prepared():
                self._tell(v.Prepared(t=t, server=number, ms=message.ms))
            case m.Suspended():
                self._tell(
                    v.Suspended(
                        t=t,
                        server=number,
                        snapshot=message.snapshot,
                        total_bytes=message.bytes,
                        at=message.t,
                        ms=message.ms,
                    )
                )
            case m.Kept():
                self._process.records.server_assigned(
                    self._process.row.id, server.pid, server.start_time, self._process.generation
                )
                self._tell(v.Kept(t=t, server=number))
            case _:
                server.refuse(f"{message.type} is nothing that it could say now")

    # --- what the machine says --------------------------------------------------------------------------------------

    def do(self, instruction: e.Instruction) -> None:
        match instruction:
            case v.GiveTarget():
                self._give_target(instruction)
            case e.AskSnapshot():
                host = {} if instruction.host is None else {"host": instruction.host}
                self._send(instruction.server, "snapshot", **host)
            case v.AskRound():
                self._send(instruction.server, "round", number=instruction.number, snapshot=instruction.snapshot)
            case v.WriteIntent():
                self._write_intent(instruction)
            case v.AskHandover():
                self._send(instruction.server, "handover")
            case v.Take():
                self._process.generation += 1
                self._count_from_here()
                ranks = {"communicators": list(self.communicators)} if self._process.machine.grouped else {}
                self._send(instruction.server, "take", snapshot=instruction.snapshot, **ranks)
            case v.LetIn():
                self._process.generation += 1
                self._count_from_here()
                self._send(instruction.server, "enter", gone=list(instruction.gone))
            case v.GoOn():
                self._process.generation += 1
                self._process.recount()
                self._send(instruction.server, "continue")
            case v.PrepareSuspend():
                self._prepare_suspend(instruction)
            case v.AskSuspend():
                self._send(instruction.server, "suspend")
            case v.AbortSuspend():
                self._send(instruction.server, "abort_suspend")
            case v.SpawnHolder():
                self._spawn_holder(instruction.server)
            case v.GiveHolder():
                self._give_holder(instruction)
            case v.Switch():
                self._switch(instruction)
            case v.DropDeviceMemory():
                numbers = [h.id for h in self._process.handles.values() if h.kind == "device"]
                free([self._process.handles.pop(number).fd for number in numbers])
                self._process.fd_store.forget(self._process.row.id)  # its holder has what there is to keep
                self._process.has_slots(())
            case v.SaveMigration() | v.Progress():
                self._changed(instruction.record, save=isinstance(instruction, v.SaveMigration))

    def _give_target(self, instruction: v.GiveTarget) -> None:
        process, server, mode = self._process, self._process.server(instruction.server), instruction.mode
        if server is None or process.memory is None:
            return
        self._close_incoming()
        highest = max(process.handles, default=0)
        # The source of a move goes on numbering; of a suspended process there is none that could.
        self._first_id = (highest // ID_STEP + 1) * ID_STEP if mode == "move" else highest + 1
        try:
            quota, fds = process.give_quota(server, process.take_slots(devices_of(server.device)))
        except (OSError, Unavailable) as error:
            why = f"the job's memory quota cannot be shared: {error}"
            self._tell(v.TargetFailed(t=_now(), server=server.number, code="no_room", text=why))
            return
        packed = m.pack_target(
            mode, job=process.row.id, client_pid=process.row.pid, stall_bound=process.stall_bound,
            snapshot_cost=process.snapshot_cost, hang_timeout=process.machine.limits.hang_timeout,
            copies_on_host=process.copies is not None, first_id=self._first_id, injections=instruction.injections,
            ahead=instruction.waits, quota=quota,
        )  # fmt: skip
        process.give_backlog(server, self._hold)
        server.send(packed, fds)
        for handle in process.handles.values():
            if self._reaches_target(handle):
                server.send(_for_target(handle) if mode == "move" else handle.message, (handle.fd,))
        if mode == "resume":
            if not instruction.waits:
                process.generation += 1
                self._count_from_here()
            server.send(m.pack("go"))

    def _hold(self, backlog: Backlog) -> None:
        """Until the target has the process: the source's is followed as long as it has it."""
        self._backlog = backlog

    def _write_intent(self, instruction: v.WriteIntent) -> None:
        record, server = instruction.record, self._process.server(instruction.target)
        if server is not None:
            record.target_pid, record.target_start_time = server.pid, server.start_time

        def done(failure: str | None) -> None:
            t = _now()
            self._tell(v.IntentWritten(t=t) if failure is None else v.IntentFailed(t=t, reason=failure))

        self._process.records.migration_intent(record, done)

    def _prepare_suspend(self, instruction: v.PrepareSuspend) -> None:
        server = self._process.server(instruction.server)
        if server is None:
            return
        hint = 0 if self._process.last_snapshot is None else self._process.last_snapshot.live_bytes
        packed = m.pack("prepare_suspend", to=instruction.to, bytes_hint=hint)
        if instruction.to != "file":
            wanted, pool = hint or self._process.program_bytes, self._process.host_pool
            pool.make_room(wanted)
            self._process.give_room(server, pool.take(wanted))
            server.send(packed)
            return
        try:
            self._folder.parent.mkdir(mode=0o711, exist_ok=True)
            self._folder.mkdir(mode=0o700, exist_ok=True)
            if os.geteuid() == 0:
                os.chown(self._folder, self._process.row.uid, self._process.row.gid)
            folder = Fd(os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        except OSError as error:
            text = f"{self._folder} cannot be made: {error.strerror}"
            self._tell(v.HandoverFailed(t=_now(), server=instruction.server, text=text))
            return
        server.send(packed, (folder,))

    def _spawn_holder(self, number: int) -> None:
        program = self._process.program
        holder = HolderProgram(program.native_dir, program.runtime_dir, program.device_memory, program.scopes)
        self._start_server(number, "holder", holder, Peer(os.getpid(), os.geteuid(), os.getegid()))

    def _give_holder(self, instruction: v.GiveHolder) -> None:
        process, server = self._process, self._process.server(instruction.server)
        if server is None or process.memory is None:
            return
        packed = m.pack(
            "assign", job=process.row.id, client_pid=process.row.pid, generation=process.generation,
            keeps="file" if instruction.where == "file" else "host",
            snapshot=header.snapshot(process.memory.journal.fileno()),
        )  # fmt: skip
        server.send(packed, process.memory.own)
        for handle in process.handles.values():
            if handle.kind != "device":
                server.send(handle.message, (handle.fd,))
        server.send(m.pack("go"))

    def _switch(self, instruction: v.Switch) -> None:
        """The target has the process: what it holds takes the place of the source's device memory. The source's shadow
        stays until the target has taken a snapshot of its own, and drops it."""
        process, server = self._process, self._process.server(instruction.server)
        through_host = instruction.record.path == "host"
        for handle in list(process.handles.values()):
            on_source = handle.kind == "shadow" and not handle.on_host
            if handle.kind == "device" or (on_source and through_host):
                del process.handles[handle.id]
                free([handle.fd])
            elif on_source:
                process.handles[handle.id] = Handle(
                    handle.id, handle.kind, handle.size, handle.fd, m.pack_foreign(handle.message), handle.name,
                    handle.ordinal,
                )  # fmt: skip
        process.handles |= self._incoming
        self._incoming = {}
        if server is not None:
            process.has_slots(server.quota_slots)
        process.keep_all(self._changes)
        backlog, self._backlog = self._backlog, None
        if backlog is not None:
            process.fd_store.follow(process.row.id, backlog)
        process.moved_to(instruction.record.device)
        if server is not None:
            process.records.server_assigned(process.row.id, server.pid, server.start_time, process.generation)

    def _changed(self, record: v.MigrationRecord, *, save: bool) -> None:
        if save:
            if record.kind == "suspend" and (source := self._process.server(self._process.machine.active)) is not None:
                # While it lives, it has the process, whatever a holder says to the next daemon.
                record.target_pid, record.target_start_time = source.pid, source.start_time
            self._process.records.migration(record)
        if record.state != "running":
            self._close_incoming()
            why = record.error
            self._log.info(f"{record.kind} {record.state}", source=record.source, target=record.target, why=why,
                           downtime_ms=record.downtime_ms, rounds=len(record.iterations), **self.about)  # fmt: skip
            if record.kind == "suspend" and record.state != "done":
                self._remove_folder()
        if self._waiting is None or self._waiting[0] != record.id:
            return
        _, future, changed = self._waiting
        changed(record)
        if record.state != "running" and not future.done():
            future.set_result(record)

    # --- small parts ------------------------------------------------------------------------------------------------

    def _count_from_here(self) -> None:
        """The target is given the process: nobody else changes its memory from now on."""
        if self._process.memory is not None:
            self._changes = self._process.fd_store.next_change(self._process.memory)

    def release(self) -> None:
        """The process has ended."""
        self._close_incoming()
        self._remove_folder()

    def leave(self) -> None:
        """The daemon leaves; files stay."""
        self._close_incoming()

    def _send(self, receiver: int, type: str, **fields: object) -> None:
        if (server := self._process.server(receiver)) is not None:
            server.send(m.pack(type, **fields))

    def _close_incoming(self) -> None:
        close_all(handle.fd for handle in self._incoming.values())
        self._incoming = {}
        backlog, self._backlog = self._backlog, None
        if backlog is not None:
            backlog.close()

    def _unlink(self, name: str) -> None:
        if name and "/" not in name and name not in (".", ".."):
            with contextlib.suppress(OSError):
                (self._folder / name).unlink()
            move = self._process.machine.move
            preparing = move is not None and move.kind == "suspend"  # to write there, perhaps
            if not preparing and not any(h.name.startswith("file:") for h in self._process.handles.values()):
                self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder.exists():
            shutil.rmtree(self._folder, ignore_errors=True)


def _for_target(handle: Handle) -> bytes:
    """Shadow in the source's device memory is another device's."""
    return m.pack_foreign(handle.message) if handle.kind == "shadow" and not handle.on_host else handle.message


def _now() -> int:
    return time.monotonic_ns()
