"""How long a step of a program takes, without knowing what it computes: the same launches come again.

A number stands for each launch (kernel and shape). A step has P launches if the sequence, moved by P, is itself. To
compare every P would take too long: the rarest launches, which come once or twice in a step, name the candidates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from operator import eq

ALIKE = 0.9  # share of launches that have to be the same, one step later
NEARLY = 0.005  # a shorter period may be so much worse than the best: an inner loop is not the step
REPEATS = 3  # steps that have to be there
CANDIDATES = 12


def likeness(launches: Sequence[int], period: int) -> float:
    """The share of launches that are the same, `period` launches later. Of the later half: a program begins with what
    is no step."""
    launches = launches[-max((REPEATS + 1) * period, len(launches) // 2) :]
    compared = len(launches) - period
    return sum(map(eq, launches[:compared], launches[period:])) / compared if compared > 0 else 0.0


def find_period(launches: Sequence[int], before: int | None = None) -> int | None:
    """Launches in a step; None: nothing comes again, or not often enough. `before`: what was found last."""
    if before is not None and len(launches) >= REPEATS * before and likeness(launches, before) >= 1 - NEARLY:
        return before
    scores = {period: likeness(launches, period) for period in _candidates(launches)}
    best = max(scores.values(), default=0.0)
    if best < ALIKE:
        return None
    return min(period for period, score in scores.items() if score >= best - NEARLY)


def _candidates(launches: Sequence[int]) -> set[int]:
    longest = len(launches) // REPEATS
    counts = Counter(launches)
    rare = sorted((count, launch) for launch, count in counts.items() if count >= REPEATS)[:CANDIDATES]
    found: set[int] = set()
    for _, launch in rare:
        places = [place for place, other in enumerate(launches) if other == launch]
        # It may come several times in a step: then the period is the distance to the second, third ... next one.
        for distance in range(1, 5):
            gaps = Counter(after - first for first, after in zip(places, places[distance:], strict=False))
            if gaps:
                found.add(gaps.most_common(1)[0][0])
    return {period for period in found if 0 < period <= longest}


def step_times(ticks: Sequence[tuple[int, int]], period: int, most: int = 64) -> list[tuple[float, float]]:
    """When each of the last steps ended and how long it took, in seconds, oldest first. `ticks`: so many launches there
    had been, at this time (ns). Between two of them launches come evenly."""
    if len(ticks) < 2:
        return []
    ends: list[float] = []
    wanted, place = ticks[-1][0], len(ticks) - 1
    while wanted >= ticks[0][0] and len(ends) <= most:
        while place > 0 and ticks[place - 1][0] >= wanted:
            place -= 1
        (low, low_at), (high, high_at) = ticks[max(place - 1, 0)], ticks[place]
        share = (wanted - low) / (high - low) if high > low else 1.0
        ends.append((low_at + share * (high_at - low_at)) / 1e9)
        wanted -= period
    ends.reverse()
    return [(end, end - begin) for begin, end in pairwise(ends)]
