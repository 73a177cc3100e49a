"""Predicted run times over a public trace, in order of time, beside the user's estimate and a plain average.

Each job is predicted at its start, and again after its first minute, from jobs that had ended by then; the model is
trained again whenever so many more have ended. Once with the walltimes that users requested, and once without. Steps
over several GPUs: each of a public table is left out once, and predicted from the others. The data:
tests/prediction/trace/README.md.
"""

from __future__ import annotations

import csv
import gzip
import heapq
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from tests.bench.native import Failed
from xmigd.measurements import Missing, Row
from xmigd.prediction.features import FIRST_MINUTE, Known, Past, Subject
from xmigd.prediction.model import LEAST_JOBS, Model
from xmigd.prediction.scaling import Measured, Scaled, scale
from xmigd.prediction.trainer import is_installed, train

TRACE = Path(__file__).parents[1] / "prediction/trace/eagle.csv.gz"
SCALING = TRACE.parent / "scaling.csv"
AGAIN_AFTER = 50  # ended jobs
AVERAGED = 5  # last jobs of the user
MISSING = [
    Missing(name="peak memory", why="the trace has no peaks of device memory"),
    Missing(name="jobs on GPUs", why="4 of the trace's 1000 jobs have GPUs"),
    Missing(
        name="steps over GPUs with profiles", why="the tables have no time in collectives, which makes ranges narrower"
    ),
]


@dataclass(frozen=True, slots=True)
class Traced:
    past: Past
    estimate: float  # seconds that its user requested


@dataclass(frozen=True, slots=True)
class Forecast:
    """Of the seconds that remain at that moment."""

    real: float
    estimate: float
    average: float  # of the user's last jobs; without one that has ended, the estimate
    p50: float | None  # None: unknown
    p90: float | None
    user: str


def read_trace(path: Path = TRACE) -> list[Traced]:
    with gzip.open(path, "rt") as lines:
        return [
            Traced(
                Past(
                    subject=Subject(
                        user=row["user"], name=_word(row["name"]), command=_word(row["work_dir"]),
                        devices=int(row["nodes_req"]), started_at=_unix(row["start_time"]),
                        walltime=float(row["wallclock_req"]),
                    ),
                    seconds=float(row["run_time"]),
                ),
                float(row["wallclock_req"]),
            )
            for row in csv.DictReader(lines)
        ]  # fmt: skip


def _word(pseudonym: str) -> str:
    """Of a name that the trace hides behind a number: without digits, which would count as a part of a series."""
    return pseudonym.translate(str.maketrans("0123456789", "abcdefghij"))


def _unix(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


def without_walltimes(trace: Sequence[Traced]) -> list[Traced]:
    return [replace(job, past=replace(job.past, subject=replace(job.past.subject, walltime=None))) for job in trace]


def walk(trace: Sequence[Traced]) -> tuple[list[Forecast], list[Forecast]]:
    """At the starts, and after the first minute; without the jobs before there is a model."""
    moments = sorted(
        ((job.past.subject.started_at + mark, mark, number) for number, job in enumerate(trace)
         for mark in (0.0, FIRST_MINUTE) if job.past.seconds > mark),
    )  # fmt: skip
    ends = [(job.past.ended_at, number) for number, job in enumerate(trace)]
    heapq.heapify(ends)
    known, ended, model, trained = Known(), list[Past](), None, 0
    of_user: dict[str, list[float]] = {}
    found: dict[float, list[Forecast]] = {0.0: [], FIRST_MINUTE: []}
    for at, mark, number in moments:
        while ends and ends[0][0] <= at:
            past = trace[heapq.heappop(ends)[1]].past
            known.add(past)
            ended.append(past)
            of_user.setdefault(past.subject.user, []).append(past.seconds)
        if len(ended) >= max(LEAST_JOBS, trained + AGAIN_AFTER):
            model, trained = train(ended), len(ended)
        if model is not None:
            found[mark].append(_forecast(trace[number], mark, model, known, of_user))
    return found[0.0], found[FIRST_MINUTE]


def _forecast(job: Traced, mark: float, model: Model, known: Known, of_user: dict[str, list[float]]) -> Forecast:
    subject = job.past.subject
    predicted = model.predict("remaining", known, subject, mark)
    last = of_user.get(subject.user, [])[-AVERAGED:] or [job.estimate]
    return Forecast(
        real=job.past.seconds - mark, estimate=max(0.0, job.estimate - mark),
        average=max(0.0, statistics.mean(last) - mark), p50=predicted.p50, p90=predicted.p90,
        user=subject.user,
    )  # fmt: skip


def measure() -> Iterator[Row]:
    if not is_installed():
        raise Failed("scikit-learn is not installed")
    trace = read_trace()
    for of, jobs in (("", trace), (", without walltimes", without_walltimes(trace))):
        for when, forecasts in zip(("at the start", "after a minute"), walk(jobs), strict=True):
            yield from _rows(when + of, forecasts, len(trace))
    yield from _scaling_rows()


def pinball(real: float, given: float, quantile: float) -> float:
    return max(quantile * (real - given), (quantile - 1) * (real - given))


def _rows(when: str, forecasts: Sequence[Forecast], jobs: int) -> Iterator[Row]:
    known = [each for each in forecasts if each.p50 is not None]
    about = f"NREL Eagle, {jobs} jobs in order of time; {len(known)} that are known"
    yield Row(
        name=f"{when}: known", value=round(100 * len(known) / len(forecasts), 1), unit="%", target=70, better="higher",
        conditions=f"NREL Eagle; of {len(forecasts)} jobs after the first {LEAST_JOBS} had ended",
    )  # fmt: skip
    errors = {
        "P50": [abs(each.real - (each.p50 or 0.0)) for each in known],
        "the user's last jobs": [abs(each.real - (each.average)) for each in known],
        "the user's estimate": [abs(each.real - each.estimate) for each in known],
    }
    plain = statistics.median(errors["the user's last jobs"])
    for who, off in errors.items():
        yield Row(
            name=f"{when}: median absolute error, {who}", value=round(statistics.median(off), 1), unit="s",
            target=round(plain, 1) if who == "P50" else None, better="lower", conditions=about,
        )  # fmt: skip
    high = {
        "P90": [(each.real, each.p90 or 0.0) for each in known],
        "the user's last jobs": [(each.real, each.average) for each in known],
        "the user's estimate": [(each.real, each.estimate) for each in known],
    }
    losses = {who: statistics.mean(pinball(*each, 0.9) for each in pairs) for who, pairs in high.items()}
    for who, loss in losses.items():
        yield Row(
            name=f"{when}: mean pinball loss at 0.9, {who}", value=round(loss, 1), unit="s",
            target=round(min(losses["the user's last jobs"], losses["the user's estimate"]), 1) if who == "P90"
            else None, better="lower", conditions=about,
        )  # fmt: skip
    for who, pairs in high.items():
        covered = 100 * statistics.mean(real <= given for real, given in pairs)
        yield Row(
            name=f"{when}: jobs that end within {who}", value=round(covered, 1), unit="%",
            target=90 if who == "P90" else None, better="higher", conditions=f"{about}; a calibrated P90 has 90 %",
        )  # fmt: skip
    by_user: dict[str, list[bool]] = {}
    for each in known:
        by_user.setdefault(each.user, []).append(each.real <= (each.p90 or 0.0))
    rates = [statistics.mean(hits) for hits in by_user.values() if len(hits) >= 10]
    if rates:
        yield Row(
            name=f"{when}: jobs that end within P90, of the user with the fewest",
            value=round(100 * min(rates), 1), unit="%", better="higher",
            conditions=f"NREL Eagle; {len(rates)} users with at least 10 jobs",
        )  # fmt: skip
    ratios = [(each.p90 or 0.0) / max(each.real, 1.0) for each in known]
    yield Row(
        name=f"{when}: P90 of the real time, median", value=round(statistics.median(ratios), 3), unit="times",
        better="lower", conditions=about,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Left:
    """A step that was left out, and what each says of it, ms."""

    real: float
    model: Scaled
    linear: float  # as long as all devices have their part of it
    average: float


def read_scaling(path: Path = SCALING) -> dict[str, list[dict[int, float]]]:
    """Steps by number of devices, ms: of jobs with a batch for each device, and with one for all of them. Of one item
    (and of one for each device): batches do not matter, because only shares of a step count."""
    found: dict[str, dict[str, dict[int, float]]] = {"device": {}, "total": {}}
    with path.open() as lines:
        for row in csv.DictReader(lines):
            devices, per_s = int(row["devices"]), float(row["throughput"])
            step = 1e3 * (devices if row["batch_of"] == "device" else 1) / per_s
            found[row["batch_of"]].setdefault(row["series"], {})[devices] = step
    return {kind: list(series.values()) for kind, series in found.items()}


def leave_out(series: dict[int, float], devices: int) -> Left:
    rest = {count: step for count, step in series.items() if count != devices}
    (model,) = scale([Measured(devices=count, step_ms=step) for count, step in rest.items()], [devices])
    nearest = min(rest, key=lambda count: abs(math.log(count / devices)))
    return Left(
        real=series[devices], model=model, linear=rest[nearest] * nearest / devices,
        average=statistics.fmean(rest.values()),
    )  # fmt: skip


def _scaling_rows() -> Iterator[Row]:
    for kind, all_series in read_scaling().items():
        left = [leave_out(series, devices) for series in all_series for devices in series]
        known = [each for each in left if each.model.step_ms is not None]
        what = f"step over GPUs, {'a batch for each' if kind == 'device' else 'one batch for all'}"
        about = f"NVIDIA's tables, {len(all_series)} trainings, each number of GPUs left out once"
        yield Row(
            name=f"{what}: known", value=round(100 * len(known) / len(left), 1), unit="%", better="higher",
            conditions=f"{about}; of {len(left)}",
        )  # fmt: skip
        off = {
            "the model": [abs((each.model.step_ms or 0.0) - each.real) / each.real for each in known],
            "linear scaling": [abs(each.linear - each.real) / each.real for each in known],
            "the average": [abs(each.average - each.real) / each.real for each in known],
        }
        best = min(statistics.median(off["linear scaling"]), statistics.median(off["the average"]))
        for who, errors in off.items():
            yield Row(
                name=f"{what}: median absolute error, {who}", value=round(100 * statistics.median(errors), 2), unit="%",
                target=round(100 * best, 2) if who == "the model" else None, better="lower",
                conditions=f"{about}; {len(known)} that are known",
            )  # fmt: skip
        inside = [(each.model.least_ms or 0.0) <= each.real <= (each.model.most_ms or 0.0) for each in known]
        yield Row(
            name=f"{what}: within the range", value=round(100 * statistics.fmean(inside), 1), unit="%", target=90,
            better="higher", conditions=f"{about}; {len(known)} that are known",
        )  # fmt: skip
        widths = [(each.model.most_ms or 0.0) / (each.model.least_ms or 1.0) for each in known]
        yield Row(
            name=f"{what}: the range's end, median", value=round(statistics.median(widths), 3), unit="times",
            better="lower", conditions=f"times its begin; {about}; {len(known)} that are known",
        )  # fmt: skip
