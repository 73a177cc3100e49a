"""Servers that share an MPS with others: whose fault is it, and what becomes of those who had no part in it."""

from __future__ import annotations

import pytest

from xmigd.process import events as e

from .world import World

WHY = "a fault in another job"


def apart(instructions: list[e.Instruction]) -> list[e.Instruction]:
    return [each for each in instructions if isinstance(each, e.StayApart)]


def faulted(world: World, sequence: int, *, shared: bool, error: int = 700) -> list[e.Instruction]:
    server = world.machine.active
    assert server is not None
    out = world.tell(
        e.Faulted, server=server, sequence=sequence, op="xmLaunch", error=error, text="a fault", at=world.t,
        shared=shared,
    )  # fmt: skip
    return out


def test_a_neighbours_fault_costs_no_attempt_however_often_it_comes() -> None:
    world = World()
    world.run()
    for count in range(1, 12):
        server, standby = world.machine.active, world.machine.standby
        assert server is not None
        assert e.Kill(server, WHY) in world.tell(e.Stranded, server=server, reason=WHY)
        assert world.machine.standby == standby  # it had no part in that, and takes over
        world.exit(server, killed=True)
        assert world.machine.attempts == 0
        world.replay()
        assert (world.recoveries[count].outcome, world.recoveries[count].cause) == ("resumed", WHY)
        if world.machine.standby is not None:
            world.tell(e.Hello, server=world.machine.standby)


def test_a_fault_beside_others_is_nobodys_and_the_next_one_apart_is_its_own() -> None:
    world = World()
    world.run()
    standby = world.machine.standby
    out = faulted(world, 7, shared=True)
    assert len(apart(out)) == 1
    assert standby in {one.server for one in out if isinstance(one, e.Kill)}  # it is no server apart
    world.exit(0)
    assert world.machine.attempts == 0
    for expected in (None, None, e.Deliver(7, 700)):
        server = world.next_server()
        world.tell(e.Hello, server=server)
        assert world.assigns[-1].deliver == expected
        if expected is None:
            assert apart(faulted(world, 7, shared=False)) == []
            world.exit(server)
    world.replay()


def test_the_same_fault_twice_beside_others_is_delivered_to_nobody() -> None:
    """Both times it may have been another's."""
    world = World()
    world.run()
    for _ in range(2):
        faulted(world, 7, shared=True)
        server = world.machine.active
        assert server is not None
        world.exit(server)
        world.replay()
    assert all(assign.deliver is None and assign.careful is None for assign in world.assigns)


def test_an_injected_fault_is_known_beside_others_too() -> None:
    world = World()
    world.run()
    world.tell(e.InjectRequested, injection=e.Injection(5, "record", "fault", 0, 700))
    world.tell(e.InjectionFires, server=0, id=5)
    assert apart(faulted(world, 7, shared=True)) == []
    assert world.machine.standby == 1
    assert world.faults[-1].kind == "injected"


@pytest.mark.parametrize("error", range(805, 811))
def test_an_mps_that_has_ended_is_nobodys_fault(error: int) -> None:
    world = World()
    world.run()
    assert apart(faulted(world, 7, shared=True, error=error)) == []
    world.exit(0)
    assert (world.machine.attempts, world.machine.active) == (0, 1)
    world.replay()
    assert all(assign.deliver is None for assign in world.assigns)


def test_a_standby_is_replaced_and_the_program_does_not_notice() -> None:
    world = World()
    world.run()
    assert e.Kill(1, WHY) in world.tell(e.Stranded, server=1, reason=WHY)
    world.exit(1, killed=True)
    assert (world.machine.state, world.machine.standby) == ("running", None)
    world.timer("spawn")
    assert world.machine.standby == 2
    assert world.recoveries == {}


def test_one_that_has_not_got_the_process_yet() -> None:
    world = World()
    world.run()
    world.exit(0, killed=True)  # and its standby takes over
    world.tell(e.Stranded, server=1, reason=WHY)
    world.exit(1, killed=True)
    server = world.next_server()
    assert e.Kill(server, WHY) in world.tell(e.Stranded, server=server, reason=WHY)
    world.exit(server, killed=True)
    world.replay()
    assert world.recoveries[1].outcome == "resumed"
    assert world.machine.attempts == 0
