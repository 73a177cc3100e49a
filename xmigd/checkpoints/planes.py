"""The bytes of numbers as planes, and back (docs/formats.md), by `shim/planes`: slices of Python take thirty times as
long, and no other thread can do anything meanwhile."""

from __future__ import annotations

import ctypes
import functools

from xmigd.native import find_planes

PLANES = (2, 4)  # bytes of a number
Bytes = bytes | bytearray | memoryview


def split(content: Bytes, width: int, into: bytearray | None = None) -> memoryview:
    """The first bytes of all numbers of `width` bytes, then the second ones, and so on; in `into`, if it is large
    enough. A memoryview has to be of what may be written. Raises StartError."""
    return _call("split", content, width, into)


def join(planes: Bytes, width: int, into: bytearray | None = None) -> memoryview:
    """What `split` has made planes of. Raises StartError."""
    return _call("join", planes, width, into)


def _call(what: str, given: Bytes, width: int, into: bytearray | None) -> memoryview:
    size = len(given)
    made = memoryview(bytearray(size) if into is None or size > len(into) else into)[:size]
    if made:
        source = given if isinstance(given, bytes) else ctypes.byref(ctypes.c_char.from_buffer(given))
        function = getattr(_library(), f"xmig_{what}_{width}")
        function(source, ctypes.c_size_t(size), ctypes.byref(ctypes.c_char.from_buffer(made)))
    return made


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(find_planes()))
