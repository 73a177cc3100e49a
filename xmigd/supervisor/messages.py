"""The control protocol (docs/protocol.md): what servers say, checked; what they are told, packed.

A server is hostile: a message that does not fit these models ends its connection. Numbers stay below 2^63, so that all
of them fit the database.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from xmigd.errors import ProtocolError
from xmigd.recovery.events import Assign, Injection

MAX_MESSAGE = 64 << 10
MAX_FDS = 5

Number = Annotated[int, Field(ge=0, lt=1 << 63)]
Small = Annotated[int, Field(ge=0, lt=1 << 31)]
Text = Annotated[str, Field(max_length=4096)]
Millis = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
JobId = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


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
    t: Number


class MemoryAdd(Message):
    type: Literal["memory"]
    op: Literal["add"]
    id: Number
    kind: Literal["device", "shadow", "image"]
    ordinal: Annotated[int, Field(ge=0, lt=64)]
    address: Number
    bytes: Number
    name: Annotated[str, Field(max_length=255)] = ""


class MemoryDrop(Message):
    type: Literal["memory"]
    op: Literal["drop"]
    id: Number


class Cut(Message):
    type: Literal["cut"]
    number: Number
    position: Number
    sequence: Number
    ms: Millis
    chunks: Number
    copied_bytes: Number
    live_bytes: Number
    journal_bytes: Number
    objects: Number
    reason: Text


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
    name: Literal["mapped", "restored", "redone", "resumed"]
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


class Announced(Message):
    type: Literal["announced"]


class Paused(Message):
    type: Literal["paused"]
    position: Number
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


Memory = Annotated[MemoryAdd | MemoryDrop, Field(discriminator="op")]
ServerMessage = (
    Hello | Unavailable | Ready | MemoryAdd | MemoryDrop | Cut | Fault | Phase | ProgramError | Injected | Garbage
    | Announce | Announced | Paused | Continued | Log | Bye
)  # fmt: skip
_adapter: TypeAdapter[ServerMessage] = TypeAdapter(
    Annotated[
        Hello | Unavailable | Ready | Memory | Cut | Fault | Phase | ProgramError | Injected | Garbage | Announce
        | Announced | Paused | Continued | Log | Bye,
        Field(discriminator="type"),
    ]
)  # fmt: skip


def expected_fds(message: ServerMessage) -> int:
    return 1 if isinstance(message, MemoryAdd) else 5 if isinstance(message, Announce) else 0


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
    }  # fmt: skip


def pack_memory(message: MemoryAdd) -> bytes:
    return pack("memory", **message.model_dump(exclude={"type"}))


def pack_assign(assign: Assign, *, job: str, client_pid: int, cut_budget: float, hang_timeout: float = 0) -> bytes:
    deliver, careful = assign.deliver, assign.careful
    fields: dict[str, Any] = {
        "job": job, "mode": assign.mode, "client_pid": client_pid, "cut_budget": cut_budget,
        "hang_timeout": hang_timeout,
        "deliver": None if deliver is None else {"sequence": deliver.sequence, "error": deliver.error},
        "careful": None if careful is None else {"after": careful.after, "until": careful.until},
        "injections": _listed(assign.injections),
    }  # fmt: skip
    if assign.mode == "lost":
        fields |= {"error": assign.error, "text": assign.text[:1000]}
    return pack("assign", **fields)


def _listed(injections: Sequence[Injection]) -> list[dict[str, Any]]:
    return [pack_injection(injection) for injection in injections[:256]]
