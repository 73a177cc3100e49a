"""A program under supervision, whole: what its machine says is done."""

from __future__ import annotations

import contextvars
from dataclasses import replace

from xmigd.ipc import messages as m
from xmigd.ipc import pidfd as pidfds
from xmigd.ipc.channel import Peer
from xmigd.memory.handles import JobMemory
from xmigd.process import events as e
from xmigd.process import migration_events as v
from xmigd.servers.server import Server
from xmigd.supervisor.reports import Reports


class Process(Reports):
    """One program and its servers."""

    def _do(self, instruction: e.Instruction) -> None:
        match instruction:
            case v.GiveTarget(mode="move"):
                self._works(instruction.server, "copies")
            case v.GiveTarget() | v.Take() | v.GoOn():
                self._works(instruction.server, "executes")
        match instruction:
            case e.Assign():
                self._assign(instruction)
            case e.Prepare():
                self._prepare(instruction)
            case e.Enter():
                self._enter(instruction)
            case e.Kill():
                self._log.info("killing a server", server=instruction.server, why=instruction.why, **self.moving.about)
                self._kill(instruction.server, instruction.why)
            case e.Spawn():
                self._spawn(instruction)
            case e.StayApart():
                self._apart = f"a fault was met beside others: {instruction.why}"
                self._note(f"from now on it is used without MPS: {self._apart}", level="warning")
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
                    instruction.seconds, self._timer_fired, instruction.name, context=contextvars.Context()
                )
            case e.ClearTimer():
                self._clear_timer(instruction.name)
            case e.SaveState():
                self._log.info(f"process {instruction.state}", why=instruction.why, **self.moving.about)
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
        device = instruction.device or self.row.device
        if self.moving.is_target(instruction.server) and self.take_ahead(instruction.server, device):
            return
        user = Peer(self.row.pid, self.row.uid, self.row.gid)
        devices = 0 if instruction.late else self._devices_open()
        program = replace(self.program, devices=devices)
        self.start_server(instruction.server, device, program, user)
        self.servers[instruction.server].devices = devices

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
            self._works(server.number, "executes")
            server.send(m.pack("enter"))
            self._note_server(server)

    def _becomes_its(self, server: Server, memory: JobMemory, *, recount: bool = True) -> None:
        if recount:
            self.fd_store.recount(self.row.id, self.fd_store.next_change(memory))
        self.generation += 1  # as the server counts, in the journal
        self.follow_backlog(server)

    def _give(self, server: Server, memory: JobMemory, instruction: e.Assign, *, ahead: bool = False) -> None:
        """All that it needs. `ahead`: it may prepare, and no more."""
        if not ahead:
            self._works(server.number, "executes")
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
