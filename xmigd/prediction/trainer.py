"""Training, in a process of its own: `python -m xmigd.prediction.trainer` reads past jobs and writes a model.

scikit-learn is optional (`pip install 'xmig[prediction]'`). Apart, because it takes a processor for seconds, and much
memory; the daemon kills it at its time limit and goes on without predictions.

Quantile regression by gradient boosting, on logarithms, and conformal calibration: the jobs that ended last are left
out of a first training; by how much its P50 and P90 miss them, both are moved, for each user with enough jobs apart.
Then the model is trained again with all jobs.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import os
import resource
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from xmigd.child import answer_of
from xmigd.prediction.features import FIRST_MINUTE, Example, Past, Subject, examples
from xmigd.prediction.model import LEARNED, LEAST_JOBS, QUANTILES, Learned, Model, Quantile, Tree, packed, unpacked

COMMAND = (sys.executable, "-m", "xmigd.prediction.trainer")
SECONDS = 120.0  # that it may take
MEMORY = 4 << 30  # bytes of addresses that it may have
MOST_OUTPUT = 1 << 26  # bytes
MOST_JOBS = 2000  # that it is trained with: the last ones
HELD_OUT = 0.3  # share of the jobs that the calibration is from
ENOUGH = 10  # held out jobs of a user, for a calibration of their own
TREES, DEPTH, RATE, LEAF = 60, 4, 0.1, 10
NOT_INSTALLED = "scikit-learn is not installed (pip install 'xmig[prediction]')"


def is_installed() -> bool:
    return importlib.util.find_spec("sklearn") is not None


async def trained(jobs: Sequence[Past], seconds: float = SECONDS) -> tuple[Model | None, str]:
    """The model, or None and why. Raises nothing for a trainer that fails."""
    if not is_installed():
        return None, NOT_INSTALLED
    body = json.dumps([asdict(past) for past in jobs]).encode()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    out, why = await answer_of(COMMAND, body, within=seconds, most=MOST_OUTPUT, environment=environment)
    if out is None:
        return None, f"the training {why or f'took longer than {seconds:g} s'}"
    try:
        return await asyncio.to_thread(lambda: unpacked(json.loads(out), number_of_features())), ""
    except ValueError as error:
        return None, f"the training wrote what nobody can read ({error})"


def number_of_features() -> int:
    return len(examples([Past(subject=Subject(user="", name=""), seconds=1.0)])[0].features)


def train(jobs: Sequence[Past]) -> Model:
    """With the last MOST_JOBS; it may take seconds. Needs scikit-learn."""
    ordered = sorted(jobs, key=lambda past: past.ended_at)[-MOST_JOBS:]
    found = examples(ordered)
    since = ordered[-max(1, round(HELD_OUT * len(ordered)))].ended_at if ordered else 0.0
    held_out = sum(past.ended_at >= since for past in ordered)
    return Model(
        quantiles={target: _of(target, found, since) for target in LEARNED}, jobs=len(ordered), calibrated=held_out
    )


def _of(target: Learned, found: Sequence[Example], since: float) -> tuple[Quantile, Quantile] | None:
    rows = [(example, y) for example in found if (y := getattr(example, target)) is not None]
    jobs = sum(example.elapsed == 0 for example, _ in rows)
    if jobs < LEAST_JOBS:
        return None
    before = [row for row in rows if row[0].ended_at < since]
    after = [row for row in rows if row[0].ended_at >= since]
    if not before or not after:  # they all ended at one moment
        return None
    first, second = (_calibrated(quantile, rows, before, after) for quantile in QUANTILES)
    return first, second


Rows = Sequence[tuple[Example, float]]


def _calibrated(quantile: float, rows: Rows, before: Rows, after: Rows) -> Quantile:
    partial = _fitted(quantile, before)
    misses: dict[str | None, tuple[list[float], list[float]]] = {None: ([], [])}  # None: of all users
    for example, y in after:
        miss = y - partial.at(example.features, example.elapsed, example.user)
        for who in (None, example.user):
            misses.setdefault(who, ([], []))[example.elapsed >= FIRST_MINUTE].append(miss)
    early = conformal(misses[None][0], quantile)
    late = conformal(misses[None][1], quantile) if len(misses[None][1]) >= ENOUGH else early
    users = {
        who: (conformal(of[0], quantile), conformal(of[1], quantile) if len(of[1]) >= ENOUGH else late)
        for who, of in misses.items() if who is not None and len(of[0]) >= ENOUGH
    }  # fmt: skip
    whole = _fitted(quantile, rows)
    return Quantile(whole.base, whole.trees, early, late, users)


def conformal(misses: Sequence[float], quantile: float) -> float:
    """What must be added so that a later one is not above with this probability, if it comes from where these do."""
    place = math.ceil((len(misses) + 1) * quantile)
    return sorted(misses)[min(place, len(misses)) - 1]


def _fitted(quantile: float, rows: Rows) -> Quantile:
    made = regression(quantile)
    made.fit([example.features for example, _ in rows], [y for _, y in rows])
    return plain(made, rows[0][0].features)


def regression(quantile: float) -> Any:
    """Not fitted yet."""
    from sklearn.ensemble import GradientBoostingRegressor

    return GradientBoostingRegressor(
        loss="quantile", alpha=quantile, n_estimators=TREES, max_depth=DEPTH, learning_rate=RATE,
        min_samples_leaf=LEAF, subsample=0.7, random_state=0,
    )  # fmt: skip


def plain(made: Any, features: Sequence[float]) -> Quantile:
    """As numbers. `features`: of any example; the regression begins with a constant."""
    base = float(made.init_.predict([features])[0])
    return Quantile(base, [_plain(step[0].tree_) for step in made.estimators_], 0.0, 0.0, {})


def _plain(tree: Any) -> Tree:
    """Leaves have no children in scikit-learn's trees: -1."""
    return [
        (-1, RATE * float(tree.value[node][0][0]), 0, 0)
        if tree.children_left[node] < 0
        else (
            int(tree.feature[node]), float(tree.threshold[node]), int(tree.children_left[node]),
            int(tree.children_right[node]),
        )
        for node in range(tree.node_count)
    ]  # fmt: skip


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    os.nice(10)  # recoveries come first
    jobs = []
    for values in json.load(sys.stdin):
        subject = values.pop("subject")
        subject["labels"] = tuple(map(tuple, subject["labels"]))
        jobs.append(Past(subject=Subject(**subject), **values))
    answers = os.dup(1)
    os.dup2(2, 1)  # whoever else writes there
    model = train(jobs)
    with open(answers, "w") as out:
        json.dump(packed(model), out)


if __name__ == "__main__":
    main()
