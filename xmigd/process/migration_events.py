"""What a move receives, and what it answers. Times are CLOCK_MONOTONIC nanoseconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from xmigd.process.events import Event, Injection, Instruction, ServerEvent

Kind = Literal["move", "suspend", "resume"]
Phase = Literal[
    "planning", "preparing", "copying", "committing", "handing_over", "taking", "keeping", "releasing", "rolling_back",
    "over",
]  # fmt: skip
Outcome = Literal["running", "done", "failed", "cancelled"]
Location = Literal["device", "moving", "host", "file", "lost"]
Leaving = Literal["", "waits", "leaves"]  # of a rank (Move.leaving)
Path = Literal["peer", "host"]  # how a move's content goes: from device to device, or through host memory


@dataclass(frozen=True, slots=True)
class Reason:
    """Why not: a stable code and a sentence."""

    code: str
    text: str


# --- events ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveRequested(Event):
    """The plan allows it. For a suspension `target` is `host` or `file`, otherwise a device. `ranks`: of a resumption,
    others are resumed with it."""

    record: MigrationRecord
    ranks: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveEvent(Event):
    """Something that only a move under way is interested in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRequested(MoveEvent):
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class IntentWritten(MoveEvent):
    """It is on the disk who hands over to whom: a daemon that comes later knows whom to wait for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IntentFailed(MoveEvent):
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveServerEvent(ServerEvent):
    """Likewise, of one of its servers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundProgress(MoveServerEvent):
    number: int
    copied_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundDone(MoveServerEvent):
    number: int
    total_bytes: int
    copied_bytes: int
    differing_bytes: int
    ms: float
    loading_ms: float  # of code, after that


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFailed(MoveServerEvent):
    """The target says that it cannot."""

    code: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedOver(MoveServerEvent):
    """The source stands still between two records, and its last snapshot is the state."""

    snapshot: int
    drained: int
    snapshot_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoverFailed(MoveServerEvent):
    """The source goes on. Also of a suspension, at any time before it is suspended."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspendProgress(MoveServerEvent):
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared(MoveServerEvent):
    ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspended(MoveServerEvent):
    """The source stands still, and everything that is needed is in host memory or in files."""

    snapshot: int
    total_bytes: int
    at: int
    ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept(MoveServerEvent):
    """The holder has every descriptor: the daemon may die."""


# Of a rank, which is suspended and resumed with all others of its group.


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSuspends(MoveEvent):
    """All ranks hold, and are suspended with this round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSuspended(MoveEvent):
    """All ranks stand suspended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupResumes(MoveEvent):
    """All ranks' targets have everything. `gone`: communicators that lack ranks, and are not made again."""

    gone: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRefuses(MoveEvent):
    """Not all ranks can, so none does."""

    text: str


# Reported by the machine of the process, which owns the servers.


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetReady(MoveEvent):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetGone(MoveEvent):
    """Its exit was seen; or it could not be started."""

    code: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetPhase(MoveEvent):
    name: Literal["mapped", "restored", "replayed", "resumed"]
    at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSnapshot(MoveEvent):
    number: int
    ms: float = 0.0
    off_device: bool = False  # its whole shadow


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotStands(MoveServerEvent):
    """The source has done nothing since that snapshot, and takes no other."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceGone(MoveEvent):
    """The source's exit was seen."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLeft(MoveEvent):
    """After LeaveDevice: the exits of all were seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HolderGone(MoveEvent):
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramGone(MoveEvent):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeIsUp(MoveEvent):
    pass


# --- the record ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PhaseTime:
    name: str
    at: int


@dataclass(frozen=True, slots=True)
class Iteration:
    number: int
    copied_bytes: int
    dirty_bytes: int  # still different when the round ended: the snapshot had moved on
    ms: float
    loading_ms: float  # of code that the program had loaded since the round before, or since its start


@dataclass(slots=True, kw_only=True)
class MigrationRecord:
    """One move, suspension or resumption. What is not known is None."""

    id: str
    kind: Kind
    process: str
    operation: str | None = None
    source: str  # a device, or host or file
    target: str
    engine: str = "proxy"
    started: int
    ended: int | None = None
    max_downtime_ms: float | None = None
    state: Outcome = "running"
    phase: Phase = "planning"
    phases: list[PhaseTime] = field(default_factory=list)
    iterations: list[Iteration] = field(default_factory=list)
    total_bytes: int | None = None
    processed_bytes: int | None = None
    bytes_per_s: float | None = None
    dirty_bytes_per_s: float | None = None
    expected_downtime_ms: float | None = None
    expected_downtime_basis: str | None = None
    downtime_ms: float | None = None
    setup_ms: float | None = None  # until the target was ready, or the memory of a suspension was there
    code: str | None = None  # of the error
    error: str | None = None
    location: Location = "device"  # of the process, as it is by this record
    path: Path | None = None  # of a move
    device: str = ""  # the device of the process, while its location is a device
    target_pid: int | None = None
    target_start_time: int | None = None  # with the pid, its identity: a daemon that comes later looks for it


# --- instructions --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GiveTarget(Instruction):
    """`move`: with every shadow and image of the source, which go on coming. `resume`: the same, then `go`."""

    server: int
    mode: Literal["move", "resume"]
    injections: tuple[Injection, ...] = ()
    waits: bool = False  # before it executes anything, until `LetIn`


@dataclass(frozen=True, slots=True)
class LetIn(Instruction):
    server: int
    gone: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Waits(Instruction):
    """Of a rank: it has done its part, and goes on when all others have. `what`: it is prepared for a suspension,
    stands suspended, or has everything that a resumption needs."""

    what: Literal["prepared", "suspended", "restored"]


@dataclass(frozen=True, slots=True)
class AskRound(Instruction):
    server: int
    number: int
    snapshot: int


@dataclass(frozen=True, slots=True)
class WriteIntent(Instruction):
    """Write the record down, with both servers' identities. Answered by IntentWritten or IntentFailed."""

    record: MigrationRecord
    target: int


@dataclass(frozen=True, slots=True)
class AskHandover(Instruction):
    server: int


@dataclass(frozen=True, slots=True)
class Take(Instruction):
    """The process is the target's."""

    server: int
    snapshot: int


@dataclass(frozen=True, slots=True)
class GoOn(Instruction):
    """The source goes on where it stands."""

    server: int


@dataclass(frozen=True, slots=True)
class PrepareSuspend(Instruction):
    server: int
    to: str
    ranks: bool = False  # all ranks of its group are


@dataclass(frozen=True, slots=True)
class AskSuspend(Instruction):
    server: int


@dataclass(frozen=True, slots=True)
class AbortSuspend(Instruction):
    server: int


@dataclass(frozen=True, slots=True)
class SpawnHolder(Instruction):
    server: int


@dataclass(frozen=True, slots=True)
class GiveHolder(Instruction):
    """Every descriptor that the process will need."""

    server: int
    where: str


@dataclass(frozen=True, slots=True)
class Switch(Instruction):
    """The target has the process: what it holds takes the place of the source's device memory."""

    record: MigrationRecord
    server: int


@dataclass(frozen=True, slots=True)
class DropDeviceMemory(Instruction):
    """The process is suspended: nothing of it stays on the device."""


@dataclass(frozen=True, slots=True)
class SaveMigration(Instruction):
    """In the middle, or at the end: then together with where the process lives."""

    record: MigrationRecord


@dataclass(frozen=True, slots=True)
class Progress(Instruction):
    record: MigrationRecord


# Between a move and the machine of its process, which does them itself.


@dataclass(frozen=True, slots=True)
class WantTarget(Instruction):
    """A new server on the target's device; its number is the move's `target` from now on."""


@dataclass(frozen=True, slots=True)
class Dismiss(Instruction):
    """Kill one of its servers."""

    server: int
    why: str


@dataclass(frozen=True, slots=True)
class Patience(Instruction):
    """TimeIsUp after so long, from now."""

    seconds: float


@dataclass(frozen=True, slots=True)
class WantHolder(Instruction):
    """It will be needed soon."""


@dataclass(frozen=True, slots=True)
class KeepNow(Instruction):
    """Everything is where it can stay. Answered by Kept or HolderGone."""


@dataclass(frozen=True, slots=True)
class DropStandby(Instruction):
    """There will be nothing to take over. If it fails, there will be one again."""


@dataclass(frozen=True, slots=True)
class LeaveDevice(Instruction):
    """Nothing of the process may stay on the device. Answered by DeviceLeft."""


@dataclass(frozen=True, slots=True)
class Parked(Instruction):
    """Its servers are gone and were meant to: the process is suspended."""


@dataclass(frozen=True, slots=True)
class Over(Instruction):
    """It is over. `source_lost`: nobody has the process, and the source is to be recovered."""

    source_lost: bool = False
