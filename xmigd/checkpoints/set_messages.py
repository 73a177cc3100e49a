"""What the daemons of a job's nodes send each other about checkpoints of it (docs/protocol.md), checked."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from xmigd.checkpoints.manifest import MOST_CONNECTIONS, Connection, Count, Id
from xmigd.errors import ProtocolError

TOPIC = "checkpoints"

Node = Annotated[str, Field(max_length=64)]
Stage = Literal["held", "dump", "dumped", "go_on", "stored", "whole", "made", "resume", "ready", "go"]


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    topic: Literal["checkpoints"] = "checkpoints"
    id: Id  # of the checkpoint, or of the operation that restores it


# --- from the one who leads -------------------------------------------------------------------------------------------


class Create(Message):
    """A part of the job of this name: those of its processes that are there. `stop`: they end at it."""

    kind: Literal["create"] = "create"
    nodes: Annotated[tuple[Node, ...], Field(min_length=2, max_length=64)]
    job: Annotated[str, Field(max_length=255)]
    uid: Count
    stop: bool


class Restore(Message):
    """The part that node `of` has made, in a job on these nodes."""

    kind: Literal["restore"] = "restore"
    checkpoint: Id
    of: Node
    nodes: Annotated[tuple[Node, ...], Field(min_length=2, max_length=64)]
    uid: Count
    round: Count


class Verify(Message):
    """Read the part, and compare it with its hashes; `id` is the checkpoint's."""

    kind: Literal["verify"] = "verify"
    request: Id


class Remove(Message):
    kind: Literal["remove"] = "remove"


# --- to the one who leads ---------------------------------------------------------------------------------------------


class Question(Message):
    """What became of it?"""

    kind: Literal["question"] = "question"
    what: Literal["checkpoint", "restoration"]


class Removed(Message):
    kind: Literal["removed"] = "removed"


class Verified(Message):
    kind: Literal["verified"] = "verified"
    request: Id
    wrong: Annotated[str, Field(max_length=1024)]  # empty: nothing


# --- both ways --------------------------------------------------------------------------------------------------------


class Reached(Message):
    """A stage of what all do together. `connections`: of `held`; `round`: of `dumped`; `processes`: ranks that were
    made again."""

    kind: Literal["reached"] = "reached"
    stage: Stage
    connections: Annotated[tuple[Connection, ...], Field(max_length=MOST_CONNECTIONS)] = ()
    round: Count = 0
    processes: Annotated[tuple[Id, ...], Field(max_length=1024)] = ()


class GivenUp(Message):
    kind: Literal["given_up"] = "given_up"
    code: Annotated[str, Field(pattern=r"^[a-z_]{1,40}$")]
    why: Annotated[str, Field(max_length=1024)]


AnyMessage = Annotated[
    Create | Restore | Verify | Remove | Question | Removed | Verified | Reached | GivenUp, Field(discriminator="kind")
]
_adapter: TypeAdapter[AnyMessage] = TypeAdapter(AnyMessage)


def parse(body: dict[str, Any]) -> AnyMessage:
    """Raises ProtocolError."""
    try:
        return _adapter.validate_json(json.dumps(body))
    except ValidationError as error:
        one = error.errors(include_url=False, include_input=False)[0]
        raise ProtocolError(f"{'.'.join(map(str, one['loc']))}: {one['msg']}") from None
