"""Moves in the machine of a process: single stories, then anything at any time (Hypothesis)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.daemon.test_machine import World
from xmigd.migration import events as v
from xmigd.migration.machine import MoveLimits
from xmigd.recovery import events as e
from xmigd.recovery.core import Limits

MIB = 1 << 20


class MoveWorld(World):
    """Also knows who stands still, and what each move came to."""

    def __init__(self, limits: Limits | None = None) -> None:
        super().__init__(limits)
        self.stopped: set[int] = set()  # have handed over, and were not told to go on
        self.asked: set[int] = set()  # were told to stop
        self.resumed: set[int] = set()  # targets that have
        self.devices: dict[int, str | None] = {}
        self.records: dict[str, v.MigrationRecord] = {}
        self.device = "cpu:0"
        self.keeping: int | None = None
        self.off_device = False  # the shadow

    def do(self, instruction: e.Instruction) -> None:
        match instruction:
            case e.Spawn(server, device):
                self.devices[server] = device or self.device
                super().do(instruction)
            case v.SpawnKeeper(server):
                self.alive.add(server)
            case v.GiveKeeper(server):
                assert server in self.alive
                self.keeping = server
            case v.GiveTarget(server, mode):
                assert server in self.alive
                move = self.machine.move
                if move is not None and move.record.path == "host":
                    assert self.off_device, "it could not be reached"
                if mode == "resume":
                    self.holds(server)
            case v.Take(server):
                assert self.stopped or self.machine.active is None
                self.holds(server)
            case v.GoOn(server):
                assert server in self.stopped
                self.stopped.discard(server)
                self.holds(server)
            case v.AskHandover(server) | v.AskSuspend(server):
                self.asked.add(server)
            case v.Switch(record, server):
                assert server in self.resumed
                self.device = record.device
            case v.SaveMigration(record):
                known = self.records.get(record.id)
                assert known is None or known.state == "running", "a move ends once"
                self.records[record.id] = record
            case _:
                super().do(instruction)
        if not self.others or self.others[-1] is not instruction:
            self.others.append(instruction)

    def holds(self, server: int) -> None:
        assert server in self.alive
        assert self.holder is None, f"{server} and {self.holder} would both execute"
        assert not self.released
        self.holder = server

    def exit(self, server: int, clean: bool = False, killed: bool = False) -> None:
        self.stopped.discard(server)
        if self.keeping == server:
            self.keeping = None
        super().exit(server, clean, killed)

    def stops(self, server: int) -> None:
        """It says that it has handed over, or is suspended."""
        if server in self.asked:
            self.asked.discard(server)
            self.stopped.add(server)
            if self.holder == server:
                self.holder = None

    # Longer pieces of stories.

    def record(self, id: str = "1") -> v.MigrationRecord:
        return self.records[id]

    def begin(self, kind: v.Kind = "move", target: str = "cpu:1", id: str = "1", **fields: Any) -> int:
        """Returns the target's number, or the source's of a suspension."""
        record = v.MigrationRecord(
            id=id,
            kind=kind,
            process="p",
            source=self.machine.where or self.device,
            target=target,
            started=self.t,
            **fields,
        )
        self.tell(v.MoveRequested, record=record)
        move = self.machine.move
        if move is None or move.record is not record:
            return -1
        found = move.source if kind == "suspend" else move.target
        assert found is not None
        return found

    def warm(self, target: int) -> None:
        self.tell(e.Hello, server=target)
        self.cut()

    def cut(self, ms: float = 1.0, *, off_device: bool = False) -> None:
        self.cuts = getattr(self, "cuts", 0) + 1
        self.off_device = off_device
        self.tell(
            e.CutCommitted, server=self.machine.active, number=self.cuts, sequence=self.cuts, ms=ms,
            off_device=off_device,
        )  # fmt: skip

    def no_peer(self) -> int:
        """A move whose target cannot reach the source; the number of the next target."""
        first = self.begin()
        self.warm(first)
        self.tell(v.TargetFailed, server=first, code="no_peer", text="out of reach")
        assert self.machine.move is not None
        found = self.machine.move.target
        assert found not in (None, first)
        self.exit(first)
        return int(found or 0)

    def round(self, target: int, number: int, copied: int, total: int = 100 * MIB, ms: float = 0.0) -> None:
        """At 1 GiB/s."""
        self.tell(
            v.RoundDone, server=target, number=number, total_bytes=total, copied_bytes=copied, differing_bytes=0,
            ms=ms or copied / (1 << 30) * 1e3,
        )  # fmt: skip

    def to_handover(self) -> int:
        target = self.begin()
        self.warm(target)
        self.round(target, 1, 10 * MIB)
        self.tell(v.IntentWritten)
        return target

    def hand_over(self) -> None:
        source = self.machine.active
        assert source is not None
        self.stops(source)
        self.tell(v.HandedOver, server=source, cut=self.cuts, drained=self.t)

    def resume_program(self, target: int) -> None:
        for name in ("mapped", "restored", "redone"):
            self.tell(e.PhaseReached, server=target, name=name, at=self.t)
        self.resumed.add(target)
        self.tell(e.PhaseReached, server=target, name="resumed", at=self.t)

    def suspend(self, to: str = "host") -> int:
        source = self.begin("suspend", to, id="s")
        self.tell(v.Prepared, server=source, ms=3.0)
        self.stops(source)
        self.tell(v.Suspended, server=source, cut=1, total_bytes=MIB, at=self.t, ms=1.0)
        keeper = self.machine.keeper
        assert keeper is not None
        self.tell(e.Hello, server=keeper)
        self.tell(v.Kept, server=keeper)
        # The device is free when both are gone, in whatever order.
        for server in (source, 1):
            assert self.machine.servers[server] == "dying"
            assert (self.machine.state, self.record("s").phase) == ("running", "releasing")
            self.exit(server, killed=True)
        return keeper


@pytest.fixture
def world() -> MoveWorld:
    world = MoveWorld()
    world.run()
    return world


def kinds(world: MoveWorld) -> list[str]:
    return [type(i).__name__ for i in world.others]


def test_a_move(world: MoveWorld) -> None:
    target = world.begin()
    assert world.devices[target] == "cpu:1"
    world.warm(target)
    assert v.AskRound(target, 1, 1) in world.others
    world.round(target, 1, 100 * MIB)  # 98 ms at 1 GiB/s, and the cut: within the budget at once
    assert world.holder == 0
    world.tell(v.IntentWritten)
    world.hand_over()
    assert world.holder == target
    world.resume_program(target)
    assert (world.machine.state, world.machine.active, world.device) == ("running", target, "cpu:1")
    assert any(isinstance(i, e.Kill) and i.server == 0 for i in world.others)
    record = world.record()
    assert (record.state, record.location, record.device, record.code) == ("done", "device", "cpu:1", None)
    assert [phase.name for phase in record.phases] == [
        "preparing", "copying", "committing", "handing_over", "taking", "mapped", "restored", "redone", "resumed",
        "over",
    ]  # fmt: skip
    assert record.downtime_ms is not None
    # The old standby is on the wrong device.
    assert world.machine.standby is not None
    assert world.devices[world.machine.standby] == "cpu:1"
    world.exit(0, killed=True)
    world.exit(1, killed=True)
    assert not world.recoveries


def test_rounds_go_on_until_the_rest_fits(world: MoveWorld) -> None:
    target = world.begin()
    world.warm(target)
    for number, copied in enumerate((8000, 4000, 1000), 1):
        world.round(target, number, copied * MIB, total=8000 * MIB)
        assert world.machine.move is not None
        assert world.machine.move.phase == "copying"
        world.cut()
    world.round(target, 4, 90 * MIB, total=8000 * MIB)
    assert world.machine.move is not None
    assert world.machine.move.phase == "committing"
    record = world.machine.move.record
    assert [i.copied_bytes for i in record.iterations] == [8000 * MIB, 4000 * MIB, 1000 * MIB, 90 * MIB]
    assert record.bytes_per_s == pytest.approx(1 << 30)
    assert record.expected_downtime_ms == pytest.approx(90 / 1024 * 1e3 + 1, rel=0.01)
    assert record.dirty_bytes_per_s is not None


def test_rounds_end_when_they_no_longer_fall(world: MoveWorld) -> None:
    target = world.begin()
    world.warm(target)
    for number, copied in enumerate((8000, 4000, 3900), 1):
        world.round(target, number, copied * MIB, total=8000 * MIB)
        if number < 3:
            world.cut()
    assert world.machine.move is not None
    assert world.machine.move.phase == "committing"


def test_more_downtime_than_allowed_is_given_up(world: MoveWorld) -> None:
    target = world.begin(max_downtime_ms=50)
    world.warm(target)
    for number, copied in enumerate((8000, 4000, 3900), 1):
        world.round(target, number, copied * MIB, total=8000 * MIB)
        if number < 3:
            world.cut()
    assert (world.record().state, world.record().code, world.record().location) == ("failed", "downtime", "device")
    assert world.holder == 0


def test_cuts_that_nobody_asked_for_begin_no_round(world: MoveWorld) -> None:
    target = world.begin()
    world.warm(target)
    world.cut()
    assert kinds(world).count("AskRound") == 1


def test_an_idle_source_takes_no_cut(world: MoveWorld) -> None:
    world.cut()
    target = world.begin()
    world.tell(e.Hello, server=target)
    assert "AskRound" not in kinds(world)
    world.timer("move")
    assert v.AskRound(target, 1, 1) in world.others
    world.cut()  # late
    assert kinds(world).count("AskRound") == 1


def test_an_idle_source_says_so(world: MoveWorld) -> None:
    world.cut()
    target = world.begin()
    world.tell(e.Hello, server=target)
    world.tell(v.CutStands, server=target, number=7)  # it is not its to say
    assert "AskRound" not in kinds(world)
    world.tell(v.CutStands, server=0, number=1)
    assert v.AskRound(target, 1, 1) in world.others


@pytest.mark.parametrize("first", ["target", "shadow"])
def test_a_target_without_a_way_to_the_source_goes_through_the_host(world: MoveWorld, first: str) -> None:
    target = world.no_peer()
    assert v.AskCut(0, host=True) in world.others
    assert (world.record().path, world.record().phase) == ("host", "preparing")
    world.cut()  # one that still lies on the device
    if first == "target":
        world.tell(e.Hello, server=target)
        assert v.GiveTarget(target, "move") not in world.others
        world.cut(off_device=True)
    else:
        world.cut(off_device=True)
        world.tell(e.Hello, server=target)
    assert v.GiveTarget(target, "move") in world.others
    world.cut(off_device=True)
    world.round(target, 1, MIB)
    world.tell(v.IntentWritten)
    world.hand_over()
    world.resume_program(target)
    record = world.record()
    assert (record.state, record.path, record.code, world.device) == ("done", "host", None, "cpu:1")
    assert v.AskCut(0, host=False) not in world.others
    world.exit(0, killed=True)


@pytest.mark.parametrize("phase", ["committing", "handing_over", "taking"])
def test_a_target_that_finds_out_late(world: MoveWorld, phase: str) -> None:
    """A young program has its first shadow with the last cut."""
    target = world.begin()
    world.warm(target)
    world.round(target, 1, 0, total=0)
    if phase != "committing":
        world.tell(v.IntentWritten)
    if phase == "taking":
        world.hand_over()
    world.tell(v.TargetFailed, server=target, code="no_peer", text="out of reach")
    if phase == "handing_over":
        world.hand_over()
    world.exit(target)
    assert (world.holder, world.record().state, world.record().code) == (0, "running", None)
    if phase == "committing":
        world.tell(v.IntentWritten)  # the first one, late
    move = world.machine.move
    assert move is not None
    assert move.target not in (None, target)
    world.tell(e.Hello, server=move.target)
    world.cut(off_device=True)
    world.cut(off_device=True)
    world.round(move.target or 0, 1, MIB)
    world.tell(v.IntentWritten)
    world.hand_over()
    world.resume_program(move.target or 0)
    assert (world.record().state, world.record().path, world.device) == ("done", "host", "cpu:1")


@pytest.mark.parametrize("how", ["cancel", "exit"])
def test_a_detour_that_nobody_wants_any_more_does_not_begin(world: MoveWorld, how: str) -> None:
    target = world.to_handover()
    world.tell(v.TargetFailed, server=target, code="no_peer", text="out of reach")
    assert world.machine.move is not None
    assert world.machine.move.may_cancel is None
    if how == "cancel":
        world.tell(v.CancelRequested, why="asked")
    else:
        world.tell(e.ClientExited)
    world.hand_over()
    assert world.record().code == ("cancelled" if how == "cancel" else "program_exited")
    assert (world.record().path, world.holder) == ("peer", 0)


def test_a_source_that_does_not_answer_a_cancel_is_killed_in_time(world: MoveWorld) -> None:
    target = world.to_handover()
    world.tell(v.CancelRequested, why="asked")
    assert world.timers["move"] == MoveLimits().handover_timeout
    world.exit(target, killed=True)
    world.timer("move")
    assert any(isinstance(i, e.Kill) and i.server == 0 for i in world.others)
    world.exit(0, killed=True)
    assert (world.record().state, world.record().location) == ("cancelled", "device")
    world.redo()
    assert world.device == "cpu:0"


@pytest.mark.parametrize("how", ["again", "no_room", "cancel", "target", "timeout"])
def test_a_detour_that_fails_brings_the_shadow_back(world: MoveWorld, how: str) -> None:
    target = world.no_peer()
    if how == "again":
        world.tell(e.Hello, server=target)
        world.cut(off_device=True)
        world.tell(v.TargetFailed, server=target, code="no_peer", text="still")
    elif how == "no_room":
        world.tell(v.HandoverFailed, server=0, text="host memory has no room")
        assert "out of reach" in (world.record().error or "")
    elif how == "cancel":
        world.tell(v.CancelRequested, why="asked")
    elif how == "target":
        world.exit(target, killed=True)
    else:
        world.timer("move")
    codes = {"again": "no_peer", "no_room": "no_peer", "cancel": "cancelled", "target": "target_lost"}
    assert world.record().code == codes.get(how, "timeout")
    assert v.AskCut(0, host=False) in world.others
    assert (world.machine.state, world.holder, world.record().location) == ("running", 0, "device")
    if target in world.alive:
        world.exit(target, killed=True)


def test_a_source_that_dies_in_a_detour_is_recovered(world: MoveWorld) -> None:
    target = world.no_peer()
    world.exit(0, killed=True)
    assert world.record().code == "source_lost"
    world.exit(target, killed=True)
    world.redo()


def test_faults_of_imports_are_given_to_the_target(world: MoveWorld) -> None:
    injection = e.Injection(9, "import", "fault", 0, 217)
    world.tell(e.InjectRequested, injection=injection)
    target = world.begin()
    world.warm(target)
    assert v.GiveTarget(target, "move", (injection,)) in world.others
    world.tell(e.InjectionStrikes, server=target, id=9)
    world.tell(v.TargetFailed, server=target, code="no_peer", text="injected")
    assert world.machine.move is not None
    second = world.machine.move.target
    world.tell(e.Hello, server=second)
    world.cut(off_device=True)
    assert v.GiveTarget(second or 0, "move") in world.others


def test_the_next_daemon_ends_a_detour() -> None:
    world = MoveWorld()
    world.alive.add(0)
    world.holder = 0
    world.tell(e.Adopted, detour=True)
    assert v.AskCut(0, host=False) in world.others


@pytest.mark.parametrize("phase", ["preparing", "copying", "committing", "handing_over", "stopped", "taking"])
@pytest.mark.parametrize("how", ["target", "cancel", "timeout", "target_says"])
def test_a_failure_before_the_target_has_resumed_leaves_it_on_the_source(
    world: MoveWorld, phase: str, how: str
) -> None:
    target = world.begin()
    if phase != "preparing":
        world.warm(target)
    if phase not in ("preparing", "copying"):
        world.round(target, 1, MIB)
    if phase in ("handing_over", "stopped", "taking"):
        world.tell(v.IntentWritten)
    if phase in ("stopped", "taking"):
        world.hand_over()
    if phase == "taking":
        world.tell(e.PhaseReached, server=target, name="mapped", at=world.t)
    if how == "target":
        world.exit(target, killed=True)
    elif how == "target_says":
        world.tell(v.TargetFailed, server=target, code="no_room", text="no room")
    elif how == "cancel":
        world.tell(v.CancelRequested, why="asked")
    else:
        world.timer("move")
    if phase == "handing_over" and how == "timeout":
        world.exit(0, killed=True)  # it does not say whether it has stopped: it is recovered
        world.redo()
        assert world.record().code == "timeout"
        return
    if phase == "handing_over":
        assert world.machine.move is not None  # it may stop yet, and must hear that it shall go on
        world.hand_over()
    if target in world.alive:
        assert world.holder in (0, target)
        world.exit(target, killed=True)
    assert (world.machine.state, world.machine.active, world.holder, world.device) == ("running", 0, 0, "cpu:0")
    assert world.record().state == ("cancelled" if how == "cancel" else "failed")
    assert world.record().location == "device"
    assert not world.recoveries
    assert not world.stopped


@pytest.mark.parametrize("phase", ["preparing", "copying", "committing", "handing_over"])
def test_the_source_dies_before_it_has_handed_over(world: MoveWorld, phase: str) -> None:
    target = world.begin()
    if phase != "preparing":
        world.warm(target)
    if phase not in ("preparing", "copying"):
        world.round(target, 1, MIB)
    if phase == "handing_over":
        world.tell(v.IntentWritten)
    world.exit(0, killed=True)
    assert world.record().code == "source_lost"
    world.exit(target, killed=True)
    world.redo()
    assert (world.device, world.recoveries[1].outcome) == ("cpu:0", "resumed")
    world.tell(e.Hello, server=world.machine.standby)


def test_the_source_dies_after_it_has_handed_over(world: MoveWorld) -> None:
    target = world.to_handover()
    world.hand_over()
    world.exit(0, killed=True)
    assert world.machine.state == "running"
    world.resume_program(target)
    assert (world.machine.active, world.device, world.record().state) == (target, "cpu:1", "done")
    assert not world.recoveries


def test_both_die_while_the_target_takes(world: MoveWorld) -> None:
    target = world.to_handover()
    world.hand_over()
    world.exit(0, killed=True)
    world.exit(target, killed=True)
    assert world.record().state == "failed"
    world.redo()
    assert (world.device, world.machine.state) == ("cpu:0", "running")


def test_a_target_that_resumed_the_program_before_it_was_killed_has_it(world: MoveWorld) -> None:
    """The program has its answers already: going on with the source would be a second life."""
    target = world.to_handover()
    world.hand_over()
    world.tell(v.CancelRequested, why="asked")
    world.resume_program(target)
    assert (world.record().state, world.device) == ("done", "cpu:1")
    world.exit(target, killed=True)
    world.redo()
    assert world.device == "cpu:1"


def test_a_target_dies_after_it_has_resumed(world: MoveWorld) -> None:
    target = world.to_handover()
    world.hand_over()
    world.resume_program(target)
    world.exit(target, killed=True)
    world.redo()
    assert world.devices[world.machine.active or 0] == "cpu:1"


def test_the_intent_cannot_be_written(world: MoveWorld) -> None:
    target = world.begin()
    world.warm(target)
    world.round(target, 1, MIB)
    world.tell(v.IntentFailed, reason="the disk is full")
    assert (world.record().code, world.holder) == ("not_recorded", 0)


def test_the_source_refuses_to_hand_over(world: MoveWorld) -> None:
    world.to_handover()
    world.tell(v.HandoverFailed, server=0, text="no room for a cut")
    assert (world.record().code, world.holder) == ("source_refused", 0)
    assert "GoOn" not in kinds(world)


@pytest.mark.parametrize("stopped", [False, True])
def test_the_program_exits_while_it_moves(world: MoveWorld, stopped: bool) -> None:
    target = world.to_handover()
    if stopped:
        world.hand_over()
    world.tell(e.ClientExited)
    if not stopped:
        assert world.machine.state == "draining"
        world.exit(target, killed=True)
        world.tell(v.HandoverFailed, server=0, text="the program has exited")
        world.exit(0, clean=True)
    assert world.machine.state == "ended"
    assert (world.record().state, world.record().code) == ("failed", "program_exited")


def test_only_one_move_at_a_time(world: MoveWorld) -> None:
    world.begin()
    world.tell(v.MoveRequested, record=v.MigrationRecord(
        id="2", kind="move", process="p", source="cpu:0", target="cpu:1", started=world.t))  # fmt: skip
    assert (world.record("2").state, world.record("2").code) == ("failed", "already_moving")
    assert world.machine.move is not None


def test_suspend_and_resume(world: MoveWorld) -> None:
    keeper = world.suspend()
    assert (world.machine.state, world.machine.where, world.keeping) == ("suspended", "host", keeper)
    assert (world.record("s").state, world.record("s").location) == ("done", "host")
    assert world.alive == {keeper}
    target = world.begin("resume", "cpu:1", id="r")
    world.tell(e.Hello, server=target)
    world.tell(v.IntentWritten)
    world.resume_program(target)
    assert (world.machine.state, world.machine.active, world.device) == ("running", target, "cpu:1")
    assert world.record("r").location == "device"
    world.exit(keeper, killed=True)
    assert world.machine.standby is not None


def test_a_suspension_is_given_up_while_it_is_prepared(world: MoveWorld) -> None:
    world.begin("suspend", "host")
    world.tell(v.CancelRequested, why="asked")
    assert v.AbortSuspend(0) in world.others
    assert (world.record().state, world.machine.state, world.holder) == ("cancelled", "running", 0)


@pytest.mark.parametrize("prepared", [False, True])
def test_a_suspension_fails(world: MoveWorld, prepared: bool) -> None:
    world.begin("suspend", "file")
    if prepared:
        world.tell(v.Prepared, server=0, ms=1.0)
    assert world.machine.standby is None
    world.tell(v.HandoverFailed, server=0, text="no space left on device")
    assert (world.record().code, world.holder, world.machine.state) == ("source_refused", 0, "running")
    assert world.machine.standby is not None
    assert world.machine.keeper is None


@pytest.mark.parametrize("prepared", [False, True])
def test_the_source_dies_while_it_is_being_suspended(world: MoveWorld, prepared: bool) -> None:
    world.begin("suspend", "host")
    if prepared:
        world.tell(v.Prepared, server=0, ms=1.0)
    world.exit(0, killed=True)
    assert world.record().code == "source_lost"
    world.redo()


def test_a_keeper_that_cannot_be_started_does_not_hold_up_a_suspension(world: MoveWorld) -> None:
    world.begin("suspend", "host")
    world.tell(v.Prepared, server=0, ms=1.0)
    world.alive.discard(world.machine.keeper or 0)
    world.tell(e.SpawnFailed, server=world.machine.keeper, reason="no memory")
    world.stops(0)
    world.tell(v.Suspended, server=0, cut=1, total_bytes=1, at=world.t, ms=1.0)
    world.exit(1, killed=True)
    world.exit(0, killed=True)
    assert world.machine.state == "suspended"
    world.timer("keeper")
    world.tell(e.Hello, server=world.machine.keeper)
    assert world.keeping is not None


def test_a_standby_that_could_not_start_does_not_hold_up_a_suspension(world: MoveWorld) -> None:
    world.exit(1, killed=True)
    world.timer("spawn")
    standby = world.machine.standby
    assert standby is not None
    source = world.begin("suspend", "host")
    assert world.machine.standby is None
    world.tell(v.Prepared, server=source, ms=3.0)
    world.stops(source)
    world.tell(v.Suspended, server=source, cut=1, total_bytes=MIB, at=world.t, ms=1.0)
    world.tell(v.KeeperGone, text="none")
    world.exit(source, killed=True)
    assert world.machine.state == "running"
    assert world.machine.servers[standby] == "dying"
    world.alive.discard(standby)
    world.tell(e.SpawnFailed, server=standby, reason="no memory")
    assert world.machine.state == "suspended"


def test_a_keeper_that_dies_is_replaced(world: MoveWorld) -> None:
    keeper = world.suspend()
    world.exit(keeper, killed=True)
    world.timer("keeper")
    world.tell(e.Hello, server=world.machine.keeper)
    assert world.keeping == world.machine.keeper


@pytest.mark.parametrize("how", ["dies", "no_room", "cancel"])
def test_a_resumption_that_fails_leaves_it_suspended(world: MoveWorld, how: str) -> None:
    keeper = world.suspend("file")
    target = world.begin("resume", "cpu:1", id="r")
    world.tell(e.Hello, server=target)
    world.tell(v.IntentWritten)
    if how == "no_room":
        world.tell(v.TargetFailed, server=target, code="no_room", text="no room")
    elif how == "cancel":
        world.tell(v.CancelRequested, why="asked")
    world.exit(target)
    assert (world.machine.state, world.keeping, world.holder) == ("suspended", keeper, None)
    assert world.record("r").state == ("cancelled" if how == "cancel" else "failed")
    assert world.record("r").location == "file"
    again = world.begin("resume", "cpu:0", id="r2")
    world.tell(e.Hello, server=again)
    world.tell(v.IntentWritten)
    world.resume_program(again)
    assert world.machine.state == "running"


def test_the_program_exits_while_it_is_suspended(world: MoveWorld) -> None:
    world.suspend()
    world.tell(e.ClientExited)
    assert (world.machine.state, world.released) == ("ended", True)


def test_a_source_that_had_handed_over_is_found_by_the_next_daemon() -> None:
    world = MoveWorld()
    world.alive.add(0)
    world.holder = 0
    world.tell(e.Adopted)
    world.holder = None
    world.stopped.add(0)
    world.tell(v.HandedOver, server=0, cut=3, drained=0)
    assert (world.holder, world.machine.state) == (0, "running")


def test_a_keeper_is_found_by_the_next_daemon() -> None:
    world = MoveWorld()
    world.alive.add(0)
    world.tell(e.KeeperAdopted, where="host")
    assert world.machine.state == "suspended"
    target = world.begin("resume", "cpu:1")
    world.tell(e.Hello, server=target)
    world.tell(v.IntentWritten)
    world.resume_program(target)
    assert world.machine.state == "running"


class Moves(RuleBasedStateMachine):
    """Everything at any time. MoveWorld checks what must never happen; at the end everybody behaves."""

    def __init__(self) -> None:
        super().__init__()
        self.world = MoveWorld(Limits(max_attempts=3, move=MoveLimits(max_rounds=4)))
        self.count = 0

    @initialize(how=st.sampled_from(["fresh", "adopted", "keeper"]))
    def start(self, how: str) -> None:
        if how == "fresh":
            self.world.run()
        else:
            self.world.alive.add(0)
            if how == "adopted":
                self.world.holder = 0
                self.world.tell(e.Adopted)
            else:
                self.world.keeping = 0
                self.world.tell(e.KeeperAdopted, where="host")

    def server(self, data: Any) -> int:
        return int(data.draw(st.sampled_from(sorted(self.world.alive | {99}))))

    @rule(kind=st.sampled_from(["move", "suspend", "resume"]))
    def request(self, kind: Any) -> None:
        self.count += 1
        self.world.begin(kind, "host" if kind == "suspend" else "cpu:1", id=str(self.count))

    @rule(data=st.data())
    def proceed(self, data: Any) -> None:
        """What is due comes, so that the later phases are reached."""
        self.step(stop=False)

    def step(self, *, stop: bool) -> bool:
        """One event that is due. False: nothing is."""
        world, machine = self.world, self.world.machine
        move = machine.move
        dying = [n for n, s in machine.servers.items() if s == "dying"]
        if dying and (stop or move is None or move.phase in ("releasing", "rolling_back")):
            world.exit(dying[0], killed=True)
        elif move is not None and move.target is not None and machine.servers[move.target] == "spawning":
            world.tell(e.Hello, server=move.target)
        elif machine.keeper is not None and machine.servers[machine.keeper] == "spawning":
            world.tell(e.Hello, server=machine.keeper)
        elif move is not None and move.phase == "preparing" and move.source is not None:
            if move.kind == "suspend":
                world.tell(v.Prepared, server=move.source, ms=1.0)
            else:
                world.cut(off_device=True)
        elif move is not None and move.phase == "copying" and move.target is not None:
            world.cut(off_device=move.record.path == "host")
            world.round(move.target, len(move.record.iterations) + 1, MIB)
        elif move is not None and move.phase == "committing":
            world.tell(v.IntentWritten)
        elif move is not None and move.source in world.asked:
            self.stopped(move.source)
        elif move is not None and move.phase == "keeping":
            world.tell(v.Kept, server=machine.keeper)
        elif move is not None and move.phase == "taking" and move.target is not None:
            world.resume_program(move.target)
        elif machine.state == "recovering":
            if machine.active is None:
                world.timer("spawn")
            elif machine.servers[machine.active] == "spawning":
                world.tell(e.Hello, server=machine.active)
            else:
                world.redo()
        else:
            return False
        return True

    def stopped(self, source: int) -> None:
        world = self.world
        assert world.machine.move is not None
        suspends = world.machine.move.kind == "suspend"
        world.stops(source)
        if suspends:
            world.tell(v.Suspended, server=source, cut=1, total_bytes=1, at=world.t, ms=1.0)
        else:
            world.tell(v.HandedOver, server=source, cut=1, drained=world.t)

    @rule(data=st.data())
    def hello(self, data: Any) -> None:
        self.world.tell(e.Hello, server=self.server(data))

    @rule(data=st.data(), number=st.integers(0, 3), copied=st.integers(0, 500))
    def round_ends(self, data: Any, number: int, copied: int) -> None:
        server = self.server(data)
        self.world.tell(v.RoundProgress, server=server, number=number, copied_bytes=1)
        self.world.round(server, number, copied * MIB, ms=1.0)

    @rule(data=st.data(), name=st.sampled_from(["mapped", "restored", "redone"]))
    def phase(self, data: Any, name: str) -> None:
        self.world.tell(e.PhaseReached, server=self.server(data), name=name, at=self.world.t)

    @precondition(lambda self: self.world.asked & self.world.alive)
    @rule()
    def refuse(self) -> None:
        source = min(self.world.asked & self.world.alive)
        self.world.asked.discard(source)
        self.world.tell(v.HandoverFailed, server=source, text="no room")

    @rule(data=st.data(), code=st.sampled_from(["no_room", "no_peer"]))
    def target_says_no(self, data: Any, code: str) -> None:
        self.world.tell(v.TargetFailed, server=self.server(data), code=code, text="")

    @precondition(lambda self: self.world.machine.move is not None)
    @rule()
    def out_of_reach(self) -> None:
        """The target that there is, so that both ways through the host are tried often."""
        move = self.world.machine.move
        assert move is not None
        if move.target is not None:
            self.world.tell(v.TargetFailed, server=move.target, code="no_peer", text="")

    @precondition(lambda self: self.world.machine.active is not None)
    @rule(off_device=st.booleans())
    def cut(self, off_device: bool) -> None:
        self.world.cut(off_device=off_device)

    @rule(data=st.data())
    def cut_stands(self, data: Any) -> None:
        self.world.tell(v.CutStands, server=self.server(data), number=1)

    @rule()
    def intent_fails(self) -> None:
        self.world.tell(v.IntentFailed, reason="full")

    @rule()
    def cancel(self) -> None:
        self.world.tell(v.CancelRequested, why="asked")

    @rule(data=st.data(), sequence=st.integers(0, 3))
    def fault(self, data: Any, sequence: int) -> None:
        server = self.server(data)
        self.world.tell(e.Faulted, server=server, sequence=sequence, op="", error=700, text="", at=self.world.t)

    @rule(data=st.data())
    def misbehave(self, data: Any) -> None:
        self.world.tell(e.Misbehaved, server=self.server(data), reason="it does")

    @precondition(lambda self: self.world.alive)
    @rule(data=st.data(), killed=st.booleans())
    def die(self, data: Any, killed: bool) -> None:
        self.world.exit(int(data.draw(st.sampled_from(sorted(self.world.alive)))), killed=killed)

    @precondition(lambda self: self.unborn())
    @rule(data=st.data())
    def spawn_fails(self, data: Any) -> None:
        server = int(data.draw(st.sampled_from(self.unborn())))
        self.world.alive.discard(server)
        self.world.tell(e.SpawnFailed, server=server, reason="no memory")

    def unborn(self) -> list[int]:
        return [n for n, state in self.world.machine.servers.items() if state == "spawning"]

    @precondition(lambda self: self.world.timers)
    @rule(data=st.data())
    def timer(self, data: Any) -> None:
        self.world.timer(str(data.draw(st.sampled_from(sorted(self.world.timers)))))

    @precondition(lambda self: self.count > 2)
    @rule()
    def program_exits(self) -> None:
        self.world.tell(e.ClientExited)

    @invariant()
    def servers_are_known(self) -> None:
        machine = self.world.machine
        assert set(machine.servers) <= self.world.alive or machine.state == "ended"
        assert (machine.move is None) == ("move" not in self.world.timers)

    def teardown(self) -> None:
        """From wherever it is: if everybody behaves, each move ends, and the program has one server or is suspended."""
        world = self.world
        for _ in range(300):
            if world.machine.state in ("lost", "ended", "losing") or not self.step(stop=True):
                break
        machine = world.machine
        assert machine.move is None
        assert all(record.state != "running" for record in world.records.values())
        if machine.state == "running":
            assert world.holder == machine.active
        elif machine.state == "suspended":
            assert world.holder is None
            assert not world.stopped
        if machine.state == "losing":
            return
        if machine.state != "ended":
            world.tell(e.ClientExited)
            if machine.state == "draining":
                world.timer("drain")
        assert machine.state == "ended"
        assert not world.timers
        killed = {i.server for i in world.others if isinstance(i, e.Kill)}
        assert world.alive <= killed, "a server would be left behind"


TestMoves = Moves.TestCase
TestMoves.settings = settings(max_examples=300, stateful_step_count=50, deadline=None)
