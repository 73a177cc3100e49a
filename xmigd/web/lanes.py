"""What the chart of a job's ranks shows: a lane for each, and in it what the rank did besides running."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from xmigd.words import milliseconds

LONGEST = 60.0  # seconds that are shown
WIDTH = 1000.0  # of a lane
LEAST = 2.5  # of what took a moment, so that it is seen
# What a lane's parts look like (their class), and what they are called.
LOOKS = {
    "recovery": ("ending", "waiting", "restoring", "replaying", "lost"),
    "snapshot": ("stopped", "preparing", "holding", "taking"),
    "meeting": ("joining",),
    "away": ("suspended", "moving"),
}
TEXTS = {
    "ending": "its server was lost, or killed because another rank's was", "waiting": "waited for other servers to end",
    "restoring": "was restored", "replaying": "replayed", "lost": "is lost", "stopped": "stood still for a snapshot",
    "preparing": "prepared a snapshot", "holding": "had prepared a snapshot", "taking": "took a snapshot",
    "joining": "made a communicator", "suspended": "was suspended",
    "moving": "moved to another device",
}  # fmt: skip
_look_of = {activity: look for look, activities in LOOKS.items() for activity in activities}


@dataclass(frozen=True, slots=True)
class Part:
    x: float
    width: float
    look: str
    text: str


@dataclass(frozen=True, slots=True)
class Lane:
    rank: int
    process: str
    parts: list[Part]
    summary: str  # for whoever does not see it


@dataclass(frozen=True, slots=True)
class Lanes:
    seconds: float
    ended: bool  # what is at the right was the end, not now
    lanes: list[Lane]


def lanes(ranks: Sequence[dict[str, Any]], now: float) -> Lanes | None:
    """None: there is nothing to draw."""
    lives = [span for one in ranks for span in one["timeline"] if span["activity"] != "ended"]
    if not lives:
        return None
    end = max(_end(span, now) for span in lives)
    begin = max(min(span["at"] for span in lives), end - LONGEST)
    length = max(end - begin, 0.001)
    ended = all(one["activity"] == "ended" for one in ranks)
    return Lanes(length, ended, [_lane(one, begin, length, now) for one in ranks])


def _end(span: dict[str, Any], now: float) -> float:
    return now if span["ms"] is None else float(span["at"] + span["ms"] / 1e3)


def _lane(rank: dict[str, Any], begin: float, length: float, now: float) -> Lane:
    parts = []
    for span in rank["timeline"]:
        look = _look_of.get(span["activity"])
        until = _end(span, now)
        if look is None or until < begin:
            continue
        x = max(0.0, (span["at"] - begin) / length * WIDTH)
        width = max(LEAST, (until - max(span["at"], begin)) / length * WIDTH)
        x = min(x, WIDTH - LEAST)
        parts.append(Part(round(x, 1), round(min(width, WIDTH - x), 1), look, _text(span, (until - span["at"]) * 1e3)))
    recoveries = sum(span["activity"] == "restoring" for span in rank["timeline"])
    snapshots = sum(span["activity"] == "taking" for span in rank["timeline"])
    summary = f"rank {rank['rank']}: {snapshots} snapshots and {recoveries} recoveries are shown"
    # What was worse lies above.
    order = list(LOOKS)[::-1]
    return Lane(rank["rank"], rank["process_id"], sorted(parts, key=lambda part: order.index(part.look)), summary)


def _text(span: dict[str, Any], ms: float) -> str:
    text = f"{TEXTS[span['activity']]}, {milliseconds(ms)}"
    return text if span["waited_for"] is None else f"{text}; waited for rank {span['waited_for']}"
