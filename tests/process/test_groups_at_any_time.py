"""Groups of ranks while anything happens at any moment: messages in any order, kills between any two of them."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from xmigd.process import events as e
from xmigd.process import migration_events as v
from xmigd.ranks.history import IN_RECOVERIES, IN_ROUNDS

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
        return [one for one in self.world.servers.values() if one.alive and one.doing not in ("new", "copying")]

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

    @precondition(lambda self: bool(self.executing()))
    @rule(data=st.data(), count=st.integers(1, 6), seconds=st.sampled_from([30.0, 30.0, 0.0]))
    def stuck(self, data: Any, count: int, seconds: float) -> None:
        for _ in range(count):
            self.server(data, self.executing()).outbox.append(("stuck", {"seconds": seconds}))

    @rule(rank=st.integers(0, 3))
    def differs(self, rank: int) -> None:
        """Its memory is restored: whatever the others do then, all recover, or nobody does."""
        self.world.group("differs", str(rank), "its memory differs")

    @rule(data=st.data(), all_of_them=st.booleans())
    def suspend(self, data: Any, all_of_them: bool) -> None:
        """Mostly of all; whoever asks for less hears that it is not done."""
        can = [rank for rank, one in enumerate(self.world.machines) if one.why_not_move("suspend") is None]
        if can and not all_of_them:
            can = data.draw(st.lists(st.sampled_from(can), min_size=1, unique=True))
        self.world.begin("suspend", can)

    @rule(rank=st.integers(0, 3))
    def move(self, rank: int) -> None:
        if self.world.machines[rank].why_not_move("move") is None:
            self.world.begin("move", [rank])

    @rule()
    def resume(self) -> None:
        self.world.begin("resume", self.asleep())

    def asleep(self) -> list[int]:
        """All ranks that there are, if all can be resumed."""
        over = ("losing", "lost", "ended")
        ranks = [rank for rank, one in enumerate(self.world.machines) if one.state not in over]
        can = all(self.world.machines[rank].why_not_move("resume") is None for rank in ranks)
        return [rank for rank in ranks if rank not in self.world.exited] if can else []

    @rule(rank=st.integers(0, 3))
    def cancel(self, rank: int) -> None:
        self.world.tell(rank, v.CancelRequested, why="requested")

    @rule(rank=st.integers(0, 3))
    def move_takes_long(self, rank: int) -> None:
        if "move" in self.world.timers[rank]:
            self.world.timer(rank, "move")

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

    @rule(rank=st.integers(0, 3))
    def device_is_lost(self, rank: int) -> None:
        if rank not in self.world.exited:
            self.world.tell(rank, e.DeviceLost, reason="it fell off the bus")

    @invariant()
    def one_round_at_a_time(self) -> None:
        rounds = [group.round for group in set(self.world.groups._groups.values()) if group.round is not None]
        members = [one for round in rounds for one in round.members]
        assert len(members) == len(set(members))

    @invariant()
    def what_is_observed_is_what_there_is(self) -> None:
        for rank in self.world.history.ranks_of(self.world.t, "job"):
            times = [change.t for change in rank.changes]
            assert times == sorted(times)
            machine = self.world.machines[int(rank.who.process)]
            if machine.state == "running" and not machine._broken:
                moving = ("moving",) if machine.move is not None else ()
                assert rank.activity in ("running", *moving, *IN_ROUNDS)
            elif machine.state == "recovering" and machine.grouped:
                assert rank.activity in (*IN_RECOVERIES, *IN_ROUNDS)

    @invariant()
    def nobody_executes_while_another_is_suspended(self) -> None:
        world = self.world
        asleep = any(one.state == "suspended" for rank, one in enumerate(world.machines) if rank not in world.exited)
        executing = [
            one for one in self.executing() if one.doing in ("runs", "stopping") and one.rank not in world.exited
        ]
        assert not asleep or not executing

    def rest(self) -> None:
        """What is to happen by itself does, and time passes."""
        world = self.world
        for _ in range(40):
            for _ in range(3000):
                if not world.quieten():
                    break
            else:
                raise AssertionError("it does not come to rest")
            if world.groups.due is None:
                return
            world.wake()

    def teardown(self) -> None:
        """If nothing more goes wrong, all go on, or all have heard why not; and a round comes to its end."""
        world = self.world
        self.rest()
        assert all(one.move is None for one in world.machines)
        if asleep := self.asleep():
            world.begin("resume", asleep)
            self.rest()
        elif any(one.unrecoverable and one.state == "suspended" for one in world.machines):
            return
        states = {one.state for rank, one in enumerate(world.machines) if rank not in world.exited}
        assert states <= {"running", "lost"}, states
        assert len(states) <= 1, "one goes on without the other"
        if states == {"running"}:
            assert all(one.doing != "stopped" or world.groups.due for one in self.executing())
            # A group of which nobody gets further is recovered first.
            for _ in range(20):
                if world.groups.due is None:
                    break
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
            made = {one.communicates for one in self.executing() if one.rank not in world.exited}
            assert len(made) == 1, "ranks do not communicate with each other"
            ranks = world.history.ranks_of(world.t, "job")
            assert {one.activity for one in ranks if int(one.who.process) not in world.exited} == {"running"}
            rounds = world.history.rounds_of("job")
            assert all(one.committed or one.given_up or one.decided for one in rounds)
            assert world.history._rounds == {}
            assert rounds[0].committed is not None


TestAtAnyMoment = AtAnyMoment.TestCase
TestAtAnyMoment.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
