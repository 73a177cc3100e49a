"""Groups with ranks on two nodes, while anything happens at any moment, and messages between the nodes are on their way
for as long as they like: in the end all run, or all are suspended."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from xmigd.process import events as e
from xmigd.process import migration_events as v

from .far_world import FAR, FarWorld
from .test_groups_at_any_time import AtAnyMoment


class AtAnyMomentOnTwoNodes(AtAnyMoment):
    world: FarWorld

    def __init__(self) -> None:
        super().__init__()
        self.world = FarWorld()

    @precondition(lambda self: bool(self.world.to_leader))
    @rule(count=st.integers(1, 6))
    def hear(self, count: int) -> None:
        for _ in range(count):
            self.world.hear()

    @precondition(lambda self: bool(self.world.from_leader))
    @rule(count=st.integers(1, 6))
    def obey(self, count: int) -> None:
        for _ in range(count):
            self.world.obey()

    @rule(rank=st.sampled_from(FAR), chance=st.integers(0, 4))
    def memory_is_needed(self, rank: int, chance: int) -> None:
        if chance == 0:
            self.world.give_up(rank)

    # Who is let in is not known everywhere at once: what is resumed looks different from each node.
    def resume(self) -> None: ...

    # What the leader observes of the other node is behind.
    def what_is_observed_is_what_there_is(self) -> None: ...


TestAtAnyMomentOnTwoNodes = AtAnyMomentOnTwoNodes.TestCase
TestAtAnyMomentOnTwoNodes.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)


def comes_to(world: FarWorld, there: Callable[[], bool]) -> None:
    for _ in range(5000):
        if there():
            return
        if not world.quieten():
            world.wake()
    raise AssertionError("it does not get there")


def states(world: FarWorld) -> set[str]:
    return {one.state for one in world.machines}


def over(world: FarWorld) -> bool:
    return all(one.move is None for one in world.machines) and not world.quieten()


def being_suspended(there: Callable[[FarWorld], bool]) -> FarWorld:
    world = FarWorld()
    world.begin("suspend", [0, 1, 2, 3])
    comes_to(world, lambda: there(world))
    return world


def lose_server(world: FarWorld, rank: int) -> None:
    active = world.machines[rank].active
    assert active is not None
    world.die(world.servers[rank, active])
    world.exit(world.servers[rank, active])


@pytest.mark.parametrize("rank", FAR)
def test_a_server_is_lost_when_it_is_decided_and_not_known(rank: int) -> None:
    """It stood suspended: nothing of it is needed any more."""
    world = being_suspended(lambda world: world.groups.fate_of("0") is None)
    move = world.machines[rank].move
    assert move is not None
    assert move.leaving == "waits"
    lose_server(world, rank)
    comes_to(world, lambda: over(world))
    assert states(world) == {"suspended"}


@pytest.mark.parametrize("rank", range(4))
def test_a_server_is_lost_before_it_is_decided(rank: int) -> None:
    """All are recovered, also those that stand suspended."""
    world = being_suspended(lambda world: any(one.doing == "parked" for one in world.of(2)))
    assert world.groups.is_to_stand("0")
    lose_server(world, rank)
    comes_to(world, lambda: over(world))
    assert states(world) == {"running"}
    assert world.slept == 0


@pytest.mark.parametrize("rank", FAR)
def test_one_is_lost_for_good_while_the_go_ahead_is_on_its_way(rank: int) -> None:
    """The others have been let go on, and would compute without it."""
    world = FarWorld()
    lose_server(world, 0)
    comes_to(world, lambda: world.machines[0].awaits_group is False and world.machines[rank].awaits_group)
    world.tell(rank, e.HandleMissed, reason="no descriptors")
    world.tell(rank, e.DeviceLost, reason="it fell off the bus")
    while world.machines[rank].state == "recovering":
        server = world.machines[rank].active
        assert server is not None
        world.exit(world.servers[rank, server])
    comes_to(world, lambda: over(world))
    assert states(world) == {"lost"}


@pytest.mark.parametrize("rank", FAR)
def test_it_is_cancelled_while_the_decision_is_on_its_way(rank: int) -> None:
    """The others stand suspended, and this one does not: all are recovered."""
    world = being_suspended(lambda world: bool(world.takes))
    move = world.machines[rank].move
    assert move is not None
    assert move.may_cancel is None
    world.tell(rank, v.CancelRequested, why="requested")
    comes_to(world, lambda: over(world))
    assert states(world) == {"running"}
    assert world.slept == 0


def moving(rank: int, there: Callable[[FarWorld], bool]) -> FarWorld:
    world = FarWorld()
    world.begin("move", [rank])
    comes_to(world, lambda: there(world))
    return world


def communicate(world: FarWorld) -> set[tuple[str, int]]:
    return {one.communicates for one in world.servers.values() if one.alive and one.doing == "runs"}


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_moves(rank: int) -> None:
    """All go on with what was made for that, and nobody is recovered."""
    world = moving(rank, over)
    assert (world.moved, world.recovered) == (1, 0)
    assert {name for name, _ in communicate(world)} == {"moved"}
    assert len(communicate(world)) == 1


def decided(world: FarWorld) -> bool:
    """And not known on the other node."""
    return any(1 in takes for takes in world.takes.values()) and bool(world.from_leader)


@pytest.mark.parametrize("rank", FAR)
@pytest.mark.parametrize("what", ["cancelled", "target lost", "source lost", "gave up", "timeout"])
def test_it_is_given_up_while_the_decision_is_on_its_way(rank: int, what: str) -> None:
    """The others use what leads to its target: all are recovered from that round."""
    world = moving(rank, decided)
    move = world.machines[rank].move
    assert move is not None
    if what == "cancelled":
        world.tell(rank, v.CancelRequested, why="requested")
    elif what == "target lost":
        assert move.target is not None
        server = world.servers[rank, move.target]
        world.die(server)
        world.exit(server)
    elif what == "source lost":
        lose_server(world, rank)
    elif what == "gave up":
        world.give_up(rank)
    else:
        world._stays_there(rank, "the node that leads did not decide it in time")
    comes_to(world, lambda: over(world))
    assert states(world) == {"running"}
    assert (world.moved, world.recovered) == (0, 1)
    assert len(communicate(world)) == 1


def test_another_gives_up_while_the_decision_is_on_its_way() -> None:
    world = moving(0, decided)
    world.give_up(2)
    comes_to(world, lambda: over(world))
    assert world.recovered == 1
    assert len(communicate(world)) == 1
