"""The life of one program and its servers, as a state machine: events in, instructions out, no I/O, no clock.

States
------
starting    the program waits in its handshake for its first server
running     a server has the process
recovering  the server is gone; another gets, or has got, the process and replays
losing      it cannot be recovered; a server is being instructed to mark the journal lost, which wakes the program
lost        marked; the program lives and gets errors
suspended   no server has it: its state is in host memory or in files, and the program waits in its next call
draining    the program has exited; its server has a moment to finish
ended       nothing is left

Servers are numbered per process, from 0, and never used twice. Two exist as a rule: `active`, which has the process or
is about to get it, and `standby`, warm or warming. While the process moves there is a third, the target of `move`;
while it is suspended there is only its `holder`, which holds descriptors for a daemon that may come later. A server
that was instructed to die is `dying` until its exit is seen; the process is never given to another before that, since
both would write the same memory. The one exception is a source that stands still because it has handed over. An exit
takes long where a device is to be given back: meanwhile the standby is `preparing`, which writes nothing.

What becomes of the process when a server dies is in recovery.py. A move, a suspension or a resumption under way is a
machine of its own (migration.py); this one owns the servers, and does for it what concerns them.
"""

from __future__ import annotations

from typing import get_args

from xmigd.process import events as e
from xmigd.process import migration_events as v
from xmigd.process.core import FIRST_BACKOFF, LAST_BACKOFF, Death, State
from xmigd.process.limits import Limits
from xmigd.process.migration import Move
from xmigd.process.recovery import Recovery


class Machine(Recovery):
    """See the module's docstring. `handle` is the only entry; everything else may be read."""

    def __init__(self, limits: Limits | None = None, *, faults: int = 0, recoveries: int = 0) -> None:
        super().__init__(limits, faults=faults, recoveries=recoveries)
        self.move: Move | None = None
        self.holder: int | None = None
        self.where = ""  # of a suspended process: host or file
        self._keep = False  # the holder gets everything as soon as it is there
        self._source_death: Death | None = None  # of a move that may come to its end without its source

    def _take(self, event: e.Event) -> None:
        match event:
            case e.HolderAdopted():
                self._holder_adopted(event)
            case e.Restored():
                self._restored()
            case v.MoveRequested():
                self._move_requested(event)
            case v.Kept():
                self._kept(event)
            case v.HandedOver() | v.Suspended() if self.move is None:
                if event.server == self.active and self.servers[event.server] == "assigned":
                    if self.grouped and isinstance(event, v.HandedOver):
                        self._cannot_go_back(event.server)
                    else:
                        self._out.append(v.GoOn(event.server))  # an earlier daemon requested it, and nobody took
            case e.GroupWoken():
                self._woken(event)
            case v.MoveEvent() | v.MoveServerEvent():
                self._steer(event)
            case _:
                super()._take(event)

    def validate_state(self) -> None:
        """Raise AssertionError if an invariant does not hold. For tests."""
        assert self.state in get_args(State)
        move = self.move
        living = [n for n, s in self.servers.items() if s != "dying"]
        target = None if move is None else move.target
        assert all(n in (self.active, self.standby, target, self.holder) for n in living), (living, self.active)
        assert len(living) <= 3 + (self.holder is not None)
        assert self.active is None or self.active in self.servers
        assert self.standby is None or self.standby in self.servers
        assert self.standby is None or self.opened
        assert self.holder is None or self.holder in self.servers
        assert self.active is None or self.active not in (self.standby, target, self.holder)
        assigned = [n for n, s in self.servers.items() if s == "assigned"]
        assert len(assigned) <= 1, "two servers execute"
        assert not assigned or assigned[0] == self.active or (move is not None and move.target_took)
        if move is not None:
            move.validate_state()
            assert not move.over
            assert self.state in ("running", "suspended", "draining")
            assert move.kind == "resume" or move.source == self.active
            assert target is None or target in self.servers
        elif "stopped" in self.servers.values():
            raise AssertionError("a server stands still and nobody will tell it to go on")
        if self.state == "running":
            if self.active is None:
                assert move is not None
                parts = ("taking", "keeping", "releasing", "rolling_back")
                assert move.phase in parts or move.leaving == "waits"
            else:
                assert self.servers[self.active] in ("assigned", "stopped", "dying")
                healthy = self._standby_wanted and move is None and self.servers[self.active] == "assigned"
                waits = self._timers & {"spawn", "settle", "join"}
                assert not healthy or self.standby is not None or waits
            assert self.recovery is None
        if self.state == "suspended":
            assert self.active is None
            assert self.standby is None
            assert self.where
            assert self.holder is not None or "holder" in self._timers
        if self.state == "recovering":
            assert self.recovery is not None
            assert self.recovery.outcome == "running"
            assert self.active is not None or "spawn" in self._timers
        if self.state == "losing":
            assert self.doom is not None
            assert self.active is not None or "spawn" in self._timers
        if self.state in ("lost", "ended"):
            assert not living
            assert self.recovery is None
            assert move is None
        assert self.attempts <= self.limits.max_attempts + 1

    # --- moves ------------------------------------------------------------------------------------------------

    @property
    def kept(self) -> bool:
        """Of a suspended process: has its holder everything?"""
        return self.holder is not None and self.servers.get(self.holder) == "keeping"

    def why_not_move(self, kind: v.Kind) -> v.Reason | None:
        """None: it may begin."""
        if self.move is not None:
            return v.Reason("already_moving", f"a {self.move.kind} of this process is under way")
        if self.state in ("ended", "draining"):
            return v.Reason("program_exited", "the program has exited")
        if self.state == "suspended" and kind != "resume":
            return v.Reason("suspended", f"the process is suspended to {self.where}; it can be resumed on any device")
        if self.state != ("suspended" if kind == "resume" else "running"):
            return v.Reason("not_running", f"the process is {self.state}")
        if self.unrecoverable is not None:
            return v.Reason("unrecoverable", self.unrecoverable)
        if kind != "resume" and (self.active is None or self.servers[self.active] != "assigned"):
            return v.Reason("not_running", "its server is being replaced")
        return None

    def _move_requested(self, event: v.MoveRequested) -> None:
        record = event.record
        why = self.why_not_move(record.kind)
        if why is not None:
            record.code, record.error = why.code, why.text
            record.state, record.phase, record.ended = "failed", "over", self._t
            self._out.append(v.SaveMigration(record))
            return
        source = None if record.kind == "resume" else self.active
        ranks = event.ranks or (record.kind == "suspend" and self.grouped)
        self.move = Move(record, source=source, snapshot=self._snapshot[0], limits=self.limits.move, ranks=ranks)
        self._interpret(self.move.begin(self._t))

    def _steer(self, event: e.Event) -> None:
        if self.move is not None:
            self._interpret(self.move.handle(event))

    def _interpret(self, instructions: list[e.Instruction]) -> None:
        """What a move says: some of it concerns the servers, the rest is done outside."""
        move = self.move
        assert move is not None
        if move.source_stopped and self.active is not None and self.servers[self.active] == "assigned":
            self.servers[self.active] = "stopped"
        for instruction in instructions:
            match instruction:
                case v.Dismiss(server, why):
                    if self.servers.get(server, "dying") != "dying":
                        self._kill(server, why)
                case v.Patience(seconds):
                    self._timer("move", seconds)
                case v.WantTarget():
                    move.target = self._new_number()
                    self.servers[move.target] = "spawning"
                    self._out.append(e.Spawn(move.target, move.record.target))
                case v.WantHolder():
                    self._want_holder()
                case v.KeepNow():
                    self._keep, self.where = True, move.record.target
                    if self.holder is None:
                        self._steer(v.HolderGone(t=self._t, text="there is none"))
                    else:
                        self._give_holder()
                case v.DropStandby():
                    self._drop_standby()
                    self._clear("spawn")
                case v.LeaveDevice():
                    self._look_who_is_left()
                case v.Parked():
                    self._park()
                case v.Switch(_, server):
                    self._switch(server)
                    self._out.append(instruction)
                    self._want_standby()
                case v.Over(source_lost):
                    self._clear("move")
                    self.move = None
                    if self.state != "suspended":
                        self._drop_holder("nothing is suspended")
                    if source_lost:
                        self._recover_source()
                    elif self.state == "running":
                        self._want_standby()
                case v.GiveTarget(server, mode, waits=waits):
                    self.servers[server] = "assigned" if mode == "resume" else "copying"
                    injections = tuple(one for one in self.armed.values() if one.point == "import")
                    self._out.append(v.GiveTarget(server, mode, injections, waits))
                case v.Take(server):
                    self.servers[server] = "assigned"
                    self._out.append(instruction)
                case v.GoOn(server) if self.grouped and move.kind == "move":
                    if self.servers.get(server, "dying") != "dying":
                        self._cannot_go_back(server)
                case v.GoOn(server):
                    if self.servers.get(server, "dying") != "dying":
                        self.servers[server] = "assigned"
                        self._out.append(instruction)
                case _:
                    self._out.append(instruction)

    def _cannot_go_back(self, server: int) -> None:
        """The source of a rank's move, which has handed over: the other ranks have gone on with its target. All of them
        are recovered from there."""
        why = "its move was given up when the other ranks had gone on with its target"
        self._deaths.setdefault(server, Death(None, self._t, innocent=True, why=why))
        self._break(why)
        self._kill(server, why)

    def _kill_for_group(self, reason: str) -> bool:
        """In a move, whoever has the process, or may have it."""
        active = self.active
        if self.move is None or active is None or self.servers[active] != "stopped":
            return super()._kill_for_group(reason)
        self._deaths.setdefault(active, Death(None, self._t, innocent=True, why=reason))
        self._kill(active, reason)
        target = self.move.target
        if target is not None and self.servers.get(target, "dying") != "dying":
            self._kill(target, reason)
        return True

    def _switch(self, target: int) -> None:
        """The target has resumed the program: from here on there is no way back, and no use for the source."""
        source, self.active, self._source_death = self.active, target, None
        self.opened = True
        if source is not None and self.servers.get(source, "dying") != "dying":
            self._kill(source, "its process has moved")
        self._drop_standby()
        self._clear("spawn")
        self._alone = False
        self._drop_holder("its process is resumed")
        if self.state == "suspended":
            self._go("running", "resumed")
        else:
            self._save("moved")

    def _woken(self, event: e.GroupWoken) -> None:
        """Its memory is made again, as that of a device that was lost."""
        if self.state != "suspended" or self.move is not None:
            return
        self._drop_holder("its process is recovered")
        self._begin_recovery(event.reason)

    def _look_who_is_left(self) -> None:
        """On the device that a suspended process is to leave."""
        if self.move is not None and self.move.phase == "releasing" and not self.servers.keys() - {self.holder}:
            self._steer(v.DeviceLeft(t=self._t))

    def _park(self) -> None:
        self._clear("stable")
        self._source_death = None
        self._out.append(v.DropDeviceMemory())
        self._go("suspended", f"its state is in {'files' if self.where == 'file' else 'host memory'}")
        if self.holder is None:
            self._holder_later("there is none")

    def _source_gone(self, status: str) -> None:
        """Perhaps its target goes on without it."""
        self._steer(v.SourceGone(t=self._t, text=status))
        if self.move is None:
            self._recover_source()
        elif self.move.leaving == "waits":
            self._break(status)  # the others are recovered, unless all are suspended

    def _recover_source(self) -> None:
        death, self._source_death = self._source_death, None
        if death is None:
            return
        if self.state == "draining":
            self._end("the program has exited")
        else:
            self._recover(death)

    # --- what else may become of a server ---------------------------------------------------------------------

    def _is_target(self, server: int) -> bool:
        return self.move is not None and server == self.move.target

    def _hello(self, event: e.Hello) -> None:
        spawning = self.servers[event.server] == "spawning"
        super()._hello(event)
        if spawning and event.server == self.holder:
            self._give_holder()
        elif spawning and self._is_target(event.server):
            self._steer(v.TargetReady(t=event.t))

    def _opened(self, event: e.Opened) -> None:
        if self.move is None:
            super()._opened(event)
        elif event.server == self.active:
            self.opened = True  # whether there is to be a standby, the move's end says

    def _ending(self, event: e.Ending) -> None:
        if self.move is None:
            super()._ending(event)

    def _phase(self, event: e.PhaseReached) -> None:
        if self._is_target(event.server):
            self._steer(v.TargetPhase(t=event.t, name=event.name, at=event.at))
        else:
            super()._phase(event)

    def _snapshot_committed(self, event: e.SnapshotCommitted) -> None:
        super()._snapshot_committed(event)
        if event.server == self.active:
            self._steer(v.SourceSnapshot(t=event.t, number=event.number, ms=event.ms, off_device=event.off_device))

    def _faulted(self, event: e.Faulted) -> None:
        self._target_failed(event.server, code="target_fault", text=event.text or f"CUDA error {event.error}")
        super()._faulted(event)

    def _stranded(self, event: e.Stranded) -> None:
        self._target_failed(event.server, code="target_lost", text=event.reason)
        super()._stranded(event)

    def _garbage(self, event: e.GarbageFound) -> None:
        self._target_failed(event.server, code="target_fault", text=event.text)
        super()._garbage(event)

    def _target_failed(self, server: int, *, code: str, text: str) -> None:
        if self._is_target(server):
            self._steer(v.TargetFailed(t=self._t, server=server, code=code, text=text))

    def _server_unavailable(self, number: int, reason: str) -> None:
        if number == self.holder:
            del self.servers[number]
            self._holder_gone(reason)
        elif self._is_target(number):
            del self.servers[number]
            self._steer(v.TargetGone(t=self._t, code="target_lost", text=f"no server could be started: {reason}"))
        else:
            super()._server_unavailable(number, reason)
        self._look_who_is_left()

    def _exited(self, event: e.Exited) -> None:
        if self._is_target(event.server):
            *_, status = self._forget(event)
            self._steer(v.TargetGone(t=event.t, code="target_lost", text=f"the target's server was lost: {status}"))
        elif event.server == self.holder:
            *_, status = self._forget(event)
            self._holder_gone(status)
        else:
            super()._exited(event)
        self._look_who_is_left()

    def _was_to_leave(self, status: str) -> bool:
        leaves = self.move is not None and self.move.phase in ("keeping", "releasing")
        if leaves:
            self._steer(v.SourceGone(t=self._t, text=status))
        return leaves

    def _server_lost(self, death: Death, status: str) -> None:
        if self.move is None:
            self._recover(death)
        else:
            self._source_death = death
            self._source_gone(status)

    def _timer_fired(self, event: e.TimerFired) -> None:
        match event.name:
            case "move":
                self._steer(v.TimeIsUp(t=event.t))
            case "holder":
                if self.state == "suspended" and self.holder is None:
                    self._want_holder()
            case _:
                super()._timer_fired(event)

    def _program_gone(self) -> None:
        self._steer(v.ProgramGone(t=self._t))

    def _abandon(self, why: str) -> None:
        self.holder = None
        if self.move is not None:
            move, self.move = self.move, None
            self._out += [i for i in move.abandon(self._t, why) if not isinstance(i, v.Over)]

    # --- holders ---------------------------------------------------------------------------------------------------

    def _holder_adopted(self, event: e.HolderAdopted) -> None:
        self.holder = self._new_number()
        self.servers[self.holder] = "keeping"
        self.opened = True
        self.where = event.where
        self._go("suspended", "its holder outlived the daemon and has announced itself")

    def _restored(self) -> None:
        self.opened = True
        self.where = "host"
        self._go("suspended", "it is restored from a checkpoint")
        self._keep = True  # by the next daemon, too, should this one end
        self._want_holder()

    def _want_holder(self) -> None:
        if self.holder is None:
            self.holder = self._new_number()
            self.servers[self.holder] = "spawning"
            self._out.append(v.SpawnHolder(self.holder))

    def _give_holder(self) -> None:
        if self._keep and self.holder is not None and self.servers[self.holder] == "warm":
            self.servers[self.holder] = "copying"
            self._out.append(v.GiveHolder(self.holder, self.where))

    def _kept(self, event: v.Kept) -> None:
        if event.server == self.holder and self.servers[event.server] == "copying":
            self.servers[event.server] = "keeping"
            self._backoff = FIRST_BACKOFF
            self._steer(event)

    def _holder_gone(self, why: str) -> None:
        self.holder = None
        self._steer(v.HolderGone(t=self._t, text=why))
        if self.state == "suspended":
            self._holder_later(why)

    def _holder_later(self, why: str) -> None:
        self._save(f"no holder holds its memory for another daemon: {why}; trying again in {self._backoff:g} s")
        self._timer("holder", self._backoff)
        self._backoff = min(self._backoff * 2, LAST_BACKOFF)

    def _drop_holder(self, why: str) -> None:
        self._keep = False
        self._clear("holder")
        if self.holder is not None:
            number, self.holder = self.holder, None
            if self.servers.get(number, "dying") != "dying":
                self._kill(number, why)
