"""Bytes and numbers, without a network: whatever arrives is a frame or refused, and a session loses nothing."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xmigd.errors import ProtocolError
from xmigd.peers.connection import BYTES_A_SECOND, FRAMES_A_SECOND, Pace
from xmigd.peers.contract import LONGEST
from xmigd.peers.frames import HEADER, Frame, FrameReader, Kind, frame, read_object, write_object
from xmigd.peers.session import EACH, MOST_KEPT, Session

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5),
    max_leaves=20,
)


@given(st.lists(st.binary(max_size=300), max_size=10), st.data())
def test_frames_arrive_however_they_are_split(contents: list[bytes], data: st.DataObject) -> None:
    sent = [Frame(Kind.MESSAGE, number, content) for number, content in enumerate(contents, 1)]
    stream = b"".join(each.encode() for each in sent)
    reader, arrived, at = FrameReader(), [], 0
    while at < len(stream):
        length = data.draw(st.integers(1, 400))
        reader.feed(stream[at : at + length])
        at += length
        while (found := reader.next(messages=True)) is not None:
            arrived.append(found)
    assert arrived == sent


@given(st.binary(max_size=600))
def test_any_bytes_are_frames_or_refused(garbage: bytes) -> None:
    reader = FrameReader()
    reader.feed(garbage)
    with contextlib.suppress(ProtocolError):
        while (found := reader.next(messages=True)) is not None:
            assert found.kind is Kind.MESSAGE or len(found.content) <= 4096
            found.json()


@pytest.mark.parametrize(
    ("header", "reported"),
    [
        (HEADER.pack(LONGEST + 1, Kind.MESSAGE, 1), "bytes"), (HEADER.pack(4097, Kind.HELLO, 1), "bytes"),
        (HEADER.pack(0, 0, 0), "unknown kind"), (HEADER.pack(0, 99, 0), "unknown kind"),
        (HEADER.pack(0, Kind.RECEIVED, 1 << 63), "number"),
    ],
)  # fmt: skip
def test_a_header_is_refused_before_what_follows_is_kept(header: bytes, reported: str) -> None:
    reader = FrameReader()
    reader.feed(header)
    with pytest.raises(ProtocolError, match=reported):
        reader.next(messages=True)


def test_no_message_before_the_session() -> None:
    reader = FrameReader()
    reader.feed(frame(Kind.MESSAGE, 1, {"topic": "x"}))
    with pytest.raises(ProtocolError, match="before the session"):
        reader.next(messages=False)


@given(st.dictionaries(st.text(), JSON, max_size=5))
def test_objects_arrive_as_they_are(body: dict[str, object]) -> None:
    assert read_object(write_object(body)) == json.loads(json.dumps(body))


@pytest.mark.parametrize(
    "content",
    [b"", b"1", b"[]", b'{"a":NaN}', b'{"a":Infinity}', b"\xff", b"[" * 100_000, b'{"a":' * 100_000, b"9" * 5000],
)
def test_what_is_no_object_is_refused(content: bytes) -> None:
    with pytest.raises(ProtocolError):
        read_object(content)


@pytest.mark.parametrize("body", [{"a": float("nan")}, {"a": object()}, {"a": b"x"}, {"a": "\ud800"}])
def test_what_cannot_be_sent(body: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        write_object(body)


# Of each connection: messages that are sent before, how many are transported, whether all of that is acknowledged, and
# how far behind it is what the receiver reports at the next one's beginning.
CONNECTIONS = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 10), st.booleans(), st.integers(0, 3)), max_size=15
)  # fmt: skip


@given(CONNECTIONS)
def test_a_session_loses_duplicates_and_reorders_nothing(connections: list[tuple[int, int, bool, int]]) -> None:
    """A connection transports in order, and ends anywhere; then all that was not acknowledged is sent again."""
    sender, receiver = Session(), Session()
    sender.begin("s")
    receiver.begin("s")
    arrived: list[bytes] = []
    for count, transported, acknowledged, behind in [*connections, (0, 1000, True, 0)]:
        for _ in range(count):
            sender.keep(b"%d" % (sender.sent + 1))
        sender.acknowledge(max(0, receiver.received - behind))
        for number in list(sender.kept)[:transported]:
            if receiver.accept(number):
                arrived.append(sender.kept[number])
        if acknowledged:
            sender.acknowledge(receiver.received)
        assert sender.kept_bytes == sum(len(content) + EACH for content in sender.kept.values())
    assert arrived == [b"%d" % number for number in range(1, sender.sent + 1)]
    assert sender.kept == {}


def test_a_session_keeps_so_much() -> None:
    session = Session()
    session.begin("s")
    kept = 0
    while session.keep(bytes(LONGEST)) is not None:
        kept += 1
    assert kept == MOST_KEPT // (LONGEST + EACH)
    session.acknowledge(1)
    assert session.keep(bytes(LONGEST)) == kept + 1


@pytest.mark.parametrize("number", [0, 2, 100])
def test_wrong_numbers(number: int) -> None:
    session = Session()
    session.begin("s")
    with pytest.raises(ProtocolError):
        session.accept(number)
    session.keep(b"")
    if number > 1:
        with pytest.raises(ProtocolError):
            session.acknowledge(number)


def test_the_pace_of_a_peer() -> None:
    pace, now = Pace(), 100.0
    assert all(pace.take(10, now) == 0.0 for _ in range(FRAMES_A_SECOND - 1))  # a second's worth at once
    for _ in range(FRAMES_A_SECOND // 10):
        wait = pace.take(10, now)
    assert wait == pytest.approx(0.1, abs=0.01)
    assert pace.take(10, now + 10) == 0.0
    assert Pace().take(2 * BYTES_A_SECOND, now) == pytest.approx(1.0)
