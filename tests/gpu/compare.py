"""When two runs of a program are the same, and how far apart they are when they need not be."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

RESULTS = ("losses", "sha256", "digests", "tokens", "told", "refused", "spoiled", "before", "measured", "failed")


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
