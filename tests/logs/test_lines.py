"""Lines on their way into a job's log: what is made of hostile bytes, of a forged ring, of too many."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xmigd.errors import ProtocolError
from xmigd.ipc.handshake import pack_notice, parse_hello, parse_notice
from xmigd.jobs.membership import new_job
from xmigd.logs.log import BURST, RATE, JobLog
from xmigd.logs.notices import SLOT, SLOTS_AT, TAKEN_AT, Notices
from xmigd.native import Layout
from xmigd.records import LogLine
from xmigd.text import LONGEST, harmless

LAYOUT = Layout()


def test_what_a_terminal_acts_upon_is_written_out() -> None:
    assert harmless("a\x1b[31mred\x9b2J\r\n\u202eevil\u2066\0") == (
        r"a\x1b[31mred\x9b2J\x0d\x0a\u202eevil\u2066\x00"
    )  # fmt: skip
    assert harmless("grüße, 世界 ✓") == "grüße, 世界 ✓"
    assert len(harmless("x" * 5000)) == len(harmless("\x1b" * 5000)) == LONGEST


@given(st.text())
def test_no_text_does_harm(text: str) -> None:
    shown = harmless(text)
    assert shown.isprintable()
    assert len(shown) <= LONGEST


@given(st.binary(max_size=1200))
def test_any_bytes_are_a_notice_or_not(data: bytes) -> None:
    magic = pack_notice("", "")[:4]
    for each in (data, (magic + data)[: len(pack_notice("", ""))].ljust(len(pack_notice("", "")), b"\0")):
        found = parse_notice(each)
        assert found is None or isinstance(found[1], str)


def test_a_notice_is_no_hello() -> None:
    notice = pack_notice("job:token", "words")
    assert parse_notice(notice) == ("job:token", "words")
    with pytest.raises(ProtocolError):
        parse_hello(notice)


# --- the ring --------------------------------------------------------------------------------------------------------


class Ring:
    """The shim's side."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("ring")
        os.ftruncate(self.fd, LAYOUT.header_bytes)
        self.posted = self.dropped = 0

    def put(self, offset: int, *values: int) -> None:
        os.pwrite(self.fd, struct.pack(f"={len(values)}Q", *values), LAYOUT.notices_at + offset)

    def say(self, text: bytes, size: int | None = None, at: int = 0) -> None:
        head = struct.pack("=QII", at, len(text) if size is None else size, 0)
        os.pwrite(self.fd, head + text, LAYOUT.notices_at + SLOTS_AT + self.posted % LAYOUT.notices * SLOT)
        self.posted += 1
        self.put(0, self.posted, self.dropped)

    def taken(self) -> int:
        return int.from_bytes(os.pread(self.fd, 8, LAYOUT.notices_at + TAKEN_AT), "little")


@pytest.fixture
def ring() -> Iterator[Ring]:
    ring = Ring()
    yield ring
    os.close(ring.fd)


def texts(notices: Notices) -> list[str] | None:
    taken = notices.take()
    return None if taken is None else [text for _, text in taken.lines]


def test_lines_in_their_order(ring: Ring) -> None:
    notices = Notices(LAYOUT, ring.fd)
    assert texts(notices) is None
    for i in range(3):
        ring.say(f"line {i}".encode())
    assert texts(notices) == ["line 0", "line 1", "line 2"]
    assert texts(notices) is None
    for i in range(LAYOUT.notices):  # once around
        ring.say(f"more {i}".encode())
    assert texts(notices) == [f"more {i}" for i in range(LAYOUT.notices)]
    assert ring.taken() == ring.posted  # so the shim knows what is free


def test_another_daemon_goes_on(ring: Ring) -> None:
    ring.say(b"for the first")
    assert texts(Notices(LAYOUT, ring.fd)) == ["for the first"]
    ring.say(b"for the next")
    assert texts(Notices(LAYOUT, ring.fd)) == ["for the next"]


@pytest.mark.parametrize("posted", [1 << 40, (1 << 64) - 1, 5])
@pytest.mark.parametrize("taken", [0, 7, 1 << 63, (1 << 64) - 1])
def test_forged_counts(ring: Ring, posted: int, taken: int) -> None:
    """No more is read than there are slots, and nothing is read twice."""
    ring.put(TAKEN_AT, taken)
    notices = Notices(LAYOUT, ring.fd)
    ring.put(0, posted, (1 << 64) - 3)
    found = notices.take()
    assert found is not None
    assert len(found.lines) <= LAYOUT.notices
    assert found.dropped <= 1 << 31
    assert notices.take() is None


def test_a_forged_length_and_no_utf8(ring: Ring) -> None:
    notices = Notices(LAYOUT, ring.fd)
    ring.say(b"\xff\xfe", size=0xFFFFFFFF)
    (text,) = texts(notices) or [""]
    assert text.startswith("\ufffd\ufffd")
    assert len(text) <= SLOT


# --- shares ----------------------------------------------------------------------------------------------------------


@dataclass
class Kept:
    lines: list[LogLine] = field(default_factory=list)

    def log_line(self, line: LogLine) -> None:
        self.lines.append(line)


def make(uid: int = 7) -> Any:
    return new_job(name="j", command="c", uid=uid, device=None, registered=True)[0]


def test_a_user_has_a_share() -> None:
    kept, clock = Kept(), [0.0]
    log = JobLog(kept, LAYOUT, clock=lambda: clock[0])  # type: ignore[arg-type]
    one, two, other = make(), make(), make(uid=8)
    for i in range(BURST + 50):
        log.line((one, two)[i % 2], f"line {i}", source="program")
    assert len(kept.lines) == BURST
    log.line(other, "another user's", source="program")
    assert kept.lines[-1].job == other.id
    clock[0] += 2 / RATE
    log.line(one, "again", source="program")
    assert [line.text for line in kept.lines[-2:]] == [
        "50 lines were left out: more than 10 a second from one user's programs", "again",
    ]  # fmt: skip


def test_what_the_shim_left_out_is_reported(ring: Ring) -> None:
    kept = Kept()
    log, job = JobLog(kept, LAYOUT), make()  # type: ignore[arg-type]
    log.collect(job, "p", ring.fd)
    ring.dropped = 9
    ring.say(b"first \x1b[2J")
    log.collect(job, "p", ring.fd)
    ring.say(b"second")
    log.collect(job, "p", ring.fd)
    reported = [line.text for line in kept.lines]
    assert reported[0] == r"first \x1b[2J"
    assert reported[1].startswith("9 lines were left out")
    assert reported[2] == "second"


def test_a_time_that_cannot_be_is_now(ring: Ring) -> None:
    kept = Kept()
    log, job = JobLog(kept, LAYOUT), make()  # type: ignore[arg-type]
    log.collect(job, "p", ring.fd)
    ring.say(b"from the end of time", at=(1 << 64) - 1)
    log.collect(job, "p", ring.fd)
    assert kept.lines[0].at < 1e11
