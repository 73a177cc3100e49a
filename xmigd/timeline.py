"""What ranks did, as lines of text: a row for each, a column for each moment. On the command line and in the demo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from xmigd.words import milliseconds

# In a column that several fall into, what stands first is shown.
SIGNS = (
    ("lost", "L", "lost"), ("ending", "X", "its server is lost, or killed because another rank's is"),
    ("waiting", "w", "waits for the other ranks' servers to end"), ("restoring", "r", "is restored"),
    ("replaying", "p", "replays"), ("moving", "m", "moves to another device"), ("suspended", "z", "suspended"),
    ("joining", "j", "a communicator is made"),
    ("holding", "s", "snapshot"), ("stopped", "s", "snapshot"), ("preparing", "s", "snapshot"),
    ("taking", "s", "snapshot"), ("stopping", "·", "runs"), ("running", "·", "runs"),
)  # fmt: skip
NOTHING = " "


def draw(ranks: Sequence[Mapping[str, Any]], width: int, now: float) -> list[str]:
    """`ranks`: as the API has them. `now`: Unix seconds. The last line says what the signs mean."""
    spans = [span for one in ranks for span in one["timeline"] if span["activity"] != "ended"]
    if not spans:
        return []
    begin = min(span["at"] for span in spans)
    end = max(begin + 0.001, *(_end(span, now) for span in spans))
    names = [f"rank {one['rank']}" for one in ranks]
    room = max(map(len, names))
    columns = max(width - room - 2, 20)
    rows = [_row(one["timeline"], begin, end, columns, now) for one in ranks]
    length = milliseconds((end - begin) * 1e3)
    head = f"{'':{room}}  {'0':<{columns - len(length)}}{length}"
    there = set("".join(rows))
    legend = {sign: text for _, sign, text in SIGNS if sign in there}
    return [
        head, *(f"{name:{room}}  {row.rstrip()}" for name, row in zip(names, rows, strict=True)),
        f"{'':{room}}  " + ", ".join(f"{sign} {text}" for sign, text in legend.items()),
    ]  # fmt: skip


def _end(span: Mapping[str, Any], now: float) -> float:
    return now if span["ms"] is None else float(span["at"] + span["ms"] / 1e3)


def _row(timeline: Sequence[Mapping[str, Any]], begin: float, end: float, columns: int, now: float) -> str:
    order = {activity: place for place, (activity, *_) in enumerate(SIGNS)}
    cells = [len(SIGNS)] * columns
    scale = columns / (end - begin)
    for span in timeline:
        place = order.get(span["activity"])
        if place is None:
            continue
        first = int((span["at"] - begin) * scale)
        last = int((_end(span, now) - begin) * scale)
        for column in range(max(first, 0), min(max(last, first), columns - 1) + 1):
            cells[column] = min(cells[column], place)
    return "".join(SIGNS[place][1] if place < len(SIGNS) else NOTHING for place in cells)
