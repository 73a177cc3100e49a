"""Suspensions and resumptions in the machine of a process: single stories."""

from __future__ import annotations

import pytest

from xmigd.process import events as e
from xmigd.process import migration_events as v

from .move_world import MIB, MoveWorld


def test_suspend_and_resume(world: MoveWorld) -> None:
    holder = world.suspend()
    assert (world.machine.state, world.machine.where, world.keeping) == ("suspended", "host", holder)
    assert (world.record("s").state, world.record("s").location) == ("done", "host")
    assert world.alive == {holder}
    target = world.begin("resume", "cpu:1", id="r")
    world.tell(e.Hello, server=target)
    world.tell(v.IntentWritten)
    # The rest was there before.
    copied = {"total_bytes": 8 * MIB, "copied_bytes": 2 * MIB, "differing_bytes": 0, "ms": 1.0, "loading_ms": 0.0}
    world.tell(v.RoundDone, server=target, number=0, **copied)
    world.resume_program(target)
    assert (world.machine.state, world.machine.active, world.device) == ("running", target, "cpu:1")
    record = world.record("r")
    assert (record.location, record.total_bytes, record.processed_bytes) == ("device", 8 * MIB, 2 * MIB)
    world.exit(holder, killed=True)
    assert world.machine.standby is not None


def test_a_suspension_is_given_up_while_it_is_prepared(world: MoveWorld) -> None:
    world.begin("suspend", "host")
    holder = world.machine.holder
    assert holder in world.alive
    world.tell(v.CancelRequested, why="requested")
    assert v.AbortSuspend(0) in world.others
    assert (world.record().state, world.machine.state, world.holder) == ("cancelled", "running", 0)
    assert (world.machine.holder, world.machine.servers[holder or 0]) == (None, "dying")


def test_a_holder_that_dies_while_a_suspension_is_prepared_is_replaced(world: MoveWorld) -> None:
    world.begin("suspend", "host")
    first = world.machine.holder
    assert first is not None
    world.tell(e.Hello, server=first)
    world.exit(first, killed=True)
    world.tell(v.Prepared, server=0, ms=1.0)
    assert world.machine.holder not in (None, first)


@pytest.mark.parametrize("prepared", [False, True])
def test_a_suspension_fails(world: MoveWorld, prepared: bool) -> None:
    world.begin("suspend", "file")
    if prepared:
        world.tell(v.Prepared, server=0, ms=1.0)
    assert world.machine.standby is None
    world.tell(v.HandoverFailed, server=0, text="no space left on device")
    assert (world.record().code, world.holder, world.machine.state) == ("source_refused", 0, "running")
    assert world.machine.standby is not None
    assert world.machine.holder is None


@pytest.mark.parametrize("prepared", [False, True])
def test_the_source_dies_while_it_is_being_suspended(world: MoveWorld, prepared: bool) -> None:
    world.begin("suspend", "host")
    if prepared:
        world.tell(v.Prepared, server=0, ms=1.0)
    world.exit(0, killed=True)
    assert world.record().code == "source_lost"
    world.replay()


def test_a_holder_that_cannot_be_started_does_not_hold_up_a_suspension(world: MoveWorld) -> None:
    world.begin("suspend", "host")
    world.tell(v.Prepared, server=0, ms=1.0)
    world.alive.discard(world.machine.holder or 0)
    world.tell(e.SpawnFailed, server=world.machine.holder, reason="no memory")
    world.stops(0)
    world.tell(v.Suspended, server=0, snapshot=1, total_bytes=1, at=world.t, ms=1.0)
    world.exit(1, killed=True)
    world.exit(0, killed=True)
    assert world.machine.state == "suspended"
    world.timer("holder")
    world.tell(e.Hello, server=world.machine.holder)
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
    world.tell(v.Suspended, server=source, snapshot=1, total_bytes=MIB, at=world.t, ms=1.0)
    world.tell(v.HolderGone, text="none")
    world.exit(source, killed=True)
    assert world.machine.state == "running"
    assert world.machine.servers[standby] == "dying"
    world.alive.discard(standby)
    world.tell(e.SpawnFailed, server=standby, reason="no memory")
    assert world.machine.state == "suspended"


def test_a_holder_that_dies_is_replaced(world: MoveWorld) -> None:
    holder = world.suspend()
    world.exit(holder, killed=True)
    world.timer("holder")
    world.tell(e.Hello, server=world.machine.holder)
    assert world.keeping == world.machine.holder


@pytest.mark.parametrize("how", ["dies", "no_room", "cancel"])
def test_a_resumption_that_fails_leaves_it_suspended(world: MoveWorld, how: str) -> None:
    holder = world.suspend("file")
    target = world.begin("resume", "cpu:1", id="r")
    world.tell(e.Hello, server=target)
    world.tell(v.IntentWritten)
    if how == "no_room":
        world.tell(v.TargetFailed, server=target, code="no_room", text="no room")
    elif how == "cancel":
        world.tell(v.CancelRequested, why="requested")
    world.exit(target)
    assert (world.machine.state, world.keeping, world.holder) == ("suspended", holder, None)
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


def test_a_holder_is_found_by_the_next_daemon() -> None:
    world = MoveWorld()
    world.alive.add(0)
    world.tell(e.HolderAdopted, where="host")
    assert world.machine.state == "suspended"
    target = world.begin("resume", "cpu:1")
    world.tell(e.Hello, server=target)
    world.tell(v.IntentWritten)
    world.resume_program(target)
    assert world.machine.state == "running"
