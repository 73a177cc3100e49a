"""The recovery machine: single stories, then anything at all (Hypothesis)."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from xmigd.process import events as e
from xmigd.process.limits import Limits

from .world import AtAnyTime, World


def test_a_start() -> None:
    world = World()
    world.run()
    assert world.assigns == [e.Assign(0, "fresh")]
    assert e.Admit() in world.others
    assert world.alive == {0, 1}


def spawned(instructions: list[e.Instruction]) -> list[e.Spawn]:
    return [each for each in instructions if isinstance(each, e.Spawn)]


def test_a_program_that_does_not_need_its_devices_has_no_standby() -> None:
    world = World()
    assert spawned(world.tell(e.ClientArrived)) == [e.Spawn(0, late=True)]
    world.tell(e.Hello, server=0)
    assert spawned(world.tell(e.Ready, server=0, opened=False)) == []
    assert (world.machine.state, world.alive) == ("running", {0})
    assert spawned(world.tell(e.Opened, server=0)) == []
    assert spawned(world.tell(e.Opened, server=0)) == []
    assert spawned(world.tell(e.TimerFired, name="settle")) == [e.Spawn(1)]
    assert spawned(world.tell(e.Opened, server=0)) == []  # one is enough


def test_a_standby_waits_until_communicators_are_made() -> None:
    """At most as long as `Limits` has it: then the process is not left without one."""
    world = World()
    world.run_unopened()
    world.tell(e.Opened, server=0)
    assert world.timers["settle"] == world.machine.limits.settle
    assert spawned(world.tell(e.Joining, server=0, joining=True)) == []
    assert "settle" not in world.timers
    assert world.timers["join"] == world.machine.limits.join_patience
    assert spawned(world.tell(e.Joining, server=0, joining=False)) == [e.Spawn(1)]
    assert not world.timers.keys() & {"settle", "join"}
    world.tell(e.Hello, server=1)
    assert spawned(world.tell(e.Joining, server=0, joining=True)) == []  # what is there stays
    assert world.machine.standby == 1
    world.exit(0, killed=True)
    world.replay()
    assert world.machine.standby == 2  # the lost server does not make anything any more

    world.tell(e.Joining, server=1, joining=True)
    world.exit(2, killed=True)
    world.tell(e.TimerFired, name="spawn")
    assert world.machine.standby is None
    assert spawned(world.tell(e.TimerFired, name="join")) == [e.Spawn(3)]  # whatever its server does


def test_a_server_that_is_lost_while_it_joins_is_replaced_at_once() -> None:
    world = World()
    world.run_unopened()
    world.tell(e.Opened, server=0)
    world.tell(e.Joining, server=0, joining=True)
    world.exit(0, killed=True)
    assert world.alive == {1}
    assert "join" not in world.timers
    world.tell(e.Hello, server=1)
    world.tell(e.Joining, server=1, joining=True)  # again, while it is recovered
    world.replay()
    assert (world.alive, world.machine.state) == ({1}, "running")
    assert spawned(world.tell(e.Joining, server=1, joining=False)) == [e.Spawn(2)]


def test_a_standby_waits_for_communicators_of_a_server_of_before() -> None:
    """Of an earlier daemon."""
    world = World()
    assert spawned(world.tell(e.Adopted, joining=True)) == []
    assert "join" in world.timers
    assert spawned(world.tell(e.Joining, server=0, joining=False)) == [e.Spawn(1)]
    assert spawned(World().tell(e.Adopted)) == [e.Spawn(1)]


def test_a_device_is_lost() -> None:
    """Both servers are ended, and the program is not to blame, however often it happens."""
    world = World()
    world.run()
    for count in range(1, 12):
        active, standby = world.machine.active, world.machine.standby
        out = world.tell(e.DeviceLost, reason="it fell off the bus")
        assert {one.server for one in out if isinstance(one, e.Kill)} == {active, standby}
        for server in (standby, active):
            assert server is not None
            world.exit(server, killed=True)
        world.replay()
        assert (world.recoveries[count].outcome, world.recoveries[count].cause) == ("resumed", "it fell off the bus")


def test_a_device_is_lost_before_its_server_has_the_process() -> None:
    world = World()
    world.run()
    world.tell(e.DeviceLost, reason="it fell off the bus")
    world.exit(1, killed=True)
    world.exit(0, killed=True)
    server = world.next_server()
    assert e.Kill(server, "so did this one") in world.tell(e.DeviceLost, reason="so did this one")
    world.exit(server, killed=True)
    world.replay()
    assert world.recoveries[1].outcome == "resumed"


def test_its_server_is_replaced_by_one_that_opens_as_late() -> None:
    world = World()
    world.run_unopened()
    world.exit(0, killed=True)
    assert (world.machine.state, world.machine.opened, world.alive) == ("recovering", False, {1})
    assert spawned(world.tell(e.Opened, server=0)) == []  # of one that is gone
    world.replay()
    assert world.assigns[-1] == e.Assign(1, "recover")
    assert (world.recoveries[1].outcome, world.recoveries[1].standby) == ("resumed", "spawned")
    assert world.alive == {1}
    world.tell(e.Opened, server=1)
    assert spawned(world.tell(e.TimerFired, name="settle")) == [e.Spawn(2)]


def test_it_opens_while_it_is_recovered() -> None:
    world = World()
    world.run_unopened()
    world.exit(0, killed=True)
    world.tell(e.Hello, server=1)
    assert spawned(world.tell(e.Opened, server=1)) == []
    world.replay()
    assert world.machine.standby is not None


def test_who_is_to_say_that_it_is_lost_needs_no_device() -> None:
    world = World()
    world.run()
    world.exit(1, killed=True)
    world.tell(e.HandleMissed, reason="no descriptors")
    world.tell(e.Exited, server=0, status="killed by SIGKILL")
    assert world.machine.state == "losing"
    assert world.machine.active is None  # the standby's successor waits
    assert spawned(world.tell(e.TimerFired, name="spawn")) == [e.Spawn(2, late=True)]


@pytest.mark.parametrize("opened", [False, True])
def test_after_another_daemon(opened: bool) -> None:
    for event in (e.Adopted(t=1, opened=opened), e.Orphaned(t=1, reason="", opened=opened)):
        world = World()
        out = world.machine.handle(event)
        adopted = isinstance(event, e.Adopted)
        late = not adopted and not opened
        assert spawned(out) == ([e.Spawn(1 if adopted else 0, late=late)] if opened or not adopted else [])


def test_a_lost_server_is_replaced_by_the_warm_standby_at_once() -> None:
    world = World()
    world.run()
    world.exit(0)
    assert world.assigns[-1] == e.Assign(1, "recover")
    world.replay()
    record = world.recoveries[1]
    assert (record.outcome, record.standby, record.attempts, record.records) == ("resumed", "warm", 1, 10)
    assert 2 in world.alive  # the next standby


def test_a_standby_prepares_while_the_lost_server_ends() -> None:
    world = World()
    world.run()
    reported = world.tell(e.Ending, server=0)
    assert reported == [e.Prepare(1)]
    assert (world.machine.state, world.holder) == ("running", 0)
    world.exit(0, killed=True)
    assert world.holder == 1
    assert world.assigns[-1] == e.Assign(1, "recover")
    world.replay()
    record = world.recoveries[1]
    assert (record.outcome, record.standby, record.attempts) == ("resumed", "warm", 1)
    assert world.tell(e.Ending, server=1) == []  # its standby is not there yet
    world.exit(1)
    assert world.assigns[-1].server == 1


def test_a_standby_that_prepares_is_reported_of_the_fault() -> None:
    world = World()
    world.run()
    armed = e.Injection(3, "record", "kill", 9, 719)
    world.tell(e.InjectRequested, injection=armed)
    world.tell(e.Faulted, server=0, sequence=0, op="x", error=700, text="", at=world.t, after=4, until=8)
    assert world.tell(e.Ending, server=0) == [e.Prepare(1, None, e.Careful(4, 8), (armed,))]
    late = e.Injection(4, "record", "kill", 10, 719)
    world.tell(e.InjectRequested, injection=late)
    world.exit(0)
    assert (world.others[-1], world.holder) == (e.Arm(1, late), 1)


def test_what_was_prepared_in_vain_goes() -> None:
    world = World()
    world.run()
    world.tell(e.GarbageFound, server=0, position=0, text="")
    assert world.tell(e.Ending, server=0) == []  # nothing to recover
    world = World()
    world.run()
    world.tell(e.Ending, server=0)
    world.tell(e.HandleMissed, reason="no descriptors")
    world.exit(0)
    assert e.Kill(1, "its process needs no standby any more") in world.others
    assert (world.machine.state, world.machine.active) == ("losing", 2)


def test_a_program_that_exits_while_a_standby_prepares() -> None:
    world = World()
    world.run()
    world.tell(e.Ending, server=0)
    world.tell(e.ClientExited)
    world.exit(0)
    assert world.machine.state == "ended"
    assert world.holder is None


def test_a_standby_that_dies_while_it_prepares() -> None:
    world = World()
    world.run()
    world.tell(e.Ending, server=0)
    world.exit(1)
    world.exit(0, killed=True)
    server = world.next_server()
    world.tell(e.Hello, server=server)
    assert world.assigns[-1] == e.Assign(server, "recover")
    world.replay()


def test_a_recovery_keeps_what_was_expected_at_its_first_fault() -> None:
    world = World()
    world.run()
    world.exit(0, killed=True, expected=180_000_000)
    world.replay()
    assert world.recoveries[1].expected == 180_000_000
    world.tell(e.Hello, server=2)
    world.tell(e.Faulted, server=1, sequence=5, op="x", error=700, text="", at=world.t, expected=90_000_000)
    world.exit(1, expected=999_000_000)  # after the fault: it says nothing
    world.exit(2, killed=True)  # in the recovery
    world.tell(e.Hello, server=3)
    world.replay()
    assert world.recoveries[2].expected == 90_000_000
    assert world.recoveries[2].attempts == 2


def test_the_standby_is_still_warming() -> None:
    world = World()
    world.tell(e.ClientArrived)
    world.tell(e.Hello, server=0)
    world.tell(e.Ready, server=0)
    world.exit(0)
    assert len(world.assigns) == 1
    world.tell(e.Hello, server=1)
    assert world.assigns[-1] == e.Assign(1, "recover")
    world.replay()
    assert world.recoveries[1].standby == "warming"


def test_the_process_is_not_given_away_before_the_exit_was_seen() -> None:
    world = World()
    world.run()
    world.tell(e.Faulted, server=0, sequence=5, op="x", error=700, text="", at=world.t)
    assert len(world.assigns) == 1
    world.exit(0)
    assert world.assigns[-1].server == 1


def test_a_fault_that_comes_back_at_the_same_record_is_delivered() -> None:
    world = World()
    world.run()
    world.fault(50)
    assert world.assigns[-1].deliver is None
    world.fault(50)
    world.tell(e.Hello, server=world.machine.active)
    assert world.assigns[-1].deliver == e.Deliver(50, 700)
    world.replay(60)
    # It comes back in every later replay, and is delivered at once, until a snapshot has passed it.
    world.exit(world.machine.active or 0)
    world.tell(e.Hello, server=world.machine.active)
    assert world.assigns[-1].deliver == e.Deliver(50, 700)
    world.replay(70)
    world.tell(e.SnapshotCommitted, server=world.machine.active, number=1, sequence=90)
    world.exit(world.machine.active or 0)
    world.tell(e.Hello, server=world.machine.active)
    assert world.assigns[-1].deliver is None


def test_different_faults_are_not_the_same_fault() -> None:
    world = World()
    world.run()
    world.fault(50)
    world.fault(51)
    world.fault(51, error=719)
    assert all(assign.deliver is None for assign in world.assigns)


@pytest.mark.parametrize("records", [40, 100])
def test_a_fault_that_injections_again_after_the_replay(records: int) -> None:
    """Wherever the replay ended: the work of a record may go on long after the record was taken."""
    world = World()
    world.run()
    world.fault(50)
    world.replay(records)
    world.fault(50)
    world.tell(e.Hello, server=world.machine.active)
    assert world.assigns[-1].deliver == e.Deliver(50, 700)


def test_a_fault_of_an_unknown_record_is_looked_for_in_the_replay() -> None:
    world = World()
    world.run()
    world.fault(0, after=30, until=80)
    assert (world.assigns[-1].careful, world.assigns[-1].deliver) == (e.Careful(30, 80), None)
    world.fault(50)
    world.tell(e.Hello, server=world.machine.active)
    assert (world.assigns[-1].careful, world.assigns[-1].deliver) == (None, e.Deliver(50, 700))


@pytest.mark.parametrize(("sequence", "error"), [(30, 700), (81, 700), (50, 719)])
def test_another_fault_than_the_one_looked_for(sequence: int, error: int) -> None:
    world = World()
    world.run()
    world.fault(0, after=30, until=80)
    world.fault(sequence, error)
    world.tell(e.Hello, server=world.machine.active)
    assert world.assigns[-1].deliver is None
    world.fault(sequence, error)
    world.tell(e.Hello, server=world.machine.active)
    assert world.assigns[-1].deliver == e.Deliver(sequence, error)


def test_where_it_was_not_met_it_is_looked_for_everywhere() -> None:
    world = World()
    world.run()
    world.fault(0, after=30, until=80)
    world.fault(0, after=20, until=90)
    world.tell(e.Hello, server=world.machine.active)
    assert world.assigns[-1].careful == e.Careful(0, 90)
    world.fault(10)
    world.tell(e.Hello, server=world.machine.active)
    assert world.assigns[-1].deliver == e.Deliver(10, 700)


def test_a_snapshot_behind_it_or_a_later_fault_ends_the_search() -> None:
    world = World()
    world.run()
    world.fault(0, after=30, until=80)
    world.replay()
    world.fault(0, after=80, until=120)
    world.tell(e.Hello, server=world.machine.active)
    assert world.assigns[-1].careful == e.Careful(80, 120)
    world.replay()
    world.tell(e.SnapshotCommitted, server=world.machine.active, number=1, sequence=121)
    world.exit(world.machine.active or 0)
    world.tell(e.Hello, server=world.machine.active)
    assert world.assigns[-1].careful is None


def test_an_exit_that_takes_long_is_counted_from_its_first_sign() -> None:
    world = World()
    world.run()
    first_sign = world.t + 500
    world.alive.discard(0)
    world.holder = None
    world.t += 10_000
    world.tell(e.Exited, server=0, status="killed by SIGKILL", killed=True, since=first_sign)
    exited = world.t
    world.replay()
    assert (world.recoveries[1].occurred, world.recoveries[1].detected) == (first_sign, exited)


def test_an_injected_fault_is_not_the_programs_and_injections_once() -> None:
    world = World()
    world.run()
    injection = e.Injection(9, "kernel", "fault", 50, 700)
    world.tell(e.InjectRequested, injection=injection)
    assert e.Arm(0, injection) in world.others
    for _ in range(10):
        world.tell(e.InjectionFires, server=world.machine.active, id=9)
        world.fault(50)
        assert world.assigns[-1].deliver is None
        assert not world.assigns[-1].injections
        world.replay()
        world.tell(e.Hello, server=world.machine.standby)
        world.tell(e.InjectRequested, injection=injection)
    assert {fault.kind for fault in world.faults} == {"injected"}


def test_an_injection_that_has_not_injected_goes_to_the_next_server() -> None:
    world = World()
    world.run()
    injection = e.Injection(9, "replay", "kill", 3, 0)
    world.tell(e.InjectRequested, injection=injection)
    world.exit(0)
    assert world.assigns[-1].injections == (injection,)
    world.tell(e.InjectionFires, server=1, id=9)
    world.exit(1)
    world.tell(e.Hello, server=world.machine.active)
    assert world.assigns[-1].injections == ()
    assert world.recoveries[1].attempts == 2


def test_a_flipped_bit_that_was_injected_ends_no_server() -> None:
    """So what ends it later is no injection."""
    world = World()
    world.run()
    world.tell(e.InjectRequested, injection=e.Injection(9, "record", "flip", 3, 0, 0x1000))
    world.tell(e.InjectionFires, server=0, id=9)
    world.exit(0)
    assert [fault.kind for fault in world.faults] == ["server"]
    assert world.assigns[-1].injections == ()


def test_memory_that_is_not_as_its_replicas() -> None:
    """Its server does not know, and goes on."""
    world = World()
    world.run()
    world.tell(e.ReplicaDiffers, reason="it differs")
    assert [(fault.kind, fault.text, fault.number) for fault in world.faults] == [("corruption", "it differs", 1)]
    assert world.machine.state == "running"


def test_no_progress_ends_in_lost() -> None:
    world = World(Limits(max_attempts=5))
    world.run()
    world.exit(0)
    for _ in range(4):
        server = world.next_server()
        if world.machine.servers[server] == "spawning":
            world.tell(e.Hello, server=server)
        assert world.assigns[-1].mode == "recover"
        world.exit(server)
    server = world.next_server()
    world.tell(e.Hello, server=server)
    world.exit(server)
    assert world.machine.state == "losing"
    server = world.next_server()
    world.tell(e.Hello, server=server)
    assert world.assigns[-1].mode == "lost"
    assert world.assigns[-1].error == 46
    world.exit(server, clean=True)
    assert world.machine.state == "lost"
    assert world.released
    assert world.recoveries[1].outcome == "lost"
    world.tell(e.ClientExited)
    assert world.machine.state == "ended"


def test_progress_is_a_replay_that_got_further() -> None:
    world = World(Limits(max_attempts=2))
    world.run()
    for count in range(20):
        server = world.machine.active
        assert server is not None
        world.exit(server)
        world.replay(10 + count)


def test_an_idle_program_whose_server_is_killed_now_and_then() -> None:
    world = World(Limits(max_attempts=2))
    world.run()
    for _ in range(20):
        server = world.machine.active
        assert server is not None
        world.exit(server)
        world.replay(10)
        world.timer("stable")


def test_kills_from_outside_are_not_held_against_the_program() -> None:
    world = World(Limits(max_attempts=2))
    world.run()
    for _ in range(20):
        server = world.next_server()
        world.exit(server, killed=True)
        world.replay(0)
    assert world.machine.attempts == 0


def test_kills_while_it_recovers_are_not_held_against_the_program_either() -> None:
    world = World(Limits(max_attempts=2))
    world.run()
    world.exit(0)
    for _ in range(20):
        server = world.next_server()
        if world.machine.servers[server] == "spawning":
            world.tell(e.Hello, server=server)
        world.exit(server, killed=True)
    world.replay()
    assert (world.recoveries[1].outcome, world.recoveries[1].attempts) == ("resumed", 21)


def test_servers_that_die_at_every_replay_get_their_successors_ever_more_slowly() -> None:
    world = World(Limits(max_attempts=2))
    world.run()
    delays = []
    for _ in range(12):
        server = world.machine.active
        assert server is not None
        if world.machine.servers[server] == "spawning":
            world.tell(e.Hello, server=server)
        world.exit(server, killed=True)
        assert world.machine.state == "recovering"
        if world.machine.active is None:
            delays.append(world.timers["spawn"])
            assert world.machine.standby is None
            reported = [i for i in world.others if isinstance(i, e.SaveState)][-1]
            assert (reported.state, "lost without progress; the next one follows in" in reported.why) == (
                "recovering",
                True,
            )
            assert reported.why in world.recoveries[1].story
            world.timer("spawn")
    assert delays[:4] == [0.1, 0.2, 0.4, 0.8]
    assert (len(delays), max(delays)) == (9, 5.0)
    # A replay that comes further than any before is progress: the next one is replaced at once.
    world.replay(10)
    world.exit(int(world.machine.active or 0), killed=True)
    assert world.machine.active is not None


def test_a_standby_waits_with_the_others() -> None:
    """Servers that come to the end of their replay, and no further, are no progress either."""
    world = World()
    world.run()
    world.exit(0, killed=True)
    while world.machine.active is not None:
        world.replay(10)
        server, standby = world.machine.active, world.machine.standby
        assert standby is not None
        world.tell(e.Hello, server=standby)
        world.exit(server, killed=True)
    assert world.machine.standby == standby
    world.timer("spawn")
    assert (world.machine.active, world.holder) == (standby, standby)


def test_a_program_that_exits_while_its_next_server_waits() -> None:
    world = World()
    world.run()
    while world.machine.active is not None:
        server = world.machine.active
        if world.machine.servers[server] == "spawning":
            world.tell(e.Hello, server=server)
        world.exit(server, killed=True)
    world.tell(e.ClientExited, reason="exit code 0")
    assert (world.machine.state, world.timers) == ("ended", {})


def test_a_device_that_cannot_be_used_is_the_first_answer_to_a_program() -> None:
    world = World()
    world.tell(e.ClientArrived)
    world.tell(e.Unavailable, server=0, error=46, text="another process has it")
    assert e.Refuse(46, "another process has it") in world.others
    assert world.machine.state == "ended"


def test_a_device_for_one_process_only_has_no_standby_and_recovers_all_the_same() -> None:
    world = World()
    world.tell(e.ClientArrived)
    world.tell(e.Hello, server=0)
    world.tell(e.Ready, server=0)
    for server in (1, 3):  # after each recovery it is tried once
        assert world.machine.standby == server
        world.tell(e.Unavailable, server=server, error=46, text="another process has it")
        world.exit(server)
        assert world.machine.standby is None
        assert "spawn" not in world.timers
        assert world.machine.active is not None
        world.exit(world.machine.active, killed=True)
        world.replay()
    assert world.recoveries[2].standby == "spawned"


def test_a_device_without_memory_for_a_standby_is_requested_again() -> None:
    world = World()
    world.tell(e.ClientArrived)
    world.tell(e.Hello, server=0)
    world.tell(e.Ready, server=0)
    world.tell(e.Unavailable, server=1, error=2, text="no memory")
    world.exit(1)
    world.timer("spawn")
    assert world.machine.standby == 2


def test_a_replay_may_take_as_long_as_the_watchdog_is_patient() -> None:
    world = World(Limits(phase_timeout=10, hang_timeout=300))
    world.run()
    world.exit(0)
    assert world.timers["phase"] == 310


HUNG = "no rank has got further for 30 s"


def hung(world: World, times: int) -> None:
    """Its group is, so often; each time all recover, and go on for a while."""
    for _ in range(times):
        server = world.machine.active
        assert server is not None
        world.tell(e.GroupHung, reason=HUNG)
        world.exit(server, killed=True)
        if world.machine.state != "recovering":
            return
        if "spawn" in world.timers:
            world.timer("spawn")
        world.tell(e.GroupGo, decided=1)
        world.replay()
        world.timer("stable")


def test_a_group_that_hangs_is_recovered() -> None:
    world = World(Limits(max_attempts=3))
    world.run()
    world.tell(e.Grouped, on=True)
    hung(world, 3)
    assert {(one.kind, one.error, one.text) for one in world.faults} == {("timeout", 702, HUNG)}
    assert [one.outcome for one in world.recoveries.values()] == ["resumed"] * 3


def test_a_group_that_hangs_again_and_again_is_lost() -> None:
    """To run on for a while is no progress: it hangs after that."""
    world = World(Limits(max_attempts=3))
    world.run()
    world.tell(e.Grouped, on=True)
    hung(world, 4)
    assert world.machine.state == "losing"
    assert world.machine.doom == (702, f"3 recoveries in a row made no progress; the last: {HUNG}")


def test_a_group_that_hangs_after_another_snapshot_has_got_further() -> None:
    world = World(Limits(max_attempts=3))
    world.run()
    world.tell(e.Grouped, on=True)
    for number in range(1, 5):
        hung(world, 3)
        world.tell(e.SnapshotCommitted, server=world.machine.active, number=number, sequence=number)
    assert world.machine.state == "running"


def test_a_hang_that_was_injected_does_not_count() -> None:
    world = World(Limits(max_attempts=1))
    world.run()
    world.tell(e.Grouped, on=True)
    for number in range(3):
        world.tell(e.InjectRequested, injection=e.Injection(number, "copy", "hang", 0, 0))
        world.tell(e.InjectionFires, server=world.machine.active, id=number)
        hung(world, 1)
    assert [(one.kind, one.injection) for one in world.faults] == [("injected", number) for number in range(3)]
    assert world.machine.state == "running"


def test_servers_that_cannot_be_started_are_tried_for_ever_while_the_program_waits() -> None:
    world = World()
    world.run()
    world.alive.discard(1)
    world.tell(e.Exited, server=1, status="exit code 1")
    world.exit(0)
    delays = []
    for _ in range(20):
        delays.append(world.timers["spawn"])
        world.timer("spawn")
        server = world.machine.active
        assert server is not None
        world.alive.discard(server)
        world.tell(e.SpawnFailed, server=server, reason="Too many open files")
    assert delays[:4] == [0.1, 0.2, 0.4, 0.8]
    assert max(delays) == 5.0
    world.timer("spawn")
    world.replay()
    assert "Too many open files" in world.recoveries[1].story[1]


def test_a_first_server_that_cannot_be_started_is_an_error_for_the_program() -> None:
    world = World()
    world.tell(e.ClientArrived)
    while world.machine.state == "starting":
        server = world.machine.active
        assert server is not None
        world.alive.discard(server)
        world.tell(e.SpawnFailed, server=server, reason="Too many open files")
        if "spawn" in world.timers:
            world.timer("spawn")
    refusal = next(i for i in world.others if isinstance(i, e.Refuse))
    assert refusal.error == 802
    assert "Too many open files" in refusal.message


def test_what_a_daemon_did_not_see_the_end_of_is_written_down() -> None:
    """And the next one has the next number, also if the database does not have that record."""
    for event in (e.Adopted, e.Orphaned):
        world = World()
        record = e.RecoveryRecord(number=4, cause="it was killed", fault=None, occurred=-5, detected=0, story=["a"])
        world.tell(event, interrupted=record, **({"reason": "gone"} if event is e.Orphaned else {}))
        assert world.recoveries[4].outcome == "interrupted"
        assert (world.recoveries[4].story[0], len(world.recoveries[4].story)) == ("a", 2)
        if event is e.Orphaned:
            assert world.machine.recovery is not None
            assert world.machine.recovery.number == 5


def test_a_missed_handle_costs_nothing_until_the_server_dies() -> None:
    world = World()
    world.run()
    world.tell(e.HandleMissed, reason="no descriptors")
    assert world.machine.state == "running"
    world.exit(0)
    assert world.assigns[-1].mode == "lost"
    assert world.assigns[-1].text == "no descriptors"


def test_a_program_that_exits_while_its_server_recovers() -> None:
    world = World()
    world.run()
    world.exit(0)
    world.tell(e.ClientExited)
    assert world.machine.state == "ended"
    assert world.recoveries[1].outcome == "abandoned"
    assert world.released


def test_stopping() -> None:
    world = World()
    world.run()
    world.tell(e.StopRequested, reason="requested")
    world.timer("stop")
    signals = [i.signal for i in world.others if isinstance(i, e.SignalClient)]
    assert signals == [signal.SIGTERM, signal.SIGKILL]


def test_times_of_a_hostile_server_stay_between_assignment_and_now() -> None:
    world = World()
    world.run()
    world.exit(0)
    world.tell(e.PhaseReached, server=1, name="mapped", at=0)
    world.tell(e.PhaseReached, server=1, name="restored", at=1 << 62)
    record = world.machine.recovery
    assert record is not None
    assert record.standby_ready is not None
    assert record.mapped is not None
    assert record.restored is not None
    assert record.detected <= record.standby_ready <= record.mapped <= record.restored <= world.t


class AnyOrder(AtAnyTime):
    """Every event at any time, from any server. World.do checks what must never happen."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(Limits(max_attempts=3))

    @initialize(adopted=st.booleans(), opened=st.booleans())
    def begin(self, adopted: bool, opened: bool) -> None:
        if adopted:
            self.world.alive.add(0)
            self.world.holder = 0
            self.world.tell(e.Adopted, opened=opened)
        else:
            self.world.tell(e.ClientArrived)

    @rule(data=st.data(), opened=st.booleans())
    def ready(self, data: Any, opened: bool) -> None:
        self.world.tell(e.Ready, server=self.server(data), opened=opened)

    @rule(
        data=st.data(), name=st.sampled_from(["mapped", "restored", "replayed", "resumed"]), records=st.integers(0, 9)
    )
    def phase(self, data: Any, name: str, records: int) -> None:
        self.world.tell(e.PhaseReached, server=self.server(data), name=name, at=self.world.t, records=records)

    @rule(data=st.data(), number=st.integers(0, 5), sequence=st.integers(0, 9))
    def snapshot(self, data: Any, number: int, sequence: int) -> None:
        self.world.tell(e.SnapshotCommitted, server=self.server(data), number=number, sequence=sequence)

    @rule(data=st.data(), sequence=st.integers(0, 3), error=st.sampled_from([700, 719]))
    def fault(self, data: Any, sequence: int, error: int) -> None:
        self.world.tell(
            e.Faulted, server=self.server(data), sequence=sequence, op="", error=error, text="", at=self.world.t
        )

    @rule(data=st.data(), id=st.integers(0, 2))
    def fire(self, data: Any, id: int) -> None:
        self.world.tell(e.InjectionFires, server=self.server(data), id=id)

    @rule(id=st.integers(0, 2))
    def inject(self, id: int) -> None:
        self.world.tell(e.InjectRequested, injection=e.Injection(id, "record", "kill", 0, 0))

    @rule(data=st.data(), kind=st.sampled_from(["garbage", "misbehaved", "program_error", "bye"]))
    def say(self, data: Any, kind: str) -> None:
        server = self.server(data)
        if kind == "garbage":
            self.world.tell(e.GarbageFound, server=server, position=0, text="")
        elif kind == "misbehaved":
            self.world.tell(e.Misbehaved, server=server, reason="")
        elif kind == "program_error":
            self.world.tell(e.ProgramError, server=server, sequence=1, error=700)
        else:
            self.world.tell(e.SaidBye, server=server, reason="")

    @precondition(lambda self: self.world.alive)
    @rule(data=st.data(), clean=st.booleans(), killed=st.booleans())
    def die(self, data: Any, clean: bool, killed: bool) -> None:
        self.world.exit(int(data.draw(st.sampled_from(sorted(self.world.alive)))), clean, killed)

    @precondition(lambda self: self.unborn())
    @rule(data=st.data(), error=st.sampled_from([2, 46]))
    def unavailable(self, data: Any, error: int) -> None:
        server = int(data.draw(st.sampled_from(self.unborn())))
        self.world.tell(e.Unavailable, server=server, error=error, text="no")

    @rule()
    def stop(self) -> None:
        self.world.tell(e.StopRequested, reason="requested")

    @rule()
    def handle_missed(self) -> None:
        self.world.tell(e.HandleMissed, reason="no descriptors")

    @rule()
    def client_exits(self) -> None:
        self.world.tell(e.ClientExited)

    @invariant()
    def known_servers_live(self) -> None:
        assert set(self.world.machine.servers) <= self.world.alive or self.world.machine.state == "ended"

    def teardown(self) -> None:
        """From wherever it is: if servers behave from now on, the program runs again, or has heard why not."""
        world = self.world
        for _ in range(200):
            machine = world.machine
            dying = [n for n, s in machine.servers.items() if s == "dying"]
            if dying:
                world.exit(dying[0])
            elif machine.state in ("running", "lost", "ended"):
                break
            elif machine.state == "draining":
                world.exit(machine.active or 0, clean=True)
            elif machine.active is None:
                world.timer("spawn")
            elif machine.servers[machine.active] == "spawning":
                world.tell(e.Hello, server=machine.active)
            elif machine.state == "starting":
                world.tell(e.Ready, server=machine.active)
            elif machine.state == "losing":
                world.exit(machine.active, clean=True)
            else:
                world.replay()
        assert world.machine.state in ("running", "lost", "ended")
        self.end()
        assert world.released
        assert all(record.outcome != "running" for record in world.recoveries.values())


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
