"""How long there was work, from words that a program can write, too."""

from __future__ import annotations

import random

from xmigd.devices.busy import Busy
from xmigd.devices.header import Stall

MS = 1_000_000
CONSTANT = 5 * MS


def words(replay: int, *, at: int, working: bool = False, peak: int = 0, correction: int = 1000) -> Stall:
    return Stall(at, working, replay, correction, CONSTANT, 100 * MS, peak, 0)


def test_work_is_added_up_over_snapshots() -> None:
    busy = Busy()
    assert busy.total(None, 0) is None
    assert busy.total(words(0, at=0), 0) == 0
    assert busy.total(words(3 * MS, at=10 * MS), 10 * MS) == 3 * MS
    # 8 ms of work before the snapshot, of which 3 are counted; then 2 more.
    busy.snapshot(words(0, at=20 * MS, peak=CONSTANT + 8 * MS), 20 * MS)
    assert busy.total(words(2 * MS, at=30 * MS), 30 * MS) == 10 * MS
    # It works on: the time since the last report counts.
    assert busy.total(words(2 * MS, at=30 * MS, working=True), 37 * MS) == 17 * MS


def test_the_correction_of_replays_is_taken_out() -> None:
    busy = Busy()
    busy.total(words(0, at=0), 0)
    busy.snapshot(words(0, at=20 * MS, peak=CONSTANT + 16 * MS, correction=2000), 20 * MS)
    assert busy.total(words(0, at=20 * MS), 20 * MS) == 8 * MS


def test_nobody_is_busier_than_the_clock() -> None:
    chance = random.Random(3)
    busy = Busy()
    at, last = 0, 0
    busy.total(words(0, at=0), 0)
    for _ in range(500):
        at += chance.randint(0, 20) * MS
        found = words(
            chance.randrange(1 << 62), at=chance.randrange(1 << 62), working=chance.random() < 0.5,
            peak=chance.randrange(1 << 62), correction=chance.randint(0, 1_000_000),
        )  # fmt: skip
        if chance.random() < 0.5:
            busy.snapshot(found, at)
        total = busy.total(found, at)
        assert total is not None
        assert last <= total <= at
        last = total
