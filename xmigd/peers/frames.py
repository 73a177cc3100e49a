"""What daemons send each other, as bytes: a header and what follows it. docs/peers.md has it for people.

A peer is authenticated and may still send anything. What is no frame raises ProtocolError, which ends its connection.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from xmigd.errors import ProtocolError
from xmigd.peers.contract import LONGEST

HEADER = struct.Struct("!IBQ")  # how many bytes follow, the kind, a number
VERSION = 2
LONGEST_CONTROL = 4096  # bytes of all frames but messages
MOST = (1 << 63) - 1


class Kind(IntEnum):
    """Of a frame. What its number is, and what follows."""

    HELLO = 1  # the version; JSON: node, to, session, received
    BEGIN = 2  # how many messages the sender has received; JSON: session, new
    MESSAGE = 3  # its number; JSON: the body
    RECEIVED = 4  # how many messages the sender has received; nothing. Each second, too
    END = 5  # 0; JSON: why


@dataclass(frozen=True, slots=True)
class Frame:
    kind: Kind
    number: int
    content: bytes = b""

    def encode(self) -> bytes:
        return HEADER.pack(len(self.content), self.kind, self.number) + self.content

    def json(self) -> dict[str, Any]:
        """Raises ProtocolError."""
        return read_object(self.content)


class FrameReader:
    """Bytes in, frames out. It has at most one frame and what came with it."""

    def __init__(self) -> None:
        self._arrived = bytearray()

    def feed(self, data: bytes) -> None:
        self._arrived += data

    def next(self, *, messages: bool) -> Frame | None:
        """The next one, if all of it has arrived. `messages`: may there be any yet? Raises ProtocolError."""
        if len(self._arrived) < HEADER.size:
            return None
        length, kind, number = HEADER.unpack_from(self._arrived)
        if kind not in Kind.__members__.values():
            raise ProtocolError(f"a frame of the unknown kind {kind}")
        kind = Kind(kind)
        if kind is Kind.MESSAGE and not messages:
            raise ProtocolError("a message before the session")
        longest = LONGEST if kind is Kind.MESSAGE else LONGEST_CONTROL
        if length > longest or number > MOST:
            raise ProtocolError(f"a frame with {length} bytes and the number {number}; there may be {longest} bytes")
        end = HEADER.size + length
        if len(self._arrived) < end:
            return None
        content = bytes(self._arrived[HEADER.size : end])
        del self._arrived[:end]
        return Frame(kind, number, content)


def frame(kind: Kind, number: int, content: Mapping[str, Any] | None = None) -> bytes:
    return Frame(kind, number, b"" if content is None else write_object(content)).encode()


def write_object(content: Mapping[str, Any]) -> bytes:
    """As JSON. Raises ValueError: it is none."""
    try:
        return json.dumps(dict(content), allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode()
    except (TypeError, RecursionError) as error:
        raise ValueError(f"no JSON object: {error}") from None


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


def read_object(content: bytes) -> dict[str, Any]:
    """Raises ProtocolError."""
    try:
        found = json.loads(content.decode(), parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"no JSON: {error}"[:200]) from None
    if not isinstance(found, dict):
        raise ProtocolError("JSON that is no object")
    return found
