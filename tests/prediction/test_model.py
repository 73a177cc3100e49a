"""The model of jobs, without a daemon: what it is made from, how it is calibrated, and when it says nothing."""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import sys
from typing import Any

import pytest

from xmigd.prediction import trainer
from xmigd.prediction.features import (
    FIRST_MINUTE,
    NONE,
    Known,
    Past,
    Subject,
    examples,
    left_of,
    yardstick,
)
from xmigd.prediction.model import LEAST_JOBS, LEAST_SIMILAR, Model, packed, unpacked
from xmigd.prediction.trainer import conformal, number_of_features, plain, regression, trained

MIB = 1 << 20
KINDS = {"short": (120.0, 500 * MIB), "long": (3000.0, 4000 * MIB)}


def job(number: int, chance: random.Random) -> Past:
    """Of one user, one after the other; of two kinds, which differ by what they take."""
    name = chance.choice(list(KINDS))
    seconds, peak = KINDS[name]
    return Past(
        subject=Subject(
            user="1", name=f"{name}-{number}", command=f"train.py {name} {number}", started_at=4e3 * number
        ),
        seconds=seconds * math.exp(chance.gauss(0, 0.2)), peak_bytes=int(peak * math.exp(chance.gauss(0, 0.05))),
    )  # fmt: skip


def history(jobs: int) -> list[Past]:
    chance = random.Random(1)
    return [job(number, chance) for number in range(jobs)]


def known(jobs: list[Past]) -> Known:
    found = Known()
    for each in jobs:
        found.add(each)
    return found


@pytest.fixture(scope="module")
def model() -> Model:
    made, why = asyncio.run(trained(history(200)))
    assert made is not None, why
    return made


class TestFeatures:
    def test_nothing_is_of_the_future(self) -> None:
        """Jobs that end later change no example of before."""
        jobs = history(30)
        later = max(past.ended_at for past in jobs)
        more = [Past(subject=Subject(user="1", name="short-1", started_at=later - 1e5), seconds=2e5)]
        before = [each for each in examples(jobs + more) if each.ended_at <= later]
        assert [each.features for each in before] == [each.features for each in examples(jobs)]

    def test_others_jobs_say_nothing(self) -> None:
        """Whoever gives a job the name of another user's job gets no other prediction."""
        theirs = Subject(user="2", name="short-1", command="train.py short 1")
        assert known(history(50)).features(theirs, 0.0) == Known().features(theirs, 0.0)

    def test_what_was_measured_counts_after_the_first_minute(self) -> None:
        subject = Subject(user="1", name="it", minute_bytes=MIB, minute_calls=10.0)
        early, late = (Known().features(subject, elapsed)[5:7] for elapsed in (0.0, FIRST_MINUTE))
        assert (early, NONE in late) == ([NONE, NONE], False)

    def test_a_walltime_that_is_over_is_none(self) -> None:
        subject, without = (Subject(user="1", name="it", walltime=each) for each in (100.0, None))
        assert [left_of(subject, elapsed) for elapsed in (0.0, 40.0, 100.0, 200.0)] == [100.0, 60.0, None, None]
        assert left_of(without, 0.0) is None
        assert yardstick(Known().features(subject, 40.0)) == pytest.approx(math.log1p(60.0))


class TestModel:
    def test_later_jobs_are_within_it(self, model: Model) -> None:
        past, chance = history(200), random.Random(2)
        later = [job(number, chance) for number in range(200, 500)]
        found = [model.predict("remaining", known(past), each.subject, 0.0) for each in later]
        off = [abs(math.log((each.p50 or 1.0) / past.seconds)) for each, past in zip(found, later, strict=True)]
        assert statistics.median(off) < 0.3
        covered = statistics.mean(past.seconds <= (each.p90 or 0.0) for each, past in zip(found, later, strict=True))
        assert 0.82 <= covered <= 0.99
        peaks = [model.predict("peak", known(past), each.subject, 0.0) for each in later]
        within = [(each.peak_bytes or 0) <= (peak.p90 or 0.0) for each, peak in zip(later, peaks, strict=True)]
        assert 0.82 <= statistics.mean(within) <= 1.0

    def test_what_has_lasted_is_not_expected_again(self, model: Model) -> None:
        past = known(history(200))
        subject = Subject(user="1", name="long-7", command="train.py long 7")
        begin, after = (model.predict("remaining", past, subject, elapsed).p50 for elapsed in (0.0, 1500.0))
        assert begin is not None
        assert after is not None
        assert after < begin * 0.8

    def test_without_similar_jobs_it_is_unknown(self, model: Model) -> None:
        found = model.predict("remaining", Known(), Subject(user="9", name="it"), 0.0)
        assert (found.p50, found.unknown) == (None, f"0 jobs of this user have ended; {LEAST_SIMILAR} are needed")

    def test_a_walltime_describes_a_new_user(self) -> None:
        """Of whom nothing has ended: others use a third of what they request, and nobody more than all of it."""
        chance = random.Random(4)
        jobs = []
        for number in range(200):
            walltime = 60.0 * math.exp(chance.uniform(0, 6))
            subject = Subject(user=str(number % 5), name="any", started_at=1e6 * number, walltime=walltime)
            jobs.append(Past(subject=subject, seconds=min(walltime, walltime / 3 * math.exp(chance.gauss(0, 0.3)))))
        model = trainer.train(jobs)
        for walltime in (300.0, 3000.0):
            new = Subject(user="9", name="other", started_at=3e8, walltime=walltime)
            found = model.predict("remaining", known(jobs), new, 0.0)
            assert found.p50 == pytest.approx(walltime / 3, rel=0.35)
            assert found.p90 is not None
            assert walltime / 3 < found.p90 <= walltime
            late = model.predict("remaining", known(jobs), new, walltime - 1.0)
            assert (late.p90 or 1.0) <= 1.0
            over = model.predict("remaining", known(jobs), new, walltime + 1.0)
            assert "0 jobs of this user" in over.unknown

    @pytest.mark.parametrize("had", [None, 86400.0])
    def test_a_history_of_the_other_kind(self, had: float | None) -> None:
        """Seconds are not taken for shares, nor shares for seconds."""
        chance = random.Random(5)
        jobs = [
            Past(
                subject=Subject(user="1", name="it", started_at=1e4 * number, walltime=had),
                seconds=3600.0 * math.exp(chance.gauss(0, 0.1)),
            )
            for number in range(60)
        ]
        model = trainer.train(jobs)
        for walltime in (None, 86400.0):
            new = Subject(user="1", name="it", started_at=1e6, walltime=walltime)
            found = model.predict("remaining", known(jobs), new, 0.0)
            assert 1800.0 < (found.p50 or 0.0) <= (found.p90 or 0.0) < 7200.0, found

    def test_an_interval_that_says_nothing_is_unknown(self) -> None:
        chance = random.Random(3)
        jobs = [
            Past(subject=Subject(user="1", name="any", started_at=1e6 * n), seconds=math.exp(chance.uniform(0, 13)))
            for n in range(200)
        ]
        found = trainer.train(jobs).predict("remaining", known(jobs), Subject(user="1", name="any"), 0.0)
        assert (found.p90, "differ too much" in found.unknown) == (None, True)

    def test_without_enough_jobs_nothing_is_learned(self) -> None:
        made = trainer.train(history(LEAST_JOBS - 1))
        assert made.quantiles == {"remaining": None, "share": None, "peak": None}
        assert made.predict("peak", Known(), Subject(user="1", name="it"), 0.0).unknown.startswith("fewer than")

    def test_its_trees_are_those_of_scikit_learn(self) -> None:
        rows = [(each.features, each.remaining) for each in examples(history(60))]
        made = regression(0.9).fit([features for features, _ in rows], [y for _, y in rows])
        theirs, ours = made.predict([features for features, _ in rows]), plain(made, rows[0][0])
        assert [ours.at(features, 0.0, "1") for features, _ in rows] == pytest.approx(list(theirs), abs=1e-9)


def test_the_calibration_is_the_quantile_of_the_misses() -> None:
    misses = [float(each) for each in range(1, 10)]
    assert (conformal(misses, 0.9), conformal(misses, 0.5), conformal([3.0], 0.9)) == (9.0, 5.0, 3.0)


class TestTrainer:
    @pytest.mark.parametrize(
        ("program", "seconds", "why"),
        [
            ("import time; time.sleep(60)", 0.2, "longer than"),
            ("raise SystemExit(3)", 60.0, "exit code 3"),
            ("print('{}')", 60.0, "nobody can read"),
        ],
    )
    def test_one_that_fails(self, monkeypatch: pytest.MonkeyPatch, program: str, seconds: float, why: str) -> None:
        monkeypatch.setattr(trainer, "COMMAND", (sys.executable, "-c", program))
        model, reason = asyncio.run(trained(history(3), seconds))
        assert (model, why in reason) == (None, True)

    def test_without_scikit_learn(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(trainer, "is_installed", lambda: False)
        assert asyncio.run(trained(history(3))) == (None, trainer.NOT_INSTALLED)

    @pytest.mark.parametrize(
        "tree",
        [[], [[99, 0.0, 1, 2]], [[0, 0.0, 0, 0]], [[0, 0.0, 1, 7]], [[-1, float("nan"), 0, 0]], [["0", 0.0, 1, 1]]],
    )
    def test_a_tree_that_is_none_is_refused(self, model: Model, tree: list[Any]) -> None:
        values = packed(model)
        values["quantiles"]["peak"][0][4] = [tree]
        with pytest.raises(ValueError, match="no model"):
            unpacked(values, number_of_features())
