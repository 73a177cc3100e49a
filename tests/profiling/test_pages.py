"""What servers write is hostile: no page, whatever it holds, does harm. And how steps are found in launches."""

from __future__ import annotations

import os
import random
import struct
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from xmigd.ipc.fds import Fd, sealed_memory
from xmigd.profiling import pages
from xmigd.profiling.period import find_period, step_times
from xmigd.profiling.profiles import add_up
from xmigd.profiling.trace_file import TracedProcess, TracedServer, write_trace


def filled(size: int, *parts: tuple[int, bytes]) -> Fd:
    page = sealed_memory("xmig-test", size)
    for offset, content in parts:
        os.pwrite(page.fileno(), content[: max(0, size - offset)], offset)
    return page


@given(st.binary(min_size=72, max_size=72), st.lists(st.binary(min_size=512, max_size=512), max_size=4), st.booleans())
def test_a_profile_of_anything(head: bytes, entries: list[bytes], plausible: bool) -> None:
    if plausible:
        head = pages.HEADER.pack(pages.PROFILE_MAGIC, 1, len(entries), 0, 70_000, 9_000, *[2**64 - 1] * 5)
    page = filled(pages.PROFILE_BYTES, (0, head), (pages.ENTRIES_AT, b"".join(entries)))
    found = pages.read_profile(page)
    if found is not None:
        for one in add_up(found.entries).values():
            assert one.timed <= one.calls
        assert len(pages.read_launches(page, found.launches, 100)) <= 100
        pages.read_ticks(page, found.ticks)


@given(st.binary(max_size=2000), st.integers(0, 2**64 - 1))
def test_a_trace_of_anything(content: bytes, written: int) -> None:
    head = pages.TRACE_HEADER.pack(pages.TRACE_MAGIC, 1, 0, 0, written, 0)
    page = filled(pages.SMALLEST_TRACE, (0, head), (pages.PIECES_AT, content))
    assert all(event.took >= 0 for event in pages.read_trace(page))


def test_a_page_keeps_its_size() -> None:
    page = sealed_memory("xmig-test", pages.SMALLEST_TRACE)
    for size in (0, 1 << 30):
        try:
            os.ftruncate(page.fileno(), size)
        except PermissionError:
            continue
        raise AssertionError("it changed its size")


def test_names_of_a_trace_are_text(tmp_path: Path) -> None:
    name = b'\x1b[31m"quoted\xff\0rest'
    number = struct.pack("<4I", 1, 40, 1, len(name)) + name.ljust(24, b"\0")
    event = pages.EVENT.pack(2, 88, 0, 1, 0, 1, 1000, 5, 0, 1, *[1] * 6, 0, 0)
    head = pages.TRACE_HEADER.pack(pages.TRACE_MAGIC, 1, 1, 0, len(number) + len(event), 7)
    page = filled(pages.SMALLEST_TRACE, (0, head), (pages.PIECES_AT, number + event))
    traced = TracedProcess("p" * 32, 1, ["cpu:0"], servers=[TracedServer(0, page, 0, had_program=True)])
    written = write_trace(tmp_path / "trace.json", [traced], began=0, job_name="job", about={})
    assert (written.events, written.dropped) == (1, 7)
    text = (tmp_path / "trace.json").read_text()
    assert "\x1b" not in text
    assert '\\"quoted' in text
    assert (tmp_path / "trace.json").stat().st_mode & 0o777 == 0o600


def layers(count: int, head: int) -> list[int]:
    """A step: some launches of its own, and an inner loop that is alike."""
    return [*range(100, 100 + head), *([1, 2, 3, 4, 5] * count)]


def test_a_step_is_found() -> None:
    assert find_period([7] * 50) == 1
    assert find_period([1, 2, 3] * 20) == 3
    assert find_period(layers(48, 3) * 5) == 243  # not 5, the inner loop
    assert find_period(layers(48, 3) * 5, before=243) == 243
    # A start that is no step, and one launch in twenty that differs from step to step
    chance = random.Random(3)
    noisy = [
        *range(1000, 1200),
        *(one if chance.random() > 0.02 else chance.randrange(10**6) for one in layers(12, 8) * 30),
    ]
    assert find_period(noisy) == 68


def test_where_there_is_no_step() -> None:
    chance = random.Random(5)
    assert find_period([]) is None
    assert find_period([1, 2]) is None
    assert find_period(list(range(1000))) is None
    assert find_period([chance.randrange(8) for _ in range(5000)]) is None
    assert find_period([1, 2, 3, 4, 5] * 2) is None  # too few


def test_how_long_steps_take() -> None:
    ticks = [(32 * number, 10**9 + 16 * number * 10**6) for number in range(100)]  # half a millisecond each
    steps = step_times(ticks, 10)
    assert len(steps) == 64
    assert all(abs(took - 0.005) < 1e-9 for _, took in steps)
    assert abs(steps[-1][0] - (1 + 0.016 * 99)) < 1e-9
    assert step_times(ticks[:1], 10) == []
