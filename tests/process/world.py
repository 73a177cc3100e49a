"""A process's machine and everybody around it: what they do, and what must never happen."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from xmigd.process import events as e
from xmigd.process.limits import Limits
from xmigd.process.machine import Machine


class World:
    """Does what the machine says, and remembers it. Its clock moves by itself."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.machine = Machine(limits)
        self.t = 1_000
        self.alive: set[int] = set()
        self.holder: int | None = None  # the living server that has the process
        self.assigns: list[e.Assign] = []
        self.prepared: dict[int, e.Prepare] = {}  # by server; it must not be given anything else
        self.timers: dict[str, float] = {}
        self.faults: list[e.FaultRecord] = []
        self.recoveries: dict[int, e.RecoveryRecord] = {}
        self.others: list[e.Instruction] = []
        self.released = False

    def tell(self, kind: type[e.Event], **fields: Any) -> list[e.Instruction]:
        self.t += 1_000
        instructions = self.machine.handle(kind(t=self.t, **fields))
        for instruction in instructions:
            self.do(instruction)
        self.machine.validate_state()
        return instructions

    def do(self, instruction: e.Instruction) -> None:
        match instruction:
            case e.Spawn(server):
                assert server not in self.alive
                self.alive.add(server)
            case e.Assign(server):
                assert server in self.alive
                assert server not in self.prepared
                self.give(server)
                self.assigns.append(instruction)
            case e.Prepare(server):
                assert server in self.alive
                assert server not in self.prepared
                self.prepared[server] = instruction
            case e.Enter(server):
                assert server in self.alive
                reported = self.prepared[server]
                self.give(server)
                self.assigns.append(
                    e.Assign(server, "recover", reported.deliver, reported.careful, reported.injections)
                )
            case e.SetTimer(name, seconds):
                self.timers[name] = seconds
            case e.ClearTimer(name):
                self.timers.pop(name, None)
            case e.SaveFault(record):
                assert record.number == len(self.faults) + 1
                self.faults.append(record)
            case e.SaveRecovery(recovery):
                self.recoveries[recovery.number] = recovery
            case e.Release():
                assert not self.released
                self.released = True
                self.others.append(instruction)
            case _:
                self.others.append(instruction)

    def give(self, server: int) -> None:
        assert self.holder is None, "two servers would write the same memory"
        assert not self.released
        self.holder = server

    def exit(self, server: int, clean: bool = False, killed: bool = False, expected: int | None = None) -> None:
        self.alive.discard(server)
        if self.holder == server:
            self.holder = None
        self.tell(e.Exited, server=server, status="killed by SIGKILL", clean=clean, killed=killed, expected=expected)

    def timer(self, name: str) -> None:
        del self.timers[name]
        self.tell(e.TimerFired, name=name)

    # Longer pieces of stories.

    def run(self) -> int:
        self.run_unopened()
        self.tell(e.Opened, server=0)
        self.timer("settle")
        self.tell(e.Hello, server=1)
        return 0

    def run_unopened(self) -> None:
        """Its program has not needed its devices yet."""
        self.tell(e.ClientArrived)
        self.tell(e.Hello, server=0)
        self.tell(e.Ready, server=0, opened=False)
        assert self.machine.state == "running"

    def next_server(self) -> int:
        """The one that has the process or is about to get it, after the pause where there is one."""
        if self.machine.active is None:
            self.timer("spawn")
        assert self.machine.active is not None
        return self.machine.active

    def replay(self, records: int = 10) -> None:
        server = self.next_server()
        if self.machine.servers[server] == "spawning":
            self.tell(e.Hello, server=server)
        for name in ("mapped", "restored"):
            self.tell(e.PhaseReached, server=server, name=name, at=self.t)
        self.tell(e.PhaseReached, server=server, name="replayed", at=self.t, records=records, compared=3)
        self.tell(e.PhaseReached, server=server, name="resumed", at=self.t)
        assert self.machine.state == "running"

    def fault(self, sequence: int, error: int = 700, *, after: int = 0, until: int = 0) -> None:
        server = self.next_server()
        if self.machine.servers[server] == "spawning":
            self.tell(e.Hello, server=server)
        self.tell(
            e.Faulted, server=server, sequence=sequence, op="xmLaunch", error=error, text="", at=self.t, after=after,
            until=until,
        )  # fmt: skip
        self.exit(server)


class AtAnyTime(RuleBasedStateMachine):
    """What may happen in every world at any time."""

    world: World

    def server(self, data: Any) -> int:
        return int(data.draw(st.sampled_from(sorted(self.world.alive | {99}))))

    def unborn(self) -> list[int]:
        return [n for n, state in self.world.machine.servers.items() if state == "spawning"]

    @rule(data=st.data())
    def hello(self, data: Any) -> None:
        self.world.tell(e.Hello, server=self.server(data))

    @rule(data=st.data())
    def opens(self, data: Any) -> None:
        self.world.tell(e.Opened, server=self.server(data))

    @rule(data=st.data(), joining=st.booleans())
    def joins(self, data: Any, joining: bool) -> None:
        self.world.tell(e.Joining, server=self.server(data), joining=joining)

    @rule(data=st.data())
    def ends(self, data: Any) -> None:
        self.world.tell(e.Ending, server=self.server(data))

    @rule(chance=st.integers(0, 4))
    def device_is_lost(self, chance: int) -> None:
        if chance == 0:
            self.world.tell(e.DeviceLost, reason="it fell off the bus")

    @rule(data=st.data())
    def stranded(self, data: Any) -> None:
        self.world.tell(e.Stranded, server=self.server(data), reason="its MPS is gone")

    @rule(data=st.data())
    def faults_beside_others(self, data: Any) -> None:
        self.world.tell(
            e.Faulted, server=self.server(data), sequence=0, op="", error=700, text="a fault", at=self.world.t,
            after=1, until=9, shared=True,
        )  # fmt: skip

    @precondition(lambda self: self.unborn())
    @rule(data=st.data())
    def spawn_fails(self, data: Any) -> None:
        server = int(data.draw(st.sampled_from(self.unborn())))
        self.world.alive.discard(server)
        self.world.tell(e.SpawnFailed, server=server, reason="no memory")

    @precondition(lambda self: self.world.timers)
    @rule(data=st.data())
    def timer(self, data: Any) -> None:
        self.world.timer(str(data.draw(st.sampled_from(sorted(self.world.timers)))))

    def end(self) -> None:
        """The program exits, if it has not: nothing may be left."""
        world = self.world
        if world.machine.state != "ended":
            world.tell(e.ClientExited)
            if world.machine.state == "draining":
                world.timer("drain")
        assert world.machine.state == "ended"
        assert not world.timers
        killed = {i.server for i in world.others if isinstance(i, e.Kill)}
        assert world.alive <= killed, "a server would be left behind"
