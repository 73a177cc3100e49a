"""Groups of ranks while anything happens at any moment: messages in any order, kills between any two of them."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from xmigd.process import events as e

from .group_world import MS, GroupWorld, ModelServer


class AtAnyMoment(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = GroupWorld()

    def server(self, data: Any, those: list[ModelServer]) -> ModelServer:
        return those[int(data.draw(st.integers(0, len(those) - 1)))]

    def having(self, box: str) -> list[ModelServer]:
        return [server for server in self.world.servers.values() if getattr(server, box)]

    def executing(self) -> list[ModelServer]:
        return [one for one in self.world.servers.values() if one.alive and one.doing != "new"]

    @rule(rank=st.integers(0, 3), count=st.integers(1, 5))
    def execute(self, rank: int, count: int) -> None:
        for server in self.executing():
            if server.rank == rank:
                for _ in range(count):
                    self.world.execute(server)

    @rule(rank=st.integers(0, 3))
    def want(self, rank: int) -> None:
        self.world.t += 11 * MS
        self.world.group("wanted", str(rank))

    @precondition(lambda self: bool(self.having("inbox")))
    @rule(data=st.data(), count=st.integers(1, 6))
    def receive(self, data: Any, count: int) -> None:
        for _ in range(count):
            if self.having("inbox"):
                self.world.receive(self.server(data, self.having("inbox")))

    @precondition(lambda self: bool(self.having("outbox")))
    @rule(data=st.data(), count=st.integers(1, 6))
    def deliver(self, data: Any, count: int) -> None:
        for _ in range(count):
            if self.having("outbox"):
                self.world.deliver(self.server(data, self.having("outbox")))

    @rule(count=st.integers(1, 60))
    def quieten(self, count: int) -> None:
        for _ in range(count):
            self.world.quieten()

    @precondition(lambda self: bool(self.executing()))
    @rule(data=st.data())
    def die(self, data: Any) -> None:
        self.world.die(self.server(data, self.executing()))

    @precondition(lambda self: bool([one for one in self.world.servers.values() if not one.alive]))
    @rule(data=st.data(), seen_early=st.booleans())
    def exit(self, data: Any, seen_early: bool) -> None:
        dead = self.server(data, [one for one in self.world.servers.values() if not one.alive])
        if seen_early:
            self.world.tell(dead.rank, e.Ending, server=dead.number)
        self.world.exit(dead)

    @precondition(lambda self: bool([one for one in self.world.servers.values() if one.killed]))
    @rule(data=st.data())
    def end(self, data: Any) -> None:
        self.world.die(self.server(data, [one for one in self.world.servers.values() if one.killed]))

    @rule()
    def wake(self) -> None:
        self.world.wake()

    @precondition(lambda self: bool(self.world.servers))
    @rule(data=st.data())
    def busy(self, data: Any) -> None:
        server = self.server(data, list(self.world.servers.values()))
        if server.doing == "stopping":
            server.outbox.append(("busy", {"number": server.round}))

    @precondition(lambda self: len(self.world.exited) < 2)
    @rule(rank=st.integers(0, 3), chance=st.integers(0, 9))
    def program_exits(self, rank: int, chance: int) -> None:
        if chance == 0 and rank not in self.world.exited:
            self.world.exited.add(rank)
            self.world.tell(rank, e.ClientExited)

    @precondition(lambda self: any(one.state == "running" for one in self.world.machines))
    @rule(rank=st.integers(0, 3), chance=st.integers(0, 19))
    def handle_missed(self, rank: int, chance: int) -> None:
        if chance == 0:
            self.world.tell(rank, e.HandleMissed, reason="no descriptors")

    @invariant()
    def one_round_at_a_time(self) -> None:
        rounds = [group.round for group in set(self.world.groups._groups.values()) if group.round is not None]
        members = [one for round in rounds for one in round.members]
        assert len(members) == len(set(members))

    def teardown(self) -> None:
        """If nothing more goes wrong, all go on, or all have heard why not; and a round comes to its end."""
        world = self.world
        for _ in range(3000):
            if not world.quieten():
                break
        else:
            raise AssertionError("it does not come to rest")
        states = {one.state for rank, one in enumerate(world.machines) if rank not in world.exited}
        assert states <= {"running", "lost"}, states
        assert len(states) <= 1, "one goes on without the other"
        if states == {"running"}:
            assert all(one.doing != "stopped" or world.groups.due for one in self.executing())
            if world.groups.due is not None:
                world.wake()
                while world.quieten():
                    pass
            before, rank = world.committed, next(one for one in range(4) if one not in world.exited)
            world.t += 2_000 * MS
            world.group("wanted", str(rank))
            while world.quieten():
                pass
            assert world.committed > before
            assert all(one.doing == "runs" for one in self.executing())


TestAtAnyMoment = AtAnyMoment.TestCase
TestAtAnyMoment.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
