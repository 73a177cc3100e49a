"""Moves and suspensions in the machine of a process: anything at any time (Hypothesis)."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from xmigd.process import events as e
from xmigd.process import migration_events as v
from xmigd.process.limits import Limits, MoveLimits

from .move_world import MIB, MoveWorld
from .world import AtAnyTime


class Moves(AtAnyTime):
    """Everything at any time. MoveWorld checks what must never happen; at the end everybody behaves."""

    world: MoveWorld

    def __init__(self) -> None:
        super().__init__()
        self.world = MoveWorld(Limits(max_attempts=3, move=MoveLimits(max_rounds=4)))
        self.count = 0

    @initialize(how=st.sampled_from(["fresh", "unopened", "adopted", "holder"]))
    def start(self, how: str) -> None:
        if how == "unopened":
            self.world.run_unopened()
        elif how == "fresh":
            self.world.run()
        else:
            self.world.alive.add(0)
            if how == "adopted":
                self.world.holder = 0
                self.world.tell(e.Adopted)
            else:
                self.world.keeping = 0
                self.world.tell(e.HolderAdopted, where="host")

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
        elif machine.holder is not None and machine.servers[machine.holder] == "spawning":
            world.tell(e.Hello, server=machine.holder)
        elif move is not None and move.phase == "preparing" and move.source is not None:
            if move.kind == "suspend":
                world.tell(v.Prepared, server=move.source, ms=1.0)
            else:
                world.snapshot(off_device=True)
        elif move is not None and move.phase == "copying" and move.target is not None:
            world.snapshot(off_device=move.record.path == "host")
            world.round(move.target, len(move.record.iterations) + 1, MIB)
        elif move is not None and move.phase == "committing":
            world.tell(v.IntentWritten)
        elif move is not None and move.source in world.requested:
            self.stopped(move.source)
        elif move is not None and move.phase == "keeping":
            world.tell(v.Kept, server=machine.holder)
        elif move is not None and move.phase == "taking" and move.target is not None:
            world.resume_program(move.target)
        elif machine.state == "recovering":
            if machine.active is None:
                world.timer("spawn")
            elif machine.servers[machine.active] == "spawning":
                world.tell(e.Hello, server=machine.active)
            else:
                world.replay()
        else:
            return False
        return True

    def stopped(self, source: int) -> None:
        world = self.world
        assert world.machine.move is not None
        suspends = world.machine.move.kind == "suspend"
        world.stops(source)
        if suspends:
            world.tell(v.Suspended, server=source, snapshot=1, total_bytes=1, at=world.t, ms=1.0)
        else:
            world.tell(v.HandedOver, server=source, snapshot=1, drained=world.t)

    @rule(data=st.data(), number=st.integers(0, 3), copied=st.integers(0, 500))
    def round_ends(self, data: Any, number: int, copied: int) -> None:
        server = self.server(data)
        self.world.tell(v.RoundProgress, server=server, number=number, copied_bytes=1)
        self.world.round(server, number, copied * MIB, ms=1.0)

    @rule(data=st.data(), name=st.sampled_from(["mapped", "restored", "replayed"]))
    def phase(self, data: Any, name: str) -> None:
        self.world.tell(e.PhaseReached, server=self.server(data), name=name, at=self.world.t)

    @precondition(lambda self: self.world.requested & self.world.alive)
    @rule()
    def refuse(self) -> None:
        source = min(self.world.requested & self.world.alive)
        self.world.requested.discard(source)
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
    def snapshot(self, off_device: bool) -> None:
        self.world.snapshot(off_device=off_device)

    @rule(data=st.data())
    def snapshot_stands(self, data: Any) -> None:
        self.world.tell(v.SnapshotStands, server=self.server(data), number=1)

    @rule()
    def intent_fails(self) -> None:
        self.world.tell(v.IntentFailed, reason="full")

    @rule()
    def cancel(self) -> None:
        self.world.tell(v.CancelRequested, why="requested")

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
        if machine.state != "losing":
            self.end()


TestMoves = Moves.TestCase
TestMoves.settings = settings(max_examples=300, stateful_step_count=50, deadline=None)
