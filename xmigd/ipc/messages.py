"""The control protocol (docs/protocol.md): what servers say, checked; what they are sent, packed.

A server is hostile: a message that does not fit these models ends its connection. Numbers stay below 2^63, so that all
of them fit the database.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from xmigd.errors import ProtocolError
from xmigd.process.events import Assign, Injection

MAX_MESSAGE = 64 << 10
MAX_FDS = 6  # of one message to the daemon
MAX_RANKS = 1024  # of a communicator: journal::kMaxRanks
MAX_ROOM_FDS = 250  # of a `room`: the kernel passes 253 at once

Number = Annotated[int, Field(ge=0, lt=1 << 63)]
Small = Annotated[int, Field(ge=0, lt=1 << 31)]
Text = Annotated[str, Field(max_length=4096)]
Millis = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
JobId = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Name = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]  # of a communicator, and of the meeting that makes it
Rank = Annotated[int, Field(ge=0, lt=MAX_RANKS)]
Ranks = Annotated[int, Field(ge=1, le=MAX_RANKS)]
RoundNumber = Annotated[int, Field(gt=0, lt=1 << 63)]
Hash = Annotated[int, Field(ge=0, lt=1 << 64)]
ChunkHash = tuple[Number, Hash]  # a chunk of device memory: its address, and the hash of what it contains
MOST_CHUNKS = 512  # whose content one message requests
CHUNKS_AT_ONCE = 16  # whose content comes with one answer
CHUNK = 2 << 20  # bytes: journal::kGranule
Chunks = Annotated[tuple[ChunkHash, ...], Field(min_length=1, max_length=MOST_CHUNKS)]
Count = Annotated[str, Field(pattern=r"^[0-9a-f]{64}(:[0-9]{1,4}>[0-9]{1,4})?$")]


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Hello(Message):
    type: Literal["hello"]
    pid: Small
    device: Annotated[str, Field(max_length=64)]
    warm_ms: Millis
    device_bytes: Number


class Unavailable(Message):
    type: Literal["unavailable"]
    error: Annotated[int, Field(ge=1, le=999)]
    text: Text


class Ready(Message):
    type: Literal["ready"]
    generation: Number
    opened: bool = True
    """Has it opened its devices, or does `opened` follow?"""
    t: Number


class Opened(Message):
    """Of a server that has a process: its devices, for the first record or for a request."""

    type: Literal["opened"]
    device_bytes: Number


class Joining(Message):
    """Of a server that has a process: communicators are being made, or no longer."""

    type: Literal["joining"]
    joining: bool


class MemoryAdd(Message):
    type: Literal["memory"]
    op: Literal["add"]
    id: Number
    kind: Literal["device", "shadow", "image"]
    ordinal: Annotated[int, Field(ge=0, lt=64)]
    address: Number
    bytes: Number
    name: Annotated[str, Field(max_length=255)] = ""
    foreign: bool = False
    """Shadow on the device that the job was on before. It stays until the server has dropped it."""
    sealed: bool = False
    """Shadow that a checkpoint has, too: it is read, and never written."""
    change: Number = 0
    """Of the job's memory: its number. 0: it is none, or the server does not say."""


class MemoryDrop(Message):
    type: Literal["memory"]
    op: Literal["drop"]
    id: Number
    change: Number = 0


class Snapshot(Message):
    type: Literal["snapshot"]
    number: Number
    position: Number
    sequence: Number
    ms: Millis
    waited_ms: Millis = 0  # before them, for the device. These four: a server of an earlier version does not say.
    hash_ms: Millis = 0  # of ms, for hashing in place
    copy_ms: Millis = 0  # of ms, for copying and hashing what is copied
    hashed_bytes: Number = 0  # in place
    chunks: Number
    copied_bytes: Number
    live_bytes: Number
    journal_bytes: Number
    objects: Number
    off_device: bool = False
    """Its whole shadow. A server of an earlier version does not say."""
    round: Number = 0
    """Of a group snapshot."""
    reason: Text


class SnapshotStands(Message):
    type: Literal["snapshot_stands"]
    number: Number


class Fault(Message):
    type: Literal["fault"]
    sequence: Number
    op: Annotated[str, Field(max_length=128)]
    error: Small
    text: Text
    t: Number
    after: Number
    until: Number


class Phase(Message):
    type: Literal["phase"]
    name: Literal["mapped", "restored", "replayed", "resumed"]
    t: Number
    records: Number = 0
    compared: Number = 0
    differing: Number = 0
    first_difference: Number | None = None


class ProgramError(Message):
    type: Literal["program_error"]
    sequence: Number
    error: Small


class Injected(Message):
    type: Literal["injected"]
    id: Number


class Garbage(Message):
    type: Literal["garbage"]
    position: Number
    text: Text


class Announce(Message):
    type: Literal["announce"]
    job: JobId
    pid: Small
    device: Annotated[str, Field(max_length=64)]
    client_pid: Small
    generation: Number
    opened: bool = True  # as in `ready`
    keeps: Literal["host", "file"] | None = None
    """Of a holder: where the state of its suspended process is."""
    snapshot: Number | None = None
    """Of a holder: JournalHeader::snapshot when it was given the state."""
    changes: Number = 0  # of its memory, ever: JournalHeader::memory_changes
    takes_output: bool = False  # it knows the message `output`
    takes_backlog: bool = False  # likewise
    has_backlog: bool = False  # from an earlier daemon
    takes_profiling: bool = False  # it knows `profile`, `trace` and `end_trace`
    takes_sharing: bool = False  # it knows `share`
    joining: bool = False  # it makes communicators, as in `joining`
    quota_slots: Annotated[tuple[Small, ...], Field(max_length=8, strict=False)] = ()
    """Of its process in the page of the job's memory quota, by ordinal. None: it has no such page."""


class Announced(Message):
    type: Literal["announced"]


class Kept(Message):
    """A holder has everything that it was given."""

    type: Literal["kept"]


class Paused(Message):
    type: Literal["paused"]
    position: Number
    snapshot: Number = 0
    """That was taken there. 0: none, or a server of an earlier version."""
    t: Number


class Continued(Message):
    type: Literal["continued"]
    position: Number
    t: Number


class Log(Message):
    type: Literal["log"]
    level: Literal["debug", "info", "warning", "error"]
    text: Annotated[str, Field(max_length=MAX_MESSAGE)]


class Bye(Message):
    type: Literal["bye"]
    reason: Text


class Meet(Message):
    """A rank of a communicator says what it offers the others, and with what it was answered. Repeated each second
    until all ranks were."""

    type: Literal["meet"]
    meeting: Name
    rank: Rank
    ranks: Ranks
    offer: Annotated[str, Field(max_length=512, pattern=r"^[0-9a-z -]*$")]
    answer: Annotated[str, Field(max_length=64, pattern=r"^[0-9a-f]*$")] = ""


class Communicator(Message):
    """A rank of a communicator that ties its process to the others."""

    type: Literal["communicator"]
    name: Name
    rank: Rank
    ranks: Ranks
    state: Literal["joined", "ended", "past"]


class CommunicatorFailed(Message):
    """A collective failed: a rank is gone, or (`severed`) the connection with one. Repeated each second until it is
    answered."""

    type: Literal["communicator_failed"]
    name: Name
    rank: Rank
    why: Text
    severed: bool = False


class CommunicatorPrepared(Message):
    """An attempt at making one before it is needed has come to its end. `why` it has failed; empty: it has not."""

    type: Literal["communicator_prepared"]
    attempt: Number
    device_bytes: Number
    why: Text


class MemoryShort(Message):
    """The program lacks so many bytes of this device. `memory_given_up` answers it."""

    type: Literal["memory_short"]
    number: Number
    ordinal: Annotated[int, Field(ge=0, lt=64)]
    bytes: Number


class GroupWanted(Message):
    """A group snapshot is due. Repeated while it is."""

    type: Literal["group_wanted"]
    reason: Text


class GroupStopped(Message):
    """It executes nothing. What it has counted since the last group snapshot: collectives by communicator, and what one
    rank sent to another. `behind`: launches and copies since its last collective, if that is known. `work`: records
    that change device memory, or what is allocated of it, since this server has the process."""

    type: Literal["group_stopped"]
    round: RoundNumber
    counts: dict[Count, Number]
    behind: Number | None
    work: Number | None = None  # a server of an earlier version does not say


class GroupHeld(Message):
    """Everything for the snapshot is prepared; it waits for the decision."""

    type: Literal["group_held"]
    round: RoundNumber


class GroupBusy(Message):
    """It cannot be stopped or held now."""

    type: Literal["group_busy"]
    round: RoundNumber
    why: Text


class GroupStuck(Message):
    """Its device waits for other ranks, and its program for the device, without progress for so long. 0: no longer."""

    type: Literal["group_stuck"]
    seconds: Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]


class ReplicasWanted(Message):
    """So much of the process's memory was lost with a device. `replicas_named` ends the answer."""

    type: Literal["replicas_wanted"]
    bytes: Number


class ChunksWanted(Message):
    """Of what was lost with a device, this was in no memory of this node: content that rank `rank` of those of other
    nodes has, in the order in which they were named. Answered with `chunks_brought`."""

    type: Literal["chunks_wanted"]
    rank: Small
    chunks: Chunks


class ChunksRead(Message):
    """The answer to `read_chunks`. `why`: nothing could be read."""

    type: Literal["chunks_read"]
    number: Number
    examined: Number
    found: Annotated[tuple[Number, ...], Field(max_length=CHUNKS_AT_ONCE)]
    why: Text


class CopiesMade(Message):
    """In host memory, of what only this process's device has at this snapshot. `brought_bytes`: of what is missing,
    this is no part of the snapshot, but what copies from page-locked memory have brought to the device since."""

    type: Literal["copies_made"]
    snapshot: Number
    bytes: Number
    missing_bytes: Number
    brought_bytes: Number | None = None  # None: a server of an earlier version does not know


class Round(Message):
    type: Literal["round"]
    number: Number
    snapshot: Number
    """That was looked at: the one that was requested, or a later one."""
    total_bytes: Number
    copied_bytes: Number
    settled_bytes: Number
    differing_bytes: Number
    ms: Millis
    loading_ms: Millis
    """Of code, after the rest."""


class RoundProgress(Message):
    type: Literal["round_progress"]
    number: Number
    copied_bytes: Number


class MoveFailed(Message):
    type: Literal["move_failed"]
    code: Literal["no_peer", "no_room", "bad_snapshot", "failed"]
    text: Text


class HandedOver(Message):
    type: Literal["handed_over"]
    snapshot: Number
    position: Number
    t: Number
    stopped_t: Number = 0
    """When the last record before the handover had been given to the device. 0: a server that does not say."""
    drained_t: Number
    """When the device had nothing left to do: the hash and the copy of the last snapshot began."""
    snapshot_ms: Millis


class HandoverFailed(Message):
    type: Literal["handover_failed"]
    text: Text


class SuspendProgress(Message):
    type: Literal["suspend_progress"]
    done_bytes: Number
    total_bytes: Number


class Prepared(Message):
    type: Literal["prepared"]
    ms: Millis


class Preloaded(Message):
    """What a standby has loaded ahead, all in all."""

    type: Literal["preloaded"]
    modules: Number
    kernels: Number
    device_bytes: Number


class Suspended(Message):
    type: Literal["suspended"]
    snapshot: Number
    position: Number
    bytes: Number
    t: Number
    ms: Millis


class SnapshotSlab(Message):
    """A piece of the memory to which a snapshot's content was copied, with its place in the shadow that a next server
    is given. `known`: there are only places; the content is that of the copy that `copy_snapshot` has named.
    `rounded`: each of its chunks has named numbers, which are not what the device has."""

    type: Literal["snapshot_slab"]
    number: Number
    ordinal: Annotated[int, Field(ge=0, lt=8)]
    address: Number
    bytes: Annotated[int, Field(gt=0, le=1 << 30)]
    known: bool = False
    rounded: bool = False


class RoundedNumbers(Message):
    """Named numbers of one type in a lossy copy. Errors are the largest of a number that was rounded; the relative one
    is against what it was."""

    type: Literal["float16", "bfloat16", "float32", "float64"]
    ranges: Number
    bytes: Number
    changed: Number
    largest_relative: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
    largest_absolute: Annotated[float, Field(ge=0, allow_inf_nan=False)]


class SnapshotCopied(Message):
    """All of it, and the snapshot's file that names the places. `rounded`: of a lossy copy, what it has rounded."""

    type: Literal["snapshot_copied"]
    number: Number
    bytes: Number
    ms: Millis
    rounded: Annotated[tuple[RoundedNumbers, ...], Field(max_length=4)] = ()


class SnapshotNotCopied(Message):
    type: Literal["snapshot_not_copied"]
    number: Number
    text: Text


class SuspendFailed(Message):
    type: Literal["suspend_failed"]
    text: Text


class ResumeFailed(Message):
    type: Literal["resume_failed"]
    code: Literal["no_peer", "no_room", "bad_snapshot", "failed"]
    text: Text


Memory = Annotated[MemoryAdd | MemoryDrop, Field(discriminator="op")]
RankMessage = (
    Meet | Communicator | CommunicatorFailed | CommunicatorPrepared | GroupWanted | GroupStopped | GroupHeld | GroupBusy
    | GroupStuck | ReplicasWanted | MemoryShort
)  # fmt: skip
ServerMessage = (
    Hello | Unavailable | Ready | Opened | MemoryAdd | MemoryDrop | Snapshot | SnapshotStands | Fault | Phase
    | ProgramError | Injected | Garbage | Announce | Announced | Paused | Continued | Log | Bye | Round | RoundProgress
    | MoveFailed | HandedOver | HandoverFailed | SuspendProgress | Prepared | Preloaded | Suspended | SuspendFailed
    | ResumeFailed | Kept | Meet | Communicator | CommunicatorFailed | CommunicatorPrepared | GroupWanted
    | GroupStopped | GroupHeld | GroupBusy | GroupStuck | ReplicasWanted | ChunksWanted | ChunksRead | CopiesMade
    | MemoryShort | SnapshotSlab | SnapshotCopied | SnapshotNotCopied | Joining
)  # fmt: skip
_adapter: TypeAdapter[ServerMessage] = TypeAdapter(
    Annotated[
        Hello | Unavailable | Ready | Opened | Memory | Snapshot | SnapshotStands | Fault | Phase | ProgramError
        | Injected | Garbage | Announce | Announced | Paused | Continued | Log | Bye | Round | RoundProgress
        | MoveFailed | HandedOver | HandoverFailed | SuspendProgress | Prepared | Preloaded | Suspended | SuspendFailed
        | ResumeFailed | Kept | Meet | Communicator | CommunicatorFailed | CommunicatorPrepared | GroupWanted
        | GroupStopped | GroupHeld | GroupBusy | GroupStuck | ReplicasWanted | ChunksWanted | ChunksRead
        | CopiesMade | MemoryShort | SnapshotSlab | SnapshotCopied | SnapshotNotCopied | Joining,
        Field(discriminator="type"),
    ]
)  # fmt: skip


def expected_fds(message: ServerMessage) -> int:
    if isinstance(message, SnapshotSlab) and message.known:
        return 0
    if isinstance(message, Announce):
        return 6 if message.quota_slots else 5
    return 1 if isinstance(message, MemoryAdd | SnapshotSlab | SnapshotCopied) else 0


def parse(data: bytes) -> ServerMessage:
    """Raises ProtocolError with a short reason."""
    try:
        return _adapter.validate_json(data)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ProtocolError(f"a message that does not fit its schema: {place}: {first['msg']}") from None


def pack(type: str, **fields: Any) -> bytes:
    return json.dumps({"type": type, **fields}, separators=(",", ":"), ensure_ascii=False).encode()


def pack_injection(injection: Injection) -> dict[str, Any]:
    return {
        "id": injection.id, "point": injection.point, "kind": injection.kind, "sequence": injection.sequence,
        "error": injection.error,
    } | ({"address": injection.address} if injection.kind == "flip" else {})  # fmt: skip


def pack_memory(message: MemoryAdd) -> bytes:
    return pack("memory", **message.model_dump(exclude={"type", "change"}))


def pack_replica(message: bytes) -> bytes:
    """Memory of a rank, for a server of another one that may copy from it."""
    fields = json.loads(message)
    del fields["op"]
    return pack(**(fields | {"type": "replica_memory"}))


@dataclass(frozen=True, slots=True)
class Differing:
    """Chunks of a snapshot that are not what most replicas hold: by address, the hash of that."""

    snapshot: int
    chunks: Mapping[int, int]


def pack_assign(
    assign: Assign, *, job: str, client_pid: int, stall_bound: float, snapshot_cost: float, hang_timeout: float = 0,
    first_id: int = 1, copies_on_host: bool = False, ahead: bool = False, differing: Differing | None = None,
    quota: Mapping[str, object] | None = None,
) -> bytes:  # fmt: skip
    """`copies_on_host`: it is to survive the loss of its device. `ahead`: of a recovery that is to be prepared only.
    `quota`: what `pack_quota` gives."""
    deliver, careful = assign.deliver, assign.careful
    fields: dict[str, Any] = {
        "job": job, "mode": assign.mode, "client_pid": client_pid, "snapshot_cost": snapshot_cost,
        "stall_bound": stall_bound, "hang_timeout": hang_timeout,
        "deliver": None if deliver is None else {"sequence": deliver.sequence, "error": deliver.error},
        "careful": None if careful is None else {"after": careful.after, "until": careful.until},
        "injections": _listed(assign.injections), **(quota or {}),
    }  # fmt: skip
    if copies_on_host:
        fields["copies_on_host"] = True
    if ahead:
        fields["ahead"] = True
    if assign.hold:
        fields["hold"] = True
    if assign.decided is not None:
        fields |= {
            "decided": assign.decided, "gone": list(assign.gone), "communicators": list(assign.communicators),
        }  # fmt: skip
    if assign.mode == "recover" and differing is not None:
        fields["differing"] = {"snapshot": differing.snapshot, "chunks": [*map(list, differing.chunks.items())]}
    if assign.mode == "move":
        fields["first_id"] = first_id
    if assign.mode == "lost":
        fields |= {"error": assign.error, "text": assign.text[:1000]}
    return pack("assign", **fields)


def pack_quota(bytes: int, slots: Sequence[int]) -> dict[str, object]:
    """Of an assignment that comes with the page of the job's memory quota."""
    return {"memory_quota": bytes, "quota_slots": list(slots)}


def _listed(injections: Sequence[Injection]) -> list[dict[str, Any]]:
    return [pack_injection(injection) for injection in injections[:256]]


def pack_target(
    mode: str, *, job: str, client_pid: int, stall_bound: float, snapshot_cost: float, hang_timeout: float,
    first_id: int, copies_on_host: bool = False, injections: Sequence[Injection] = (), ahead: bool = False,
    quota: Mapping[str, object] | None = None,
) -> bytes:  # fmt: skip
    """The assignment of a move's or a resumption's target, whose own memory has numbers from `first_id` on. `ahead`: it
    executes nothing before `enter`."""
    more: dict[str, object] = {"ahead": True} if ahead else {}
    return pack(
        "assign", job=job, mode=mode, client_pid=client_pid, snapshot_cost=snapshot_cost, stall_bound=stall_bound,
        hang_timeout=hang_timeout, deliver=None, careful=None, injections=_listed(injections), first_id=first_id,
        copies_on_host=copies_on_host, **(quota or {}), **more,
    )  # fmt: skip


def pack_foreign(message: bytes) -> bytes:
    """The same memory, for a server on another device than the one that it is on."""
    return pack(**(json.loads(message) | {"foreign": True}))
