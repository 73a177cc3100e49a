"""Moves, suspensions and resumptions in the machine of a process: it owns the servers, and does for the move under way
(xmigd/migration/machine.py) what concerns them. Pure, as the machine is (xmigd/recovery/machine.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from xmigd.migration import events as v
from xmigd.migration.machine import Move
from xmigd.recovery import events as e
from xmigd.recovery.core import FIRST_BACKOFF, LAST_BACKOFF, Core, Death, Limits


class MovingCore(Core, ABC):
    def __init__(self, limits: Limits | None) -> None:
        super().__init__(limits)
        self.keeper: int | None = None
        self.where = ""  # of a suspended process: host or file
        self._keep = False  # the keeper gets everything as soon as it is there
        self._source_death: Death | None = None  # of a move that may come to its end without its source

    @abstractmethod
    def _server_lost(self, death: Death) -> None:
        """The active server is gone, and nobody has the process: recover it."""

    @abstractmethod
    def _end(self, why: str) -> None:
        """Nothing is left."""

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
        self.move = Move(record, source=source, cut=self._cut[0], limits=self.limits.move)
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
                case v.WantKeeper():
                    self._want_keeper()
                case v.KeepNow():
                    self._keep, self.where = True, move.record.target
                    if self.keeper is None:
                        self._steer(v.KeeperGone(t=self._t, text="there is none"))
                    else:
                        self._give_keeper()
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
                        self._drop_keeper("nothing is suspended")
                    if source_lost:
                        self._recover_source()
                    elif self.state == "running":
                        self._want_standby()
                case v.GiveTarget(server, mode):
                    self.servers[server] = "assigned" if mode == "resume" else "copying"
                    injections = tuple(one for one in self.armed.values() if one.point == "import")
                    self._out.append(v.GiveTarget(server, mode, injections))
                case v.Take(server):
                    self.servers[server] = "assigned"
                    self._out.append(instruction)
                case v.GoOn(server):
                    if self.servers.get(server, "dying") != "dying":
                        self.servers[server] = "assigned"
                        self._out.append(instruction)
                case _:
                    self._out.append(instruction)

    def _switch(self, target: int) -> None:
        """The target has resumed the program: from here on there is no way back, and no use for the source."""
        source, self.active, self._source_death = self.active, target, None
        if source is not None and self.servers.get(source, "dying") != "dying":
            self._kill(source, "its process has moved")
        self._drop_standby()
        self._clear("spawn")
        self._alone = False
        self._drop_keeper("its process is resumed")
        if self.state == "suspended":
            self._go("running", "resumed")
        else:
            self._save("moved")

    def _look_who_is_left(self) -> None:
        """On the device that a suspended process is to leave."""
        if self.move is not None and self.move.phase == "releasing" and not self.servers.keys() - {self.keeper}:
            self._steer(v.DeviceLeft(t=self._t))

    def _park(self) -> None:
        self._clear("stable")
        self._source_death = None
        self._out.append(v.DropDeviceMemory())
        self._go("suspended", f"its state is in {'files' if self.where == 'file' else 'host memory'}")
        if self.keeper is None:
            self._keeper_later("there is none")

    def _source_gone(self, status: str) -> None:
        """Perhaps its target goes on without it."""
        self._steer(v.SourceGone(t=self._t, text=status))
        if self.move is None:
            self._recover_source()

    def _recover_source(self) -> None:
        death, self._source_death = self._source_death, None
        if death is None:
            return
        if self.state == "draining":
            self._end("the program has exited")
        else:
            self._server_lost(death)

    def _target_failed(self, server: int, *, code: str, text: str) -> None:
        if self.move is not None and server == self.move.target:
            self._steer(v.TargetFailed(t=self._t, server=server, code=code, text=text))

    # --- keepers ---------------------------------------------------------------------------------------------------

    def _keeper_adopted(self, event: e.KeeperAdopted) -> None:
        self.keeper = self._new_number()
        self.servers[self.keeper] = "keeping"
        self.where = event.where
        self._go("suspended", "its keeper outlived the daemon and has announced itself")

    def _want_keeper(self) -> None:
        if self.keeper is None:
            self.keeper = self._new_number()
            self.servers[self.keeper] = "spawning"
            self._out.append(v.SpawnKeeper(self.keeper))

    def _give_keeper(self) -> None:
        if self._keep and self.keeper is not None and self.servers[self.keeper] == "warm":
            self.servers[self.keeper] = "copying"
            self._out.append(v.GiveKeeper(self.keeper, self.where))

    def _kept(self, event: v.Kept) -> None:
        if event.server == self.keeper and self.servers[event.server] == "copying":
            self.servers[event.server] = "keeping"
            self._backoff = FIRST_BACKOFF
            self._steer(event)

    def _keeper_gone(self, why: str) -> None:
        self.keeper = None
        self._steer(v.KeeperGone(t=self._t, text=why))
        if self.state == "suspended":
            self._keeper_later(why)

    def _keeper_later(self, why: str) -> None:
        self._save(f"no keeper holds its memory for another daemon: {why}; trying again in {self._backoff:g} s")
        self._timer("keeper", self._backoff)
        self._backoff = min(self._backoff * 2, LAST_BACKOFF)

    def _drop_keeper(self, why: str) -> None:
        self._keep = False
        self._clear("keeper")
        if self.keeper is not None:
            number, self.keeper = self.keeper, None
            if self.servers.get(number, "dying") != "dying":
                self._kill(number, why)
