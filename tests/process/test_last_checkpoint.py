"""A process that is lost: a server stands at its last snapshot before."""

from __future__ import annotations

from xmigd.process import events as e
from xmigd.process.limits import Limits

from .world import World


def being_lost(*, snapshot: bool = True) -> World:
    world = World(Limits(max_attempts=1, last_checkpoint=True))
    world.run()
    if snapshot:
        world.tell(e.SnapshotCommitted, server=0, number=3, sequence=9)
    while world.machine.state != "losing":
        server = world.next_server()
        if world.machine.servers[server] == "spawning":
            world.tell(e.Hello, server=server)
        world.exit(server)
    return world


def given(world: World) -> e.Assign:
    """What the next server gets."""
    server = world.next_server()
    if world.machine.servers[server] == "spawning":
        world.tell(e.Hello, server=server)
    return world.assigns[-1]


def is_lost(world: World) -> bool:
    assign = given(world)
    assert assign.mode == "lost"
    world.exit(assign.server, clean=True)
    return world.machine.state == "lost" and world.released


def test_a_server_is_held_until_it_is_saved() -> None:
    world = being_lost()
    held = given(world)
    assert (held.mode, held.hold) == ("recover", True)
    for name in ("mapped", "restored"):
        world.tell(e.PhaseReached, server=held.server, name=name, at=world.t)
    assert world.machine.state == "losing"
    instructions = world.tell(e.Salvaged, reason="it is made")
    assert e.Kill(held.server, "it is made") in instructions
    world.exit(held.server, killed=True)
    assert is_lost(world)


def test_the_server_that_is_held_ends() -> None:
    world = being_lost()
    world.exit(given(world).server)
    world.tell(e.Salvaged, reason="too late")
    assert is_lost(world)


def test_it_takes_too_long() -> None:
    world = being_lost()
    held = given(world)
    world.timer("phase")
    world.exit(held.server, killed=True)
    assert is_lost(world)


def test_the_program_ends_meanwhile() -> None:
    world = being_lost()
    given(world)
    world.tell(e.ClientExited)
    world.tell(e.Salvaged, reason="too late")
    assert world.machine.state == "ended"


def test_no_device_opens_for_it() -> None:
    """It is lost all the same."""
    world = being_lost()
    server = world.next_server()
    if world.machine.servers[server] == "spawning":
        world.exit(server)
    else:
        world.exit(given(world).server)
    assert is_lost(world)


def test_what_has_no_snapshot_is_lost_at_once() -> None:
    assert is_lost(being_lost(snapshot=False))
