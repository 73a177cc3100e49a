"""What the daemons of a job's nodes send each other about its ranks (docs/protocol.md), checked.

A peer is authenticated, and still not trusted to be well-formed: what does not fit these models is left out and named
in the log. Times are each node's own, so none is sent.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from xmigd.errors import ProtocolError
from xmigd.groups.meetings import Answer
from xmigd.ipc import messages as m
from xmigd.peers.contract import NAME
from xmigd.process import events as e
from xmigd.process import migration_events as v

TOPIC = "ranks"
MOST_PROCESSES = 1024  # of a node, in one message

What = Literal["suspend", "resume"]
To = Literal["host", "file"]  # of a suspension
Nodes = Annotated[str, Field(max_length=4096)]  # names, separated by commas; the first leads


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    topic: Literal["ranks"] = "ranks"
    nodes: Nodes


class Stand(BaseModel):
    """How a process stands when a message about it is sent: what the one who leads would otherwise read itself."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    process: m.JobId
    uid: m.Small
    job: Annotated[str, Field(max_length=255)]  # its name: the id is each node's own
    pid: m.Small
    start_time: m.Number
    device: Annotated[str, Field(max_length=64)]
    state: Annotated[str, Field(max_length=16)]
    active: m.Number | None
    standby: m.Number | None  # that is warm
    target: m.Number | None  # of a move, until that has the process
    standing: bool
    rounds: tuple[m.Number, m.Number]
    forsaken: bool
    renewed: m.Number  # the last round at which a rank of its group left its server for another; 0: none
    suspended_at: m.Number  # the round with which it was suspended with all others; 0: it is not
    leaving: v.Leaving
    resumes: bool


# --- to the one who leads --------------------------------------------------------------------------------------------


class Present(BaseModel):
    """A process, for one who may know nothing of it, or may have missed something."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    stand: Stand
    orphan: bool  # its server is gone with an earlier daemon, and nobody here knows what it was a member of
    awaits: bool  # to be let go on after its server was lost
    held: m.Number  # the round that it has prepared, and waits for the decision of; 0: none
    lost: m.Number  # bytes that its server has lost with a device, and waits to hear who has the same; 0: none
    communicators: Annotated[tuple[m.Communicator, ...], Field(max_length=4096)]


class Here(Message):
    """All processes of a node that have to do with the job's nodes. First of what is sent in a session."""

    kind: Literal["here"] = "here"
    standby_bytes: m.Number  # of device memory that a standby's communicators may take there; 0: it makes none
    processes: Annotated[tuple[Present, ...], Field(max_length=MOST_PROCESSES)]


class Reported(Message):
    """By a server."""

    kind: Literal["reported"] = "reported"
    stand: Stand
    server: m.Number
    message: dict[str, Any]  # a RankMessage


class HeldAgain(Message):
    """A server stands prepared in a round that this daemon has not sent it into."""

    kind: Literal["held_again"] = "held_again"
    stand: Stand
    round: m.RoundNumber


class Committed(Message):
    kind: Literal["committed"] = "committed"
    stand: Stand
    round: m.RoundNumber


class TookAlone(Message):
    """A snapshot, since the last one of its group."""

    kind: Literal["took_alone"] = "took_alone"
    stand: Stand


class Changed(Message):
    """By a process's machine."""

    kind: Literal["changed"] = "changed"
    stand: Stand
    what: Literal[
        "broken", "awaits", "recovering", "running", "lost", "gone", "suspends", "prepared", "suspended",
        "not_suspended", "asleep", "restored", "not_resumed", "cannot_resume", "moves", "leaves", "stays",
    ]  # fmt: skip
    why: Annotated[str, Field(max_length=4096)] = ""


class MadeAgain(Message):
    """A process of a checkpoint, or of an earlier daemon: it is suspended, to be resumed with those of other nodes."""

    kind: Literal["made_again"] = "made_again"
    stand: Stand


class Begins(Message):
    """These processes of the node begin to be suspended, or resumed: all others of their group are to be, too."""

    kind: Literal["begins"] = "begins"
    what: What
    to: To
    processes: Annotated[tuple[m.JobId, ...], Field(min_length=1, max_length=MOST_PROCESSES)]


class Pauses(Message):
    """It is to pause at the next round of its group, or not any more."""

    kind: Literal["pauses"] = "pauses"
    stand: Stand
    on: bool


class Finished(Message):
    kind: Literal["finished"] = "finished"
    process: m.JobId


class CaughtUp(Message):
    """Behind all that this node knew when `catch_up` came."""

    kind: Literal["caught_up"] = "caught_up"
    number: m.Number


class Looked(Message):
    """The answer to `look`."""

    kind: Literal["looked"] = "looked"
    stand: Stand


class GaveUp(Message):
    """A device has no room for a program's memory: these servers there have forgotten all communicators that they had
    made ahead, and are not to make any for a while."""

    kind: Literal["gave_up"] = "gave_up"
    servers: Annotated[tuple[tuple[m.JobId, m.Number], ...], Field(max_length=MOST_PROCESSES)]


# --- from the one who leads ------------------------------------------------------------------------------------------


class WhoIsHere(Message):
    """Answered with `here`, once the daemon knows it."""

    kind: Literal["who_is_here"] = "who_is_here"


class CatchUp(Message):
    """Answered with `caught_up`."""

    kind: Literal["catch_up"] = "catch_up"
    number: m.Number


class Look(Message):
    """How does this process stand? Answered with `looked`."""

    kind: Literal["look"] = "look"
    process: m.JobId


class NameReplicas(Message):
    """A server has lost memory with a device: these ranks, each with its node, stand at the same round."""

    kind: Literal["name_replicas"] = "name_replicas"
    process: m.JobId
    server: m.Number
    ranks: Annotated[tuple[tuple[Annotated[str, Field(pattern=NAME)], m.JobId], ...], Field(max_length=MOST_PROCESSES)]


class Join(Message):
    """These processes of the node are to be suspended, or resumed, with others that have begun. What is under way of
    them already is meant."""

    kind: Literal["join"] = "join"
    what: What
    to: To
    processes: Annotated[tuple[m.JobId, ...], Field(max_length=MOST_PROCESSES)]


class Settled(Message):
    """These processes of the node, and all others of their group, have the snapshots of a round."""

    kind: Literal["settled"] = "settled"
    processes: Annotated[tuple[m.JobId, ...], Field(max_length=MOST_PROCESSES)]


class PrepareCommunicator(Message):
    """This server makes it, beside all others. What comes of it, it reports."""

    kind: Literal["prepare_communicator"] = "prepare_communicator"
    process: m.JobId
    server: m.Number
    attempt: m.Number
    name: m.Name


class ForgetCommunicator(Message):
    kind: Literal["forget_communicator"] = "forget_communicator"
    process: m.JobId
    server: m.Number
    attempt: m.Number


class NoteMade(Message):
    """So many has the server made ahead, as have those of the other ranks; and what they take, about."""

    kind: Literal["note_made"] = "note_made"
    process: m.JobId
    server: m.Number
    communicators: m.Number
    device_bytes: m.Number


_EVENTS = {
    one.__name__: TypeAdapter(one)
    for one in (
        e.Grouped, e.GroupLost, e.GroupHung, e.GroupHopeless, e.GroupGo, e.GroupWoken, v.GroupSuspends,
        v.GroupSuspended, v.GroupResumes, v.GroupRefuses, v.HandoverFailed,
    )
}  # fmt: skip


class Tell(Message):
    """An event for a process's machine. Its time is when it comes."""

    kind: Literal["tell"] = "tell"
    process: m.JobId
    event: Literal[
        "Grouped", "GroupLost", "GroupHung", "GroupHopeless", "GroupGo", "GroupWoken", "GroupSuspends",
        "GroupSuspended", "GroupResumes", "GroupRefuses", "HandoverFailed",
    ]  # fmt: skip
    fields: dict[str, Any]

    def at(self, t: int) -> e.Event:
        """Raises ProtocolError."""
        try:
            return _EVENTS[self.event].validate_python({**self.fields, "t": t})
        except ValidationError as error:
            raise ProtocolError(f"an event {self.event} that is none: {_first(error)}") from None


def tell(nodes: str, process: str, event: e.Event) -> Tell:
    fields = asdict(event)
    del fields["t"]
    return Tell.model_validate({"nodes": nodes, "process": process, "event": type(event).__name__, "fields": fields})


class Send(Message):
    """A message for the server that has the process, if that is still this one."""

    kind: Literal["send"] = "send"
    process: m.JobId
    server: m.Number
    text: Annotated[str, Field(max_length=m.MAX_MESSAGE)]


TO_SERVERS = frozenset({"group_stop", "group_hold", "group_take", "group_continue", "communicator_lost"})


class Round(BaseModel):
    """Of a `send`, the part that the daemon on the way looks at."""

    type: Literal["group_stop", "group_hold", "group_take", "group_continue"]
    round: m.RoundNumber
    pauses: bool = False
    moves: bool = False  # a rank does, and these are used from now on
    leaves: bool = False  # it is this one
    communicators: Annotated[tuple[m.Number, ...], Field(max_length=4096)] = ()


def round_of(text: str) -> Round | None:
    """None: a message of something else. Raises ProtocolError."""
    try:
        fields = json.loads(text)
    except ValueError:
        raise ProtocolError("a message for a server that is no JSON") from None
    if not isinstance(fields, dict) or fields.get("type") not in TO_SERVERS:
        raise ProtocolError("a message for a server that no node may send it")
    if not str(fields["type"]).startswith("group_"):
        return None
    try:
        return Round.model_validate(fields)
    except ValidationError as error:
        raise ProtocolError(_first(error)) from None


class Met(Message):
    """The answer to a `meet`."""

    kind: Literal["met"] = "met"
    process: m.JobId
    server: m.Number
    meeting: m.Name
    rank: m.Rank
    offers: Annotated[tuple[Annotated[str, Field(max_length=512)], ...], Field(max_length=m.MAX_RANKS)] = ()
    missing: Annotated[str, Field(max_length=4096)] = ""
    refused: Annotated[str, Field(max_length=4096)] = ""
    answer: Annotated[str, Field(max_length=64)] = ""
    over: bool = False

    def to_rank(self) -> Answer:
        return Answer(
            self.process, self.server, self.meeting, self.rank, self.offers, self.missing, self.refused, self.answer,
            self.over,
        )  # fmt: skip


NodeMessage = Annotated[
    Here | Reported | HeldAgain | Committed | TookAlone | Changed | MadeAgain | Begins | Pauses | Finished | CaughtUp
    | Looked | WhoIsHere | CatchUp | Tell | Send | Met | Look | NameReplicas | Join | Settled | GaveUp
    | PrepareCommunicator | ForgetCommunicator | NoteMade,
    Field(discriminator="kind"),
]  # fmt: skip
_adapter: TypeAdapter[NodeMessage] = TypeAdapter(NodeMessage)


def parse(body: dict[str, Any]) -> NodeMessage:
    """Raises ProtocolError."""
    try:
        return _adapter.validate_json(json.dumps(body))
    except ValidationError as error:
        raise ProtocolError(_first(error)) from None


def parse_rank_message(fields: dict[str, Any]) -> m.RankMessage:
    """What a server of another node has reported. Raises ProtocolError."""
    message = m.parse(json.dumps(fields).encode())
    if not isinstance(message, m.RankMessage):
        raise ProtocolError(f"a message {message.type} is not of a rank")
    return message


def _first(error: ValidationError) -> str:
    one = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, one['loc']))}: {one['msg']}"
