"""What the machine of a process receives, and what it answers. Times are CLOCK_MONOTONIC nanoseconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

# --- events ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    t: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientArrived(Event):
    """A program has shaken hands and waits for its server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted(Event):
    """A server that outlived an earlier daemon has announced itself, with everything it has. It is server 0."""

    opened: bool = True  # its devices
    detour: bool = False  # a move had requested its shadow in host memory
    joining: bool = False  # it makes communicators
    interrupted: RecoveryRecord | None = None  # the recovery in whose middle the earlier daemon ended


@dataclass(frozen=True, slots=True, kw_only=True)
class HolderAdopted(Event):
    """Likewise, the holder of a suspended process. It is server 0."""

    where: str  # host or file


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored(Event):
    """It comes from a checkpoint: the daemon has what a suspended process consists of, and no holder has it yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Orphaned(Event):
    """Its server ended while no daemon was there, and everything that the server had was kept."""

    reason: str
    opened: bool = True  # otherwise it had nothing, and the next one finds out
    interrupted: RecoveryRecord | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientExited(Event):
    reason: str = "the program has exited"


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested(Event):
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HandleMissed(Event):
    """A descriptor that the server handed over could not be taken: without it the process cannot be recovered."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Salvaged(Event):
    """Its last checkpoint is made, or cannot be: the process may be lost."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLost(Event):
    """One of its devices is gone with its memory: nothing goes on in its servers. The next ones get another device."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaDiffers(Event):
    """Its device memory is not what other ranks have there, which had the same."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerFired(Event):
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerEvent(Event):
    server: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SpawnFailed(ServerEvent):
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello(ServerEvent):
    warm_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Unavailable(ServerEvent):
    """Instead of hello: its device cannot be used. It exits next."""

    error: int  # CUresult, as a program would get it without us
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready(ServerEvent):
    generation: int = 1
    opened: bool = True  # its devices; otherwise `Opened` follows


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened(ServerEvent):
    """The program needs its devices from now on, and they are open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joining(ServerEvent):
    """Communicators of the process are being made, or no longer."""

    joining: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseReached(ServerEvent):
    name: Literal["mapped", "restored", "replayed", "resumed"]
    at: int
    records: int = 0
    compared: int = 0
    differing: int = 0
    first_difference: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotCommitted(ServerEvent):
    number: int
    sequence: int
    ms: float = 0.0
    off_device: bool = False  # its whole shadow


@dataclass(frozen=True, slots=True, kw_only=True)
class Faulted(ServerEvent):
    """A sticky fault. `sequence`: the record whose work it was; 0 where the device could not tell, and then it was one
    after `after` and not after `until`."""

    sequence: int
    op: str
    error: int
    text: str
    at: int
    after: int = 0
    until: int = 0
    expected: int | None = None  # the stall that was expected then, ns
    shared: bool = False  # another process's work may have caused it: MPS tells all of its clients the same


@dataclass(frozen=True, slots=True, kw_only=True)
class Stranded(ServerEvent):
    """It cannot go on, by no fault of its own: the MPS that it is a client of is gone, or nothing is promised of it."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramError(ServerEvent):
    sequence: int
    error: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectionFires(ServerEvent):
    id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GarbageFound(ServerEvent):
    position: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SaidBye(ServerEvent):
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Misbehaved(ServerEvent):
    """The server broke the protocol, or closed its connection."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending(ServerEvent):
    """None of the server's code will run any more, and everything that it sent was delivered. Its exit follows, once it
    has given its device back; until then what it had the device do may still write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited(ServerEvent):
    """The server's pidfd became readable. Everything it had sent before was delivered before this."""

    status: str  # for people: "killed by SIGKILL", "exit code 3"
    clean: bool = False  # exit code 0
    killed: bool = False  # by SIGKILL: no program can cause that
    since: int = 0  # the first sign of its end, where that was seen before: an exit takes long
    expected: int | None = None  # the stall that was expected then, ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouped(Event):
    """Is it tied to other processes by a communicator?"""

    on: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLost(Event):
    """Another member's server is lost: all recover together."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupHung(Event):
    """No member gets any further: all recover together. Whose device or program it is that hangs is not known."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupGo(Event):
    """Every member waits for its next server. They begin at the round that was decided last."""

    decided: int  # 0: none
    gone: tuple[str, ...] = ()  # communicators that are not made again
    communicators: tuple[int, ...] = ()  # attempts at making them ahead, of which all ranks have theirs


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupWoken(Event):
    """It is suspended, and others are not that were suspended with it: a daemon was lost in the middle, or a node was
    not in reach."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupHopeless(Event):
    """A member cannot be recovered, so nobody can."""

    reason: str


# --- what is injected, recorded ----------------------------------------------------------------------------------

InjectPoint = Literal["record", "kernel", "copy", "snapshot", "replay", "import"]
InjectKind = Literal["kill", "fault", "hang", "flip"]


@dataclass(frozen=True, slots=True)
class Injection:
    id: int
    point: InjectPoint
    kind: InjectKind
    sequence: int
    error: int
    address: int = 0  # of a flip: the byte whose lowest bit changes


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectRequested(Event):
    injection: Injection


FaultKind = Literal["device", "server", "injected", "protocol", "garbage", "timeout", "spawn", "program", "corruption"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRecord:
    number: int  # of this process, from 1
    kind: FaultKind
    t: int  # when it was detected
    text: str
    sequence: int | None = None  # of the journal record whose work faulted
    op: str | None = None
    error: int | None = None  # CUresult
    injection: int | None = None


INTERRUPTED = "xmigd ended during this recovery"  # in its story, with how it went on: outcome `interrupted`
Outcome = Literal["running", "resumed", "lost", "abandoned", "interrupted"]
StandbyKind = Literal["warm", "warming", "spawned"]


@dataclass(slots=True, kw_only=True)
class RecoveryRecord:
    """One recovery, from the first fault to the moment the program goes on, over all its attempts."""

    number: int  # of this process, from 1
    cause: str
    fault: int | None  # the FaultRecord that began it
    occurred: int
    detected: int
    expected: int | None = None  # the stall that was expected when it occurred, ns; None: not known
    standby: StandbyKind = "warm"
    attempts: int = 1
    snapshot: int = 0
    standby_ready: int | None = None
    mapped: int | None = None
    restored: int | None = None
    replayed: int | None = None
    resumed: int | None = None
    records: int | None = None
    compared: int | None = None
    differing: int | None = None
    first_difference: int | None = None
    delivered_sequence: int | None = None
    delivered_error: int | None = None
    outcome: Outcome = "running"
    story: list[str] = field(default_factory=list)


# --- instructions ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Instruction:
    pass


@dataclass(frozen=True, slots=True)
class Spawn(Instruction):
    server: int
    device: str | None = None  # another one than the process's
    late: bool = False  # it opens its devices when the process needs them, not before it says hello


@dataclass(frozen=True, slots=True)
class StayApart(Instruction):
    """Its next servers are no clients of MPS: whether a fault is its own is seen where no other process has a part."""

    why: str


@dataclass(frozen=True, slots=True)
class AskSnapshot(Instruction):
    server: int
    host: bool | None = None  # from now on, is the whole shadow kept in host memory? None: as before


@dataclass(frozen=True, slots=True)
class Kill(Instruction):
    server: int
    why: str


@dataclass(frozen=True, slots=True)
class Deliver:
    sequence: int
    error: int


@dataclass(frozen=True, slots=True)
class Careful:
    """The replay does the records after `after` up to `until` one by one, waiting for the device after each: if the
    fault occurs there again, it is known whose it is."""

    after: int
    until: int


@dataclass(frozen=True, slots=True)
class Assign(Instruction):
    """Give the process to a server. `recover` and `resume`: with every memory handle, then `go`."""

    server: int
    mode: Literal["fresh", "recover", "lost", "move", "resume"]
    deliver: Deliver | None = None
    careful: Careful | None = None
    injections: tuple[Injection, ...] = ()
    error: int = 0
    text: str = ""
    decided: int | None = None  # of a group's member: see GroupGo
    gone: tuple[str, ...] = ()
    communicators: tuple[int, ...] = ()
    hold: bool = False  # of a recovery: it stands before the replay, and its snapshot is copied


@dataclass(frozen=True, slots=True)
class Prepare(Instruction):
    """Have a server prepare to recover the process, with every memory handle, as long as the lost one ends: whatever
    writes nothing that others have. `Enter` follows."""

    server: int
    deliver: Deliver | None = None
    careful: Careful | None = None
    injections: tuple[Injection, ...] = ()


@dataclass(frozen=True, slots=True)
class Enter(Instruction):
    """The lost server has ended: give the process to the one that has prepared."""

    server: int


@dataclass(frozen=True, slots=True)
class GroupBroken(Instruction):
    """The server of a group's member is lost, or is about to be."""

    reason: str


@dataclass(frozen=True, slots=True)
class AwaitGroup(Instruction):
    """It has none, and its next one gets the process after `GroupGo`."""


@dataclass(frozen=True, slots=True)
class Arm(Instruction):
    server: int
    injection: Injection


@dataclass(frozen=True, slots=True)
class Admit(Instruction):
    """Let the program in: answer its handshake."""


@dataclass(frozen=True, slots=True)
class Refuse(Instruction):
    error: int  # CUresult
    message: str


@dataclass(frozen=True, slots=True)
class SignalClient(Instruction):
    signal: int
    why: str


@dataclass(frozen=True, slots=True)
class SetTimer(Instruction):
    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class ClearTimer(Instruction):
    name: str


@dataclass(frozen=True, slots=True)
class SaveState(Instruction):
    """The process is in a new state; for the database and the log."""

    state: str
    server: int | None
    why: str


@dataclass(frozen=True, slots=True)
class SaveFault(Instruction):
    record: FaultRecord


@dataclass(frozen=True, slots=True)
class SaveRecovery(Instruction):
    record: RecoveryRecord


@dataclass(frozen=True, slots=True)
class Release(Instruction):
    """Close the process's journal and memory: nobody will need them."""


@dataclass(frozen=True, slots=True)
class Finish(Instruction):
    """The program is gone and so is everything of it."""
