"""A process's machine and everybody around it, in moves and suspensions: what they do, and what must never happen."""

from __future__ import annotations

from typing import Any

from xmigd.process import events as e
from xmigd.process import migration_events as v
from xmigd.process.limits import Limits

from .world import World

MIB = 1 << 20


class MoveWorld(World):
    """Also knows who stands still, and what each move came to."""

    def __init__(self, limits: Limits | None = None) -> None:
        super().__init__(limits)
        self.stopped: set[int] = set()  # have handed over, and were not instructed to go on
        self.requested: set[int] = set()  # were instructed to stop
        self.resumed: set[int] = set()  # targets that have
        self.devices: dict[int, str | None] = {}
        self.records: dict[str, v.MigrationRecord] = {}
        self.device = "cpu:0"
        self.keeping: int | None = None
        self.off_device = False  # the shadow

    def do(self, instruction: e.Instruction) -> None:
        match instruction:
            case e.Spawn(server, device):
                self.devices[server] = device or self.device
                super().do(instruction)
            case v.SpawnHolder(server):
                self.alive.add(server)
            case v.GiveHolder(server):
                assert server in self.alive
                self.keeping = server
            case v.GiveTarget(server, mode):
                assert server in self.alive
                move = self.machine.move
                if move is not None and move.record.path == "host":
                    assert self.off_device, "it could not be reached"
                if mode == "resume":
                    self.holds(server)
            case v.Take(server):
                assert self.stopped or self.machine.active is None
                self.holds(server)
            case v.GoOn(server):
                assert server in self.stopped
                self.stopped.discard(server)
                self.holds(server)
            case v.AskHandover(server) | v.AskSuspend(server):
                self.requested.add(server)
            case v.Switch(record, server):
                assert server in self.resumed
                self.device = record.device
            case v.SaveMigration(record):
                known = self.records.get(record.id)
                assert known is None or known.state == "running", "a move ends once"
                self.records[record.id] = record
            case _:
                super().do(instruction)
        if not self.others or self.others[-1] is not instruction:
            self.others.append(instruction)

    def holds(self, server: int) -> None:
        assert server in self.alive
        assert self.holder is None, f"{server} and {self.holder} would both execute"
        assert not self.released
        self.holder = server

    def exit(self, server: int, clean: bool = False, killed: bool = False, expected: int | None = None) -> None:
        self.stopped.discard(server)
        if self.keeping == server:
            self.keeping = None
        super().exit(server, clean, killed, expected)

    def stops(self, server: int) -> None:
        """It says that it has handed over, or is suspended."""
        if server in self.requested:
            self.requested.discard(server)
            self.stopped.add(server)
            if self.holder == server:
                self.holder = None

    # Longer pieces of stories.

    def record(self, id: str = "1") -> v.MigrationRecord:
        return self.records[id]

    def begin(self, kind: v.Kind = "move", target: str = "cpu:1", id: str = "1", **fields: Any) -> int:
        """Returns the target's number, or the source's of a suspension."""
        record = v.MigrationRecord(
            id=id,
            kind=kind,
            process="p",
            source=self.machine.where or self.device,
            target=target,
            started=self.t,
            **fields,
        )
        self.tell(v.MoveRequested, record=record)
        move = self.machine.move
        if move is None or move.record is not record:
            return -1
        found = move.source if kind == "suspend" else move.target
        assert found is not None
        return found

    def warm(self, target: int) -> None:
        self.tell(e.Hello, server=target)
        self.snapshot()

    def snapshot(self, ms: float = 1.0, *, off_device: bool = False) -> None:
        self.snapshots = getattr(self, "snapshots", 0) + 1
        self.off_device = off_device
        self.tell(
            e.SnapshotCommitted, server=self.machine.active, number=self.snapshots, sequence=self.snapshots, ms=ms,
            off_device=off_device,
        )  # fmt: skip

    def no_peer(self) -> int:
        """A move whose target cannot reach the source; the number of the next target."""
        first = self.begin()
        self.warm(first)
        self.tell(v.TargetFailed, server=first, code="no_peer", text="out of reach")
        assert self.machine.move is not None
        found = self.machine.move.target
        assert found not in (None, first)
        self.exit(first)
        return int(found or 0)

    def round(
        self, target: int, number: int, copied: int, total: int = 100 * MIB, ms: float = 0.0, loading_ms: float = 0.0
    ) -> None:  # fmt: skip
        """At 1 GiB/s."""
        self.tell(
            v.RoundDone, server=target, number=number, total_bytes=total, copied_bytes=copied, differing_bytes=0,
            ms=ms or copied / (1 << 30) * 1e3, loading_ms=loading_ms,
        )  # fmt: skip

    def to_handover(self) -> int:
        target = self.begin()
        self.warm(target)
        self.round(target, 1, 10 * MIB)
        self.tell(v.IntentWritten)
        return target

    def hand_over(self) -> None:
        source = self.machine.active
        assert source is not None
        self.stops(source)
        self.tell(v.HandedOver, server=source, snapshot=self.snapshots, drained=self.t)

    def resume_program(self, target: int) -> None:
        for name in ("mapped", "restored", "replayed"):
            self.tell(e.PhaseReached, server=target, name=name, at=self.t)
        self.resumed.add(target)
        self.tell(e.PhaseReached, server=target, name="resumed", at=self.t)

    def suspend(self, to: str = "host") -> int:
        source = self.begin("suspend", to, id="s")
        self.tell(v.Prepared, server=source, ms=3.0)
        self.stops(source)
        self.tell(v.Suspended, server=source, snapshot=1, total_bytes=MIB, at=self.t, ms=1.0)
        holder = self.machine.holder
        assert holder is not None
        self.tell(e.Hello, server=holder)
        self.tell(v.Kept, server=holder)
        # The device is free when both are gone, in whatever order.
        for server in (source, 1):
            assert self.machine.servers[server] == "dying"
            assert (self.machine.state, self.record("s").phase) == ("running", "releasing")
            self.exit(server, killed=True)
        return holder
