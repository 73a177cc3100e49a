"""A trained model, as plain numbers: trees of a quantile regression, and what the calibration adds. Without I/O.

The trainer (xmigd.prediction.trainer, a process of its own) makes it with scikit-learn. To read it the daemon needs
neither that nor NumPy, and a prediction takes less than a millisecond.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from xmigd.prediction.features import FIRST_MINUTE, Known, Subject, left_of, yardstick

Target = Literal["remaining", "peak"]
# What is learned: remaining seconds of all jobs; of those with a walltime, the same as a share of what is left of it;
# bytes. One regression of both would take seconds for shares where the history has one kind only.
Learned = Literal["remaining", "share", "peak"]
LEARNED: tuple[Learned, ...] = ("remaining", "share", "peak")
QUANTILES = (0.5, 0.9)
LEAST_JOBS = 40  # that must have ended; fewer: unknown
LEAST_SIMILAR = 3  # of them, of the same user, if no walltime is known
# A P90 of more than so many times the P50 says nothing that one could act upon.
WIDEST: dict[Target, float] = {"remaining": 20.0, "peak": 4.0}
LONGEST = math.log(10 * 366 * 86400.0)  # what a logarithm of seconds may be
MOST = math.log(1 << 60)  # and of bytes
MOST_NODES = 1 << 12  # of one tree
MOST_TREES = 1 << 10

# Of each node: feature (-1: a leaf), threshold or value, left, right.
Node = tuple[int, float, int, int]
Tree = Sequence[Node]


@dataclass(frozen=True, slots=True)
class Quantile:
    base: float
    trees: Sequence[Tree]
    early: float  # what the calibration adds before the first minute, in logarithms
    late: float  # and after it
    users: Mapping[str, tuple[float, float]]  # both, of those who have enough jobs

    def at(self, features: Sequence[float], elapsed: float, user: str) -> float:
        found = self.base
        for tree in self.trees:
            place = 0
            while tree[place][0] >= 0:
                feature, threshold, left, right = tree[place]
                place = left if features[feature] <= threshold else right
            found += tree[place][1]
        early, late = self.users.get(user, (self.early, self.late))
        return found + (late if elapsed >= FIRST_MINUTE else early)


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    p50: float | None = None  # seconds, or bytes
    p90: float | None = None
    unknown: str = ""  # why; empty: it is known


@dataclass(frozen=True, slots=True, kw_only=True)
class Remaining:
    """Seconds that a job will still run, where that is known."""

    p50: float
    p90: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    quantiles: dict[Learned, tuple[Quantile, Quantile] | None]  # None: too few jobs to learn it from
    jobs: int  # that it was trained with
    calibrated: int  # of these, that the calibration is from

    def predict(self, target: Target, known: Known, subject: Subject, elapsed: float) -> Predicted:
        left = left_of(subject, elapsed) if target == "remaining" else None
        share = left is not None and self.quantiles["share"] is not None
        trained = self.quantiles["share" if share else target]
        if trained is None:
            return Predicted(unknown=f"fewer than {LEAST_JOBS} ended jobs have a measured {_NAMES[target]}")
        if (similar := known.similar(subject)) < LEAST_SIMILAR and not share:
            return Predicted(unknown=f"{similar} jobs of this user have ended; {LEAST_SIMILAR} are needed")
        features = known.features(subject, elapsed)
        most, share_of = LONGEST if target == "remaining" else MOST, yardstick(features) if share else 0.0
        low, high = (math.exp(min(most, share_of + each.at(features, elapsed, subject.user))) for each in trained)
        high = max(low, high)
        if left is not None:
            low, high = min(low, left), min(high, left)
        if high > low * WIDEST[target]:
            return Predicted(unknown="similar jobs differ too much: P90 is more than "
                             f"{WIDEST[target]:g} times P50")  # fmt: skip
        return Predicted(p50=low, p90=high)


_NAMES = {"remaining": "run time", "peak": "peak memory"}


def packed(model: Model) -> dict[str, Any]:
    """For JSON."""
    return {
        "jobs": model.jobs, "calibrated": model.calibrated,
        "quantiles": {
            target: trained and [[each.base, each.early, each.late, each.users, each.trees] for each in trained]
            for target, trained in model.quantiles.items()
        },
    }  # fmt: skip


def unpacked(values: Any, features: int) -> Model:
    """Checked: each tree ends, and names no other feature than there are. Raises ValueError."""
    try:
        quantiles: dict[Learned, tuple[Quantile, Quantile] | None] = {}
        for target in LEARNED:
            given = values["quantiles"][target]
            if given is None:
                quantiles[target] = None
                continue
            low, high = (_quantile(each, features) for each in given)
            quantiles[target] = low, high
        return Model(quantiles=quantiles, jobs=int(values["jobs"]), calibrated=int(values["calibrated"]))
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"no model: {error!r}") from None


def _quantile(values: Any, features: int) -> Quantile:
    base, early, late, users, trees = values
    if len(trees) > MOST_TREES:
        raise ValueError("no model: too many trees")
    return Quantile(
        _finite(base), [_tree(tree, features) for tree in trees], _finite(early), _finite(late),
        {user: (_finite(first), _finite(second)) for user, (first, second) in users.items()},
    )  # fmt: skip


def _tree(nodes: Any, features: int) -> Tree:
    if not 1 <= len(nodes) <= MOST_NODES:
        raise ValueError("no model: a tree is empty, or too large")
    found: list[Node] = []
    for place, (feature, number, left, right) in enumerate(nodes):
        if type(feature) is not int or not -1 <= feature < features:
            raise ValueError("no model: a node names a feature that there is not")
        # Children come after their node: whoever walks the tree arrives.
        if feature >= 0 and not all(type(child) is int and place < child < len(nodes) for child in (left, right)):
            raise ValueError("no model: a node has no children")
        found.append((feature, _finite(number), left, right))
    return found


def _finite(number: Any) -> float:
    if not isinstance(number, int | float) or not math.isfinite(number):
        raise ValueError("no model: a number is not finite")
    return float(number)
