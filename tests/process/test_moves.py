"""Moves in the machine of a process: single stories."""

from __future__ import annotations

import pytest

from xmigd.process import events as e
from xmigd.process import migration_events as v
from xmigd.process.limits import MoveLimits

from .move_world import MIB, MoveWorld


def kinds(world: MoveWorld) -> list[str]:
    return [type(i).__name__ for i in world.others]


def test_a_move(world: MoveWorld) -> None:
    target = world.begin()
    assert world.devices[target] == "cpu:1"
    world.warm(target)
    assert v.AskRound(target, 1, 1) in world.others
    world.round(target, 1, 100 * MIB)  # 98 ms at 1 GiB/s, and the snapshot: within the budget at once
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
        "preparing", "copying", "committing", "handing_over", "taking", "mapped", "restored", "replayed", "resumed",
        "over",
    ]  # fmt: skip
    assert record.downtime_ms is not None
    # The old standby is on the wrong device.
    assert world.machine.standby is not None
    assert world.devices[world.machine.standby] == "cpu:1"
    world.exit(0, killed=True)
    world.exit(1, killed=True)
    assert not world.recoveries


def test_the_next_standby_waits_until_the_target_has_made_its_communicators(world: MoveWorld) -> None:
    """It may have begun before it had the process."""
    target = world.begin()
    world.warm(target)
    world.round(target, 1, 100 * MIB)
    world.tell(v.IntentWritten)
    world.hand_over()
    world.tell(e.Joining, server=target, joining=True)
    world.resume_program(target)
    assert (world.machine.active, world.machine.standby) == (target, None)
    assert "join" in world.timers
    world.tell(e.Joining, server=target, joining=False)
    assert world.machine.standby is not None


def test_its_devices_are_opened_for_a_move() -> None:
    world = MoveWorld()
    world.run_unopened()
    target = world.begin()
    world.tell(e.Opened, server=0)
    assert world.machine.standby is None  # whether there is to be one, its end says
    world.tell(v.CancelRequested, why="requested")
    world.exit(target, killed=True)
    assert world.machine.standby is not None


def rounds(world: MoveWorld, target: int, copied: tuple[int, ...], loading_ms: float = 0.0) -> None:
    """Of so many MiB each, with a snapshot before the next; none after the last."""
    for number, mib in enumerate(copied, 1):
        world.round(target, number, mib * MIB, total=8000 * MIB, loading_ms=loading_ms)
        if number < len(copied):
            world.snapshot()


def test_rounds_go_on_until_the_rest_fits(world: MoveWorld) -> None:
    target = world.begin()
    world.warm(target)
    for number, copied in enumerate((8000, 4000, 1000), 1):
        world.round(target, number, copied * MIB, total=8000 * MIB)
        assert world.machine.move is not None
        assert world.machine.move.phase == "copying"
        world.snapshot()
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
    rounds(world, target, (8000, 4000, 3900))
    assert world.machine.move is not None
    assert world.machine.move.phase == "committing"


def test_a_program_that_is_loading_code_is_not_stopped_for_it(world: MoveWorld) -> None:
    target = world.begin()
    world.warm(target)
    for number, loading_ms in enumerate((150.0, 60.0, 20.0), 1):
        world.round(target, number, 10 * MIB, loading_ms=loading_ms)
        assert world.machine.move is not None
        assert world.machine.move.phase == "copying"
        world.snapshot()
    world.round(target, 4, 10 * MIB, loading_ms=2.0)
    assert world.machine.move is not None
    assert world.machine.move.phase == "committing"
    record = world.machine.move.record
    assert [i.loading_ms for i in record.iterations] == [150.0, 60.0, 20.0, 2.0]
    assert record.expected_downtime_ms == pytest.approx(10 / 1024 * 1e3 + 2 + 1, rel=0.01)


def test_a_program_that_loads_code_all_the_time_is_moved_all_the_same(world: MoveWorld) -> None:
    target = world.begin()
    world.warm(target)
    rounds(world, target, (10, 10, 10), loading_ms=60.0)
    assert world.machine.move is not None
    assert world.machine.move.phase == "committing"


def test_code_that_would_take_too_long_to_load_is_downtime(world: MoveWorld) -> None:
    target = world.begin(max_downtime_ms=50)
    world.warm(target)
    rounds(world, target, (10, 10, 10), loading_ms=60.0)
    assert (world.record().state, world.record().code, world.record().location) == ("failed", "downtime", "device")


def test_more_downtime_than_allowed_is_given_up(world: MoveWorld) -> None:
    target = world.begin(max_downtime_ms=50)
    world.warm(target)
    rounds(world, target, (8000, 4000, 3900))
    assert (world.record().state, world.record().code, world.record().location) == ("failed", "downtime", "device")
    assert world.holder == 0


def test_snapshots_that_nobody_requested_for_begin_no_round(world: MoveWorld) -> None:
    target = world.begin()
    world.warm(target)
    world.snapshot()
    assert kinds(world).count("AskRound") == 1


def test_an_idle_source_takes_no_snapshot(world: MoveWorld) -> None:
    world.snapshot()
    target = world.begin()
    world.tell(e.Hello, server=target)
    assert "AskRound" not in kinds(world)
    world.timer("move")
    assert v.AskRound(target, 1, 1) in world.others
    world.snapshot()  # late
    assert kinds(world).count("AskRound") == 1


def test_an_idle_source_says_so(world: MoveWorld) -> None:
    world.snapshot()
    target = world.begin()
    world.tell(e.Hello, server=target)
    world.tell(v.SnapshotStands, server=target, number=7)  # it is not its to say
    assert "AskRound" not in kinds(world)
    world.tell(v.SnapshotStands, server=0, number=1)
    assert v.AskRound(target, 1, 1) in world.others


@pytest.mark.parametrize("first", ["target", "shadow"])
def test_a_target_without_a_way_to_the_source_goes_through_the_host(world: MoveWorld, first: str) -> None:
    target = world.no_peer()
    assert e.AskSnapshot(0, host=True) in world.others
    assert (world.record().path, world.record().phase) == ("host", "preparing")
    world.snapshot()  # one that still lies on the device
    if first == "target":
        world.tell(e.Hello, server=target)
        assert v.GiveTarget(target, "move") not in world.others
        world.snapshot(off_device=True)
    else:
        world.snapshot(off_device=True)
        world.tell(e.Hello, server=target)
    assert v.GiveTarget(target, "move") in world.others
    world.snapshot(off_device=True)
    world.round(target, 1, MIB)
    world.tell(v.IntentWritten)
    world.hand_over()
    world.resume_program(target)
    record = world.record()
    assert (record.state, record.path, record.code, world.device) == ("done", "host", None, "cpu:1")
    assert e.AskSnapshot(0, host=False) not in world.others
    world.exit(0, killed=True)


@pytest.mark.parametrize("phase", ["committing", "handing_over", "taking"])
def test_a_target_that_finds_out_late(world: MoveWorld, phase: str) -> None:
    """A young program has its first shadow with the last snapshot."""
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
    world.snapshot(off_device=True)
    world.snapshot(off_device=True)
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
        world.tell(v.CancelRequested, why="requested")
    else:
        world.tell(e.ClientExited)
    world.hand_over()
    assert world.record().code == ("cancelled" if how == "cancel" else "program_exited")
    assert (world.record().path, world.holder) == ("peer", 0)


def test_a_source_that_does_not_answer_a_cancel_is_killed_in_time(world: MoveWorld) -> None:
    target = world.to_handover()
    world.tell(v.CancelRequested, why="requested")
    assert world.timers["move"] == MoveLimits().handover_timeout
    world.exit(target, killed=True)
    world.timer("move")
    assert any(isinstance(i, e.Kill) and i.server == 0 for i in world.others)
    world.exit(0, killed=True)
    assert (world.record().state, world.record().location) == ("cancelled", "device")
    world.replay()
    assert world.device == "cpu:0"


@pytest.mark.parametrize("moment", ["before", "after", "over"])
def test_a_rank_that_has_handed_over_does_not_go_on_alone(world: MoveWorld, moment: str) -> None:
    """The move is cancelled: before the daemon hears that its source has handed over, after that, or before it hears
    that it has not, and then that it has. The other ranks have gone on with the target."""
    world.tell(e.Grouped, on=True)
    world.to_handover()
    if moment == "after":
        world.hand_over()
    world.tell(v.CancelRequested, why="requested")
    if moment == "over":
        world.tell(v.HandoverFailed, server=0, text="requested")
    if moment != "after":
        world.hand_over()
    for server in [one for one in (2, 1, 0) if one in world.alive]:
        if world.machine.servers.get(server) == "dying":
            world.exit(server, killed=True)
    assert not any(isinstance(one, v.GoOn) for one in world.others)
    assert any(isinstance(one, e.GroupBroken) for one in world.others)
    assert (world.machine.state, world.record().state) == ("recovering", "cancelled")


@pytest.mark.parametrize("how", ["again", "no_room", "cancel", "target", "timeout"])
def test_a_detour_that_fails_brings_the_shadow_back(world: MoveWorld, how: str) -> None:
    target = world.no_peer()
    if how == "again":
        world.tell(e.Hello, server=target)
        world.snapshot(off_device=True)
        world.tell(v.TargetFailed, server=target, code="no_peer", text="still")
    elif how == "no_room":
        world.tell(v.HandoverFailed, server=0, text="host memory has no room")
        assert "out of reach" in (world.record().error or "")
    elif how == "cancel":
        world.tell(v.CancelRequested, why="requested")
    elif how == "target":
        world.exit(target, killed=True)
    else:
        world.timer("move")
    codes = {"again": "no_peer", "no_room": "no_peer", "cancel": "cancelled", "target": "target_lost"}
    assert world.record().code == codes.get(how, "timeout")
    assert e.AskSnapshot(0, host=False) in world.others
    assert (world.machine.state, world.holder, world.record().location) == ("running", 0, "device")
    if target in world.alive:
        world.exit(target, killed=True)


def test_a_source_that_dies_in_a_detour_is_recovered(world: MoveWorld) -> None:
    target = world.no_peer()
    world.exit(0, killed=True)
    assert world.record().code == "source_lost"
    world.exit(target, killed=True)
    world.replay()


def test_faults_of_imports_are_given_to_the_target(world: MoveWorld) -> None:
    injection = e.Injection(9, "import", "fault", 0, 217)
    world.tell(e.InjectRequested, injection=injection)
    target = world.begin()
    world.warm(target)
    assert v.GiveTarget(target, "move", (injection,)) in world.others
    world.tell(e.InjectionFires, server=target, id=9)
    world.tell(v.TargetFailed, server=target, code="no_peer", text="injected")
    assert world.machine.move is not None
    second = world.machine.move.target
    world.tell(e.Hello, server=second)
    world.snapshot(off_device=True)
    assert v.GiveTarget(second or 0, "move") in world.others


def test_the_next_daemon_ends_a_detour() -> None:
    world = MoveWorld()
    world.alive.add(0)
    world.holder = 0
    world.tell(e.Adopted, detour=True)
    assert e.AskSnapshot(0, host=False) in world.others


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
        world.tell(v.CancelRequested, why="requested")
    else:
        world.timer("move")
    if phase == "handing_over" and how == "timeout":
        world.exit(0, killed=True)  # it does not say whether it has stopped: it is recovered
        world.replay()
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
    world.replay()
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
    world.replay()
    assert (world.device, world.machine.state) == ("cpu:0", "running")


def test_a_target_that_resumed_the_program_before_it_was_killed_has_it(world: MoveWorld) -> None:
    """The program has its answers already: going on with the source would be a second life."""
    target = world.to_handover()
    world.hand_over()
    world.tell(v.CancelRequested, why="requested")
    world.resume_program(target)
    assert (world.record().state, world.device) == ("done", "cpu:1")
    world.exit(target, killed=True)
    world.replay()
    assert world.device == "cpu:1"


def test_a_target_dies_after_it_has_resumed(world: MoveWorld) -> None:
    target = world.to_handover()
    world.hand_over()
    world.resume_program(target)
    world.exit(target, killed=True)
    world.replay()
    assert world.devices[world.machine.active or 0] == "cpu:1"


def test_the_intent_cannot_be_written(world: MoveWorld) -> None:
    target = world.begin()
    world.warm(target)
    world.round(target, 1, MIB)
    world.tell(v.IntentFailed, reason="the disk is full")
    assert (world.record().code, world.holder) == ("not_recorded", 0)


def test_the_source_refuses_to_hand_over(world: MoveWorld) -> None:
    world.to_handover()
    world.tell(v.HandoverFailed, server=0, text="no room for a snapshot")
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


def test_a_source_that_had_handed_over_is_found_by_the_next_daemon() -> None:
    world = MoveWorld()
    world.alive.add(0)
    world.holder = 0
    world.tell(e.Adopted)
    world.holder = None
    world.stopped.add(0)
    world.tell(v.HandedOver, server=0, snapshot=3, drained=0)
    assert (world.holder, world.machine.state) == (0, "running")
