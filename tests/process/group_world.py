"""Ranks whose machines, servers and groups run together, each message by itself: what they do, and what must never
happen. Servers only count; a program is a list of operations that never waits."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from xmigd.groups import instructions as i
from xmigd.groups.groups import Groups
from xmigd.groups.resumptions import LetIn, NotResumed, Resumptions
from xmigd.groups.ties import Who
from xmigd.ipc import messages as m
from xmigd.process import events as e
from xmigd.process import migration_events as v
from xmigd.process.limits import Limits
from xmigd.process.machine import Machine
from xmigd.ranks.history import History

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
    suspended: int = 0  # the round with which it was
    prepared_with: tuple[str, int] = ("", 0)  # the communicators of the server that has prepared it


@dataclass
class ModelServer:
    """Of one rank. `doing`: what it does now. It may be a holder."""

    rank: int
    number: int
    doing: str = "new"  # runs, stopping, stopped, held, parked; restoring: until it is let in
    round: int = 0
    wanted: dict[str, int] = field(default_factory=dict)
    inbox: deque[tuple[str, dict[str, Any]]] = field(default_factory=deque)
    outbox: deque[tuple[str, dict[str, Any]]] = field(default_factory=deque)
    alive: bool = True
    killed: bool = False
    # With which communicators: those that all have made at their beginning, together after a loss, or for a move.
    communicates: tuple[str, int] = ("begun", 0)


class GroupWorld:
    def __init__(self) -> None:
        self.t = 1_000
        self.groups = Groups(100)
        self.resumptions = Resumptions()
        self.history = History()
        self.events_of: list[deque[tuple[type[e.Event], dict[str, Any]]]] = [deque() for _ in range(4)]
        self.telling = [False] * 4
        self.moves = 0
        self.slept = 0  # ranks
        self.machines = [Machine(Limits(max_attempts=1000, stable_after=1)) for _ in range(4)]
        self.journals = [Journal() for _ in range(4)]
        self.servers: dict[tuple[int, int], ModelServer] = {}
        self.timers: list[dict[str, float]] = [{} for _ in range(4)]
        self.events: deque[Any] = deque()
        self.busy = False
        self.committed = 0  # rounds
        self.exited: set[int] = set()
        self.takes: dict[int, set[int]] = {}  # by round, who was sent `take`
        self.hands_over: dict[int, int] = {}  # ranks that wait for the round at which they leave: to which server
        self.left: set[str] = set()  # that have left at a round, and whose moves are not over yet
        self.recovered = 0  # times
        self.resumed = 0
        self.made_after: list[tuple[str, int]] = [("begun", 0)] * 4  # what a rank's next server makes
        self.moved = 0
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
        self.events_of[rank].append((kind, fields))
        if self.telling[rank]:
            return
        self.telling[rank] = True
        while self.events_of[rank]:
            event, given = self.events_of[rank].popleft()
            self.t += 1_000
            for instruction in self.machines[rank].handle(event(t=self.t, **given)):
                self.do_machine(rank, instruction)
            self.machines[rank].validate_state()
        self.telling[rank] = False

    def group(self, method: str, *arguments: Any) -> None:
        self.observe(method, *arguments)
        self.events.append((method, arguments))
        if self.busy:
            return
        self.busy = True
        while self.events:
            name, given = self.events.popleft()
            self.t += 1_000
            if name in ("hand_over", "move_over", "gave_up"):
                getattr(self, name)(*given)
                continue
            of_resumption = name in ("restored", "failed_to_resume", "gone_meanwhile")
            method = name.removesuffix("_to_resume").removesuffix("_meanwhile")
            instructions = (
                getattr(self.resumptions, method)(*given)
                if of_resumption
                else getattr(self.groups, name)(self.t, *given)
            )
            for instruction in instructions:
                self.do_group(instruction)
        self.busy = False
        self.check()

    def observe(self, method: str, *arguments: Any) -> None:
        match method, arguments:
            case "communicator", (who, name, rank, ranks, state):
                message = m.Communicator(type="communicator", name=name, rank=rank, ranks=ranks, state=state)
                self.history.reported(self.t, who, message)
            case "stopped", (process, number, counts, behind):
                stopped = m.GroupStopped(type="group_stopped", round=number, counts=counts, behind=behind)
                self.history.reported(self.t, self.who(int(process)), stopped)
            case "held", (process, number):
                held = m.GroupHeld(type="group_held", round=number)
                self.history.reported(self.t, self.who(int(process)), held)
            case "committed", (process, number):
                self.history.committed(self.t, process, number)

    def changed(self, rank: int, instruction: e.Instruction) -> None:
        self.history.changed(self.t, str(rank), instruction)

    def do_machine(self, rank: int, instruction: e.Instruction) -> None:
        self.changed(rank, instruction)
        match instruction:
            case e.Spawn(number):
                self.servers[rank, number] = ModelServer(rank, number)
            case e.Assign(number, mode):
                server = self.servers[rank, number]
                assert not any(one.alive and one.doing not in ("new", "copying") for one in self.of(rank)), (
                    "two servers would execute"
                )
                if mode == "recover":
                    assert instruction.decided is not None, "it recovers alone"
                    self.recover(server, instruction.decided)
                    server.communicates = self.made_after[rank]
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
                self.left.discard(str(rank))
                self.hands_over.pop(rank, None)
                self.group("gone", str(rank))
                self.group("gone_meanwhile", str(rank))
            case v.PrepareSuspend(number, ranks=ranks):
                self.servers[rank, number].outbox.append(("prepared", {}))
                if ranks:
                    self.group("suspend", str(rank))
            case v.Waits(what):
                self.group(what, str(rank))
            case v.GiveTarget(number, "move"):
                self.servers[rank, number].doing = "copying"
            case e.AskSnapshot(number) if self.machines[rank].move is not None:
                self.servers[rank, number].outbox.append(("snapshot_stands", {}))
            case v.AskRound(number, of):
                self.servers[rank, number].outbox.append(("round_done", {"number": of}))
            case v.AskHandover():
                target = self.target_of(rank)
                assert target is not None
                self.group("hand_over", str(rank), target)
            case v.Take(number):
                target_server = self.servers[rank, number]
                assert not any(
                    one.alive and one.doing in ("runs", "stopping", "stopped", "held") for one in self.of(rank)
                )
                target_server.doing, target_server.communicates = "runs", ("moved", self.journals[rank].decided)
                target_server.outbox += [("phase", {"name": name, "records": 0}) for name in ("mapped", "resumed")]
            case v.Switch():
                self.moved += 1
            case v.SaveMigration(record) if record.state != "running" or record.phase == "rolling_back":
                if record.kind == "move":
                    self.group("move_over", str(rank))
                if record.state != "done" and (members := self.resumptions.members(str(rank))):
                    self.group("failed_to_resume", str(rank), record.error)
                    self.group("forget", members)
                self.group("stay", str(rank), record.error)
                if record.kind == "suspend" and record.state != "done" and record.code != "program_exited":
                    self.group("refuses", str(rank), record.error)
            case v.SpawnHolder(number):
                self.servers[rank, number] = ModelServer(rank, number)
            case v.GiveHolder(number):
                self.servers[rank, number].outbox.append(("kept", {}))
            case v.WriteIntent():
                self.tell(rank, v.IntentWritten)
            case v.GiveTarget(number, "resume", waits=True):
                self.restore(self.servers[rank, number])
            case v.LetIn(number):
                self.servers[rank, number].doing = "runs"
                self.servers[rank, number].communicates = ("resumed", self.resumed)
            case v.GoOn(number):
                self.servers[rank, number].inbox.append(("go_on", {}))
            case v.DropDeviceMemory():
                self.slept += 1
                busy = [one for one in self.servers.values() if one.doing in ("runs", "stopping") and one.alive]
                others = [one for one in busy if one.rank not in self.exited]
                assert not others, "one gives its memory back while another executes"
            case _:
                pass

    def restore(self, target: ModelServer) -> None:
        """It says what the process is a member of, and waits."""
        target.doing = "restoring"
        for name, members in MEMBERS.items():
            if target.rank in members:
                number = members.index(target.rank)
                target.outbox.append(
                    ("communicator", {"name": NAMES[name], "rank": number, "ranks": len(members), "state": "joined"})
                )
        target.outbox += [("phase", {"name": name, "records": 0}) for name in ("mapped", "restored")]

    def begin(self, kind: v.Kind, ranks: list[int]) -> None:
        """Of all of these."""
        if kind == "resume":
            self.groups.forget(self.t, [str(rank) for rank in ranks])
            self.resumptions.begin([str(rank) for rank in ranks])
            self.resumed += 1
        for rank in ranks:
            self.moves += 1
            record = v.MigrationRecord(
                id=str(self.moves), kind=kind, process=str(rank), source="cpu:0",
                target="cpu:1" if kind == "move" else "host", started=self.t,
            )  # fmt: skip
            self.tell(rank, v.MoveRequested, record=record, ranks=kind == "resume")

    def recover(self, server: ModelServer, decided: int) -> None:
        """Every member of the group goes back to that round, whichever part it had in it."""
        journal = self.journals[server.rank]
        if journal.prepared[0] == decided:
            journal.taken = journal.prepared
        assert journal.taken[0] == decided, "members would go on from different rounds"
        journal.position = journal.taken[1]
        for name, phase in enumerate(("mapped", "restored", "replayed", "resumed")):
            server.outbox.append(("phase", {"name": phase, "records": name + self.t}))

    def do_group(self, instruction: i.Instruction) -> None:
        self.history.instructed(self.t, instruction)
        rank = int(instruction.process)
        match instruction:
            case i.Tie(on=on):
                self.tell(rank, e.Grouped, on=on)
            case i.Stop(round=round, counts=counts):
                self.send(rank, "stop", round=round, counts=dict(counts))
            case i.Hold(round=round):
                self.send(rank, "hold", round=round)
            case i.Take(round=round, suspends=suspends, moves=moves, leaves=leaves):
                self.takes.setdefault(round, set()).add(rank)
                if leaves:
                    self.left.add(instruction.process)
                if suspends:
                    self.tell(rank, v.GroupSuspends)
                if not moves or self.moves_with(instruction):
                    self.send(rank, "take", round=round, suspends=suspends, moves=moves, leaves=leaves)
            case i.Stays(reason=reason, changed=False):
                self.stays(rank, reason)
            case i.Settled():
                self.look_at_handovers()
            case i.NotSuspended(reason=reason):
                self.tell(rank, v.GroupRefuses, text=reason)
            case i.AllSuspended():
                self.tell(rank, v.GroupSuspended)
            case LetIn():
                self.tell(rank, v.GroupResumes, gone=self.groups.lacking(str(rank)))
            case NotResumed(reason=reason):
                self.tell(rank, v.GroupRefuses, text=reason)
            case i.Continue(round=round):
                assert round not in self.takes, "a decision was taken back"
                self.send(rank, "continue", round=round)
            case i.Break(reason=reason):
                self.tell(rank, e.GroupLost, reason=reason)
            case i.Hung(reason=reason):
                self.tell(rank, e.GroupHung, reason=reason)
            case i.Hopeless(reason=reason):
                self.tell(rank, e.GroupHopeless, reason=reason)
            case i.Recover(members=members):
                decided = max(self.journals[int(one)].decided for one in members)
                self.recovered += 1
                for one, gone in members.items():
                    self.made_after[int(one)] = ("recovered", self.recovered)
                    self.tell(int(one), e.GroupGo, decided=decided, gone=gone)
            case _:
                pass

    def send(self, rank: int, type: str, **fields: Any) -> None:
        number = self.machines[rank].active
        if number is not None and (server := self.servers.get((rank, number))) is not None:
            server.inbox.append((type, fields))

    # Moves: what carries them out, as supervisor/group.py does.

    def target_of(self, rank: int) -> int | None:
        move = self.machines[rank].move
        return move.target if move is not None and move.feeding else None

    def hand_over(self, process: str, target: int) -> None:
        """All communicators are made ahead at once."""
        self.hands_over[int(process)] = target
        self.look_at_handovers()

    def look_at_handovers(self) -> None:
        """Each waits for one that left before it, until that has a server again."""
        for rank, target in list(self.hands_over.items()):
            name = str(rank)
            if not self.groups.another_leaves(name) and self.left.isdisjoint(self.groups.others(name)):
                GroupWorld.group(self, "leave", name, self.keys(name), {name: (target,)}, 25_000 * MS)

    def keys(self, process: str) -> list[tuple[int, str]]:
        return [(1000, NAMES[name]) for name, members in MEMBERS.items() if int(process) in members]

    def moves_with(self, take: i.Take) -> bool:
        """Can it do its part?"""
        if take.leaves:
            self.hands_over.pop(int(take.process), None)
        return True

    def move_over(self, process: str) -> None:
        self.left.discard(process)
        self.stays(int(process), "it is over")
        self.look_at_handovers()

    def stays(self, rank: int, why: str) -> None:
        active = self.machines[rank].active
        if self.hands_over.pop(rank, None) is not None and active is not None:
            self.tell(rank, v.HandoverFailed, server=active, text=why)

    def check(self) -> None:
        """Of what is decided, everybody had prepared his part, and the parts fit."""
        for round, takers in self.takes.items():
            positions = {}
            for rank in takers:
                journal = self.journals[rank]
                if journal.prepared[0] == round:
                    positions[rank] = journal.prepared[1]
            made = {self.journals[rank].prepared_with for rank in positions if rank not in self.exited}
            assert len(made) <= 1, "a round of ranks that do not communicate with each other"
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
            behind = (sum(counts.values()) + server.rank) % 4  # elsewhere than others, and it stays there
            server.outbox.append(("stopped", {"number": server.round, "counts": counts, "behind": behind or None}))

    def receive(self, server: ModelServer) -> None:
        type, fields = server.inbox.popleft()
        if not server.alive or server.doing in ("new", "losing"):
            return
        journal = self.journals[server.rank]
        if type == "go_on":
            server.doing, journal.suspended = "runs", 0
        elif server.doing in ("parked", "restoring"):
            return
        elif type == "stop":
            server.doing, server.round, server.wanted = "stopping", fields["round"], fields["counts"]
            self.look(server)
        elif server.round != fields["round"]:
            return
        elif type == "hold":
            server.doing = "held"
            journal.prepared, journal.prepared_with = (server.round, journal.position), server.communicates
            server.outbox.append(("held", {"number": server.round}))
        elif type == "take":
            assert server.doing == "held"
            assert journal.prepared[0] == server.round
            journal.decided, journal.taken = server.round, journal.prepared
            server.doing = "runs"
            server.outbox.append(("committed", {"number": server.round}))
            self.committed += 1
            if fields["leaves"]:
                server.doing = "parked"
                server.outbox.append(("handed_over", {}))
            elif fields["moves"]:
                server.communicates = ("moved", server.round)
            if fields["suspends"]:
                server.doing, journal.suspended = "parked", server.round
                server.outbox.append(("suspended", {}))
        else:
            server.doing = "runs"

    def deliver(self, server: ModelServer) -> None:
        """One message of it reaches the daemon."""
        type, fields = server.outbox.popleft()
        machine, about = self.machines[server.rank], {"server": server.number}
        if type == "kept":
            self.tell(server.rank, v.Kept, **about)
            return
        target = machine.move is not None and machine.move.target == server.number
        if server.number != machine.active and not target:
            return
        given_up = machine.state == "suspended" and not self.resumptions.members(str(server.rank))
        if type == "phase":
            self.tell(server.rank, e.PhaseReached, at=self.t, **about, **fields)
        elif type == "prepared":
            self.tell(server.rank, v.Prepared, ms=1.0, **about)
        elif type == "suspended":
            self.tell(server.rank, v.Suspended, snapshot=1, total_bytes=1, at=self.t, ms=1.0, **about)
        elif type == "snapshot_stands":
            self.tell(server.rank, v.SnapshotStands, number=1, **about)
        elif type == "round_done":
            sizes = {"total_bytes": 1, "copied_bytes": 1, "differing_bytes": 1, "ms": 1.0, "loading_ms": 0.0}
            self.tell(server.rank, v.RoundDone, **about, **fields, **sizes)
        elif type == "handed_over":
            self.tell(server.rank, v.HandedOver, snapshot=1, drained=self.t, snapshot_ms=1.0, **about)
        elif type == "communicator" and not given_up:
            self.group("communicator", self.who(server.rank), *fields.values())
        elif type == "communicator":
            pass
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
            if "holder" in timers:
                self.timer(rank, "holder")
                return True
            if "drain" in timers:
                self.timer(rank, "drain")
                return True
        return False

    def spawning(self, server: ModelServer) -> bool:
        return self.machines[server.rank].servers.get(server.number) == "spawning"
