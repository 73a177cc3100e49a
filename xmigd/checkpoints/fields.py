"""CRIU's images are protocol buffers: their fields, without knowing what they mean."""

from __future__ import annotations

from collections.abc import Iterator

from xmigd.store.objects import Damaged

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types


def fields(message: bytes) -> Iterator[tuple[int, int, bytes, bytes]]:
    """Number, wire type, all bytes of the field, and, of one with a length, what it contains."""
    at = 0
    while at < len(message):
        begin = at
        key, at = _read_varint(message, at)
        content = b""
        kind = key & 7
        if kind == VARINT:
            _, at = _read_varint(message, at)
        elif kind in (FIXED64, FIXED32):
            at += 8 if kind == FIXED64 else 4
        elif kind == BYTES:
            size, at = _read_varint(message, at)
            content = message[at : at + size]
            at += size
        else:
            raise Damaged("CRIU's image of the program has a field that it cannot have")
        if at > len(message):
            raise Damaged("CRIU's image of the program is truncated")
        yield key >> 3, kind, message[begin:at], content


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for count in range(10):
        if at + count >= len(message):
            break
        byte = message[at + count]
        value |= (byte & 0x7F) << 7 * count
        if byte < 0x80:
            return value, at + count + 1
    raise Damaged("CRIU's image of the program has a number that does not end")


def varint(value: int) -> bytes:
    """As protocol buffers write numbers."""
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)
