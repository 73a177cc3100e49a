"""When two runs of a program are the same, and how far apart they are when they need not be."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, zip_longest
from typing import Any

from tests.gpu.bench import Outcome
from tests.gpu.cases import Case
from xmigd.measurements import Row

RESULTS = ("losses", "sha256", "digests", "tokens", "reported", "refused", "corrupted", "before", "measured", "failed")


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Where the results of two runs differ, to the last bit."""
    found = []
    for key in RESULTS:
        a, b = one.get(key), other.get(key)
        if isinstance(a, list) and isinstance(b, list):
            pairs = enumerate(zip_longest(map(repr, a), map(repr, b)))  # repr: NaN is NaN
            found += [f"{key}[{i}]" for i, pair in pairs if pair[0] != pair[1]]
        elif isinstance(a, dict) and isinstance(b, dict):
            found += [f"{key}: {name}" for name in sorted(a.keys() | b.keys()) if a.get(name) != b.get(name)]
        elif a != b:
            found.append(key)
    return found


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Mean relative difference of the losses."""
    pairs = list(zip(one["losses"], other["losses"], strict=True))
    return float(sum(abs(a - b) / max(abs(a), abs(b), 1e-12) for a, b in pairs)) / len(pairs)


def spread(case: Case, native: Sequence[Outcome], xmig: Outcome, more: str = "") -> Row:
    """How far the losses are from native ones, in terms of how far native ones are from each other."""
    apart = max(distance(one.result, other.result) for one, other in combinations(native, 2))
    away = min(distance(each.result, xmig.result) for each in native)
    reported = f"mean relative difference from the nearest native run {away:.3g}, "
    reported += f"the largest between {len(native)} native runs {apart:.3g}"
    return Row(
        name=f"{case.name}: distance of the losses", value=round(away / apart, 3) if apart else away,
        unit="× native spread" if apart else "relative", target=2 if apart else 0, better="lower",
        conditions=f"{reported}; {more}" if more else reported,
    )  # fmt: skip
