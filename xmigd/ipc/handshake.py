"""The daemon's half of shim/ipc/handshake.h. A program is hostile: every field is checked."""

from __future__ import annotations

import struct
import sys
from dataclasses import dataclass
from typing import Literal

from xmigd.errors import ProtocolError
from xmigd.native import Layout

MAGIC = 0x4C434D58  # "XMCL"
VERSION = 1
JOB_DEVICES, NAMED, EVERY = range(3)  # Visibility
HELLO = struct.Struct("=IIII64s256sI508s")
BEFORE_VISIBILITY = struct.Struct("=IIII64s256s").size  # bytes of a hello that an earlier libcuda.so.1 sends
NOTICE_MAGIC = 0x544E4D58  # "XMNT"
NOTICE = struct.Struct("=II64s1016s")
WELCOME = struct.Struct("=IIiI64s512s")


@dataclass(frozen=True, slots=True)
class ClientHello:
    reattach: bool
    job: str
    command: str
    visible: str | Literal[True] | None = None  # $CUDA_VISIBLE_DEVICES; True: all that it could name; None: not set


def _text(field: bytes) -> str:
    head, _, _ = field.partition(b"\0")
    return "".join(c if c.isprintable() else "?" for c in head.decode("utf-8", errors="replace"))


def parse_hello(data: bytes) -> ClientHello:
    """Raises ProtocolError with a sentence for the program's user."""
    if len(data) == BEFORE_VISIBILITY:
        data = data.ljust(HELLO.size, b"\0")
    if len(data) != HELLO.size:
        raise ProtocolError(f"a handshake has {HELLO.size} bytes, this one {len(data)}")
    magic, version, layout, reattach, job, command, visibility, visible = HELLO.unpack(data)
    if magic != MAGIC:
        raise ProtocolError("this is not a handshake of xMIG's libcuda.so.1")
    if version != VERSION or layout != Layout().layout_version:
        raise ProtocolError(
            f"libcuda.so.1 uses handshake {version} with layout {layout}, this xmigd {VERSION} with "
            f"{Layout().layout_version}",
            hint="install both from the same version",
        )
    if reattach not in (0, 1):
        raise ProtocolError("reattach is neither 0 nor 1")
    if b"\0" not in job or b"\0" not in command or b"\0" not in visible:
        raise ProtocolError("a text of the handshake does not end")
    if visibility not in (JOB_DEVICES, NAMED, EVERY):
        raise ProtocolError(f"there is no visibility {visibility}")
    wanted: str | Literal[True] | None = _text(visible) if visibility == NAMED else None
    return ClientHello(bool(reattach), _text(job), _text(command), True if visibility == EVERY else wanted)


def parse_notice(data: bytes) -> tuple[str, str] | None:
    """A line for a job's log: $XMIG_JOB and the text. None: it is something else. What is wrong with it is left out."""
    if len(data) != NOTICE.size or int.from_bytes(data[:4], sys.byteorder) != NOTICE_MAGIC:
        return None
    _, _, job, text = NOTICE.unpack(data)
    return _text(job), text.partition(b"\0")[0].decode(errors="replace")


def pack_notice(job: str, text: str) -> bytes:
    """What libcuda.so.1 sends; for tests."""
    return NOTICE.pack(NOTICE_MAGIC, VERSION, job.encode(), _snapshot(text, 1015))


def pack_hello(job: str = "", command: str = "", *, reattach: bool = False, visible: str | None = None) -> bytes:
    """What libcuda.so.1 sends; for tests and probes."""
    return HELLO.pack(
        MAGIC, VERSION, Layout().layout_version, int(reattach), job.encode(), command.encode(),
        JOB_DEVICES if visible is None else NAMED, (visible or "").encode(),
    )  # fmt: skip


def pack_welcome(status: int, *, fds: int = 0, job: str = "", message: str = "") -> bytes:
    return WELCOME.pack(MAGIC, VERSION, status, fds, _snapshot(job, 63), _snapshot(message, 511))


def unpack_welcome(data: bytes) -> tuple[int, int, str, str]:
    """status, fds, job, message"""
    _, _, status, fds, job, message = WELCOME.unpack(data)
    return status, fds, _text(job), _text(message)


def _snapshot(text: str, longest: int) -> bytes:
    """At most so many bytes, and no half character at the end."""
    return text.encode()[:longest].decode(errors="ignore").encode()
