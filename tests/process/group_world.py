"""Ranks whose machines, servers and groups run together, each message by itself: what they do, and what must never
happen. Servers only count; a program is a list of operations that never waits."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from xmigd.groups import groups as g
from xmigd.groups.groups import Groups, Who
from xmigd.process import events as e
from xmigd.process.limits import Limits
from xmigd.process.machine import Machine

NAMES = {"n": "a" * 64, "m": "b" * 64, "k": "c" * 64}
MS = 1_000_000
MEMBERS = {"n": (0, 1, 2, 3), "m": (0, 1), "k": (1, 2)}
OPERATIONS = ("n", "n:0>1", "m", "k", "n:2>3", "m", "n", "n:3>0", "k")  # over and over


def ranks_of(operation: str) -> tuple[int, ...]:
    name, _, pair = operation.partition(":")
    return tuple(int(one) for one in pair.split(">")) if pair else MEMBERS[name]


def key_of(operation: str) -> str:
    name, _, pair = operation.partition(":")
    return NAMES[name] + (f":{pair}" if pair else "")


@dataclass
class Journal:
    """What outlives a server."""

    position: int = 0  # operations that the program has issued and a server executed
    taken: tuple[int, int] = (0, 0)  # round, position of the last group snapshot
    prepared: tuple[int, int] = (0, 0)
    decided: int = 0


@dataclass
class ModelServer:
    """Of one rank. `doing`: what it does now."""

    rank: int
    number: int
    doing: str = "new"  # runs, stopping, stopped, held
    round: int = 0
    wanted: dict[str, int] = field(default_factory=dict)
    inbox: deque[tuple[str, dict[str, Any]]] = field(default_factory=deque)
    outbox: deque[tuple[str, dict[str, Any]]] = field(default_factory=deque)
    alive: bool = True
    killed: bool = False


class GroupWorld:
    def __init__(self) -> None:
        self.t = 1_000
        self.groups = Groups(100)
        self.machines = [Machine(Limits(max_attempts=1000, stable_after=1)) for _ in range(4)]
        self.journals = [Journal() for _ in range(4)]
        self.servers: dict[tuple[int, int], ModelServer] = {}
        self.timers: list[dict[str, float]] = [{} for _ in range(4)]
        self.events: deque[Any] = deque()
        self.busy = False
        self.committed = 0  # rounds
        self.exited: set[int] = set()
        self.takes: dict[int, set[int]] = {}  # by round, who was sent `take`
        self.groups.open(self.t)
        for rank in range(4):
            self.tell(rank, e.ClientArrived)
            for server in (0, 1):
                self.tell(rank, e.Hello, server=server)
                if server == 0:
                    self.tell(rank, e.Ready, server=0)
        for name, members in MEMBERS.items():
            for number, rank in enumerate(members):
                self.group("communicator", self.who(rank), NAMES[name], number, len(members), "joined")

    def who(self, rank: int) -> Who:
        return Who(str(rank), 1000, "job")

    # --- the daemon ------------------------------------------------------------------------------------------------

    def tell(self, rank: int, kind: type[e.Event], **fields: Any) -> None:
        self.t += 1_000
        for instruction in self.machines[rank].handle(kind(t=self.t, **fields)):
            self.do_machine(rank, instruction)
        self.machines[rank].validate_state()

    def group(self, method: str, *arguments: Any) -> None:
        self.events.append((method, arguments))
        if self.busy:
            return
        self.busy = True
        while self.events:
            name, given = self.events.popleft()
            self.t += 1_000
            for instruction in getattr(self.groups, name)(self.t, *given):
                self.do_group(instruction)
        self.busy = False
        self.check()

    def do_machine(self, rank: int, instruction: e.Instruction) -> None:
        match instruction:
            case e.Spawn(number):
                self.servers[rank, number] = ModelServer(rank, number)
            case e.Assign(number, mode):
                server = self.servers[rank, number]
                assert not any(one.alive and one.doing != "new" for one in self.of(rank)), "two servers would execute"
                if mode == "recover":
                    assert instruction.decided is not None, "it recovers alone"
                    self.recover(server, instruction.decided)
                server.doing = "runs" if mode != "lost" else "losing"
            case e.Prepare():
                raise AssertionError("nothing is prepared ahead for a group's member")
            case e.Kill(number):
                self.servers[rank, number].killed = True
            case e.SetTimer(name, seconds):
                self.timers[rank][name] = seconds
            case e.ClearTimer(name):
                self.timers[rank].pop(name, None)
            case e.GroupBroken(reason):
                self.group("broken", str(rank), reason)
            case e.AwaitGroup():
                self.group("awaits", str(rank))
            case e.SaveState(state="losing" | "lost", why=why):
                self.group("lost", str(rank), why)
            case e.SaveState(state="draining" | "ended"):
                self.group("gone", str(rank))
            case _:
                pass

    def recover(self, server: ModelServer, decided: int) -> None:
        """Every member of the group goes back to that round, whichever part it had in it."""
        journal = self.journals[server.rank]
        if journal.prepared[0] == decided:
            journal.taken = journal.prepared
        assert journal.taken[0] == decided, "members would go on from different rounds"
        journal.position = journal.taken[1]
        for name, phase in enumerate(("mapped", "restored", "replayed", "resumed")):
            server.outbox.append(("phase", {"name": phase, "records": name + self.t}))

    def do_group(self, instruction: g.Instruction) -> None:
        rank = int(instruction.process)
        match instruction:
            case g.Tie(on=on):
                self.tell(rank, e.Grouped, on=on)
            case g.Stop(round=round, counts=counts):
                self.send(rank, "stop", round=round, counts=dict(counts))
            case g.Hold(round=round):
                self.send(rank, "hold", round=round)
            case g.Take(round=round):
                self.takes.setdefault(round, set()).add(rank)
                self.send(rank, "take", round=round)
            case g.Continue(round=round):
                assert round not in self.takes, "a decision was taken back"
                self.send(rank, "continue", round=round)
            case g.Break(reason=reason):
                self.tell(rank, e.GroupLost, reason=reason)
            case g.Hopeless(reason=reason):
                self.tell(rank, e.GroupHopeless, reason=reason)
            case g.Recover(members=members):
                decided = max(self.journals[int(one)].decided for one in members)
                for one, gone in members.items():
                    self.tell(int(one), e.GroupGo, decided=decided, gone=gone)
            case _:
                pass

    def send(self, rank: int, type: str, **fields: Any) -> None:
        number = self.machines[rank].active
        if number is not None and (server := self.servers.get((rank, number))) is not None:
            server.inbox.append((type, fields))

    def check(self) -> None:
        """Of what is decided, everybody had prepared his part, and the parts fit."""
        for round, takers in self.takes.items():
            positions = {}
            for rank in takers:
                journal = self.journals[rank]
                if journal.prepared[0] == round:
                    positions[rank] = journal.prepared[1]
            for operation in OPERATIONS:
                ranks = [rank for rank in ranks_of(operation) if rank in positions and rank not in self.exited]
                counts = {self.count(rank, operation, positions[rank]) for rank in ranks}
                assert len(counts) <= 1, "a snapshot in the middle of an operation"

    # --- the servers -----------------------------------------------------------------------------------------------

    def of(self, rank: int) -> list[ModelServer]:
        return [server for server in self.servers.values() if server.rank == rank]

    def count(self, rank: int, operation: str, position: int) -> int:
        """How often its first `position` operations were this one."""
        own = [one for one in OPERATIONS if rank in ranks_of(one)]
        if operation not in own:
            return 0
        key = key_of(operation)
        whole = sum(key_of(one) == key for one in own) * (position // len(own))
        return whole + sum(key_of(one) == key for one in own[: position % len(own)])

    def counts(self, rank: int) -> dict[str, int]:
        journal = self.journals[rank]
        found = {}
        for operation in OPERATIONS:
            if rank in ranks_of(operation):
                since = self.count(rank, operation, journal.taken[1])
                found[key_of(operation)] = self.count(rank, operation, journal.position) - since
        return found

    def execute(self, server: ModelServer) -> None:
        if server.alive and server.doing in ("runs", "stopping"):
            self.journals[server.rank].position += 1
            self.look(server)

    def look(self, server: ModelServer) -> None:
        counts = self.counts(server.rank)
        if server.doing == "stopping" and all(counts.get(key, 0) >= most for key, most in server.wanted.items()):
            server.doing = "stopped"
            server.outbox.append(("stopped", {"number": server.round, "counts": counts}))

    def receive(self, server: ModelServer) -> None:
        type, fields = server.inbox.popleft()
        if not server.alive or server.doing in ("new", "losing"):
            return
        journal = self.journals[server.rank]
        if type == "stop":
            server.doing, server.round, server.wanted = "stopping", fields["round"], fields["counts"]
            self.look(server)
        elif server.round != fields["round"]:
            return
        elif type == "hold":
            server.doing = "held"
            journal.prepared = (server.round, journal.position)
            server.outbox.append(("held", {"number": server.round}))
        elif type == "take":
            assert server.doing == "held"
            assert journal.prepared[0] == server.round
            journal.decided, journal.taken = server.round, journal.prepared
            server.doing = "runs"
            server.outbox.append(("committed", {"number": server.round}))
            self.committed += 1
        else:
            server.doing = "runs"

    def deliver(self, server: ModelServer) -> None:
        """One message of it reaches the daemon."""
        type, fields = server.outbox.popleft()
        if server.number != self.machines[server.rank].active:
            return
        if type == "phase":
            self.tell(server.rank, e.PhaseReached, server=server.number, at=self.t, **fields)
        else:
            self.group(type, str(server.rank), *fields.values())

    def die(self, server: ModelServer) -> None:
        """Its end is seen when all that it has sent was."""
        server.alive = False

    def exit(self, server: ModelServer) -> None:
        while server.outbox:
            self.deliver(server)
        del self.servers[server.rank, server.number]
        clean = server.doing == "losing"
        self.tell(server.rank, e.Exited, server=server.number, status="killed", killed=not clean, clean=clean)

    def wake(self) -> None:
        due = self.groups.due
        if due is not None:
            self.t = max(self.t, due)
            self.group("wake")

    def timer(self, rank: int, name: str) -> None:
        del self.timers[rank][name]
        self.tell(rank, e.TimerFired, name=name)

    def quieten(self) -> bool:
        """One thing that must happen by itself. False: nothing is left."""
        for server in list(self.servers.values()):
            if server.alive and server.inbox:
                self.receive(server)
            elif server.alive and server.doing == "new" and self.spawning(server):
                self.tell(server.rank, e.Hello, server=server.number)
            elif server.alive and server.doing == "losing":
                server.alive = False
            elif server.outbox:
                self.deliver(server)
            elif not server.alive or server.killed:
                server.alive = False
                self.exit(server)
            elif server.doing == "stopping":
                self.execute(server)
            else:
                continue
            return True
        for rank, timers in enumerate(self.timers):
            if "spawn" in timers:
                self.timer(rank, "spawn")
                return True
            if "drain" in timers:
                self.timer(rank, "drain")
                return True
        return False

    def spawning(self, server: ModelServer) -> bool:
        return self.machines[server.rank].servers.get(server.number) == "spawning"
