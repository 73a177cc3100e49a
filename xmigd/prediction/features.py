"""What a prediction is made from: jobs that have ended, and of the one in question what is known at that moment.
Without I/O; times are Unix seconds.

Nothing looks into the future: the features of a job at a moment come from jobs that had ended by then. The same code
makes the features of the training and those of a prediction.
"""

from __future__ import annotations

import math
import re
import statistics
import struct
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

FIRST_MINUTE = 60.0
# Seconds since its start at which each past job is an example: as if it had been in question then.
LANDMARKS = (0.0, FIRST_MINUTE, 600.0, 3600.0, 6 * 3600.0)
REMEMBERED = 20  # of each group of similar jobs, the last ones
NONE = -1.0  # not known; every feature that can be unknown is otherwise at least 0
LEAST = 1e-3  # seconds, or bytes: what a logarithm is taken of
_DIGITS = re.compile(r"\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A job as it is known while it runs, or before."""

    user: str
    name: str
    command: str = ""
    labels: tuple[tuple[str, str], ...] = ()
    devices: int = 1
    started_at: float = 0.0
    walltime: float | None = None  # seconds that it takes at most, as its user or scheduler expects
    minute_bytes: int | None = None  # device memory after its first minute, on the device where it has most
    minute_calls: float | None = None  # driver calls per second in its first minute


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """A job that has ended."""

    subject: Subject
    seconds: float
    peak_bytes: int | None = None  # device memory, on the device where it had most

    @property
    def ended_at(self) -> float:
        return self.subject.started_at + self.seconds


def groups(subject: Subject) -> tuple[tuple[str, ...], ...]:
    """To which it belongs, from jobs that are most alike to all of its user. Those of other users are in none: whoever
    gives a job the name of another's would see how long that runs. Digits differ between runs of one thing: seeds,
    dates, parts of a sweep."""
    name, command = _DIGITS.sub("#", subject.name), _DIGITS.sub("#", subject.command)
    labels = " ".join(f"{key}={value}" for key, value in subject.labels)
    return (
        ("same", subject.user, subject.name, subject.command, labels, str(subject.devices)),
        ("alike", subject.user, name, command),
        ("name", subject.user, name),
        ("user", subject.user),
    )


class Known:
    """Jobs that have ended until a moment, by group."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str, ...], deque[Past]] = {}
        self.jobs = 0

    def add(self, past: Past) -> None:
        self.jobs += 1
        for group in groups(past.subject):
            self._groups.setdefault(group, deque(maxlen=REMEMBERED)).append(past)

    def similar(self, subject: Subject) -> int:
        """Past jobs of the same user that are remembered."""
        return len(self._groups.get(("user", subject.user), ()))

    def features(self, subject: Subject, elapsed: float) -> list[float]:
        """`elapsed`: seconds since its start. The first one is what is left of its walltime."""
        hour = datetime.fromtimestamp(subject.started_at + elapsed, UTC).hour
        minute = elapsed >= FIRST_MINUTE
        found = [
            _log(left_of(subject, elapsed)), _log(subject.walltime),
            math.log1p(elapsed), float(subject.devices), float(hour),
            _log(subject.minute_bytes) if minute else NONE, _log(subject.minute_calls) if minute else NONE,
        ]  # fmt: skip
        for group in groups(subject):
            found += _of_group(self._groups.get(group, ()), elapsed)
        return _single(found)


def left_of(subject: Subject, elapsed: float) -> float | None:
    """Seconds of its walltime. None: there is none, or it has taken longer."""
    if subject.walltime is None or elapsed >= subject.walltime:
        return None
    return subject.walltime - elapsed


def yardstick(features: Sequence[float]) -> float:
    """The logarithm of what shares are of: what is left of the walltime, which is known. Trees cannot multiply, and
    jobs that use a third of what they request do so whatever they request."""
    return features[0]


def _of_group(there: Iterable[Past], elapsed: float) -> list[float]:
    jobs = list(there)
    remaining = [math.log1p(past.seconds - elapsed) for past in jobs if past.seconds > elapsed]
    peaks = [math.log1p(past.peak_bytes) for past in jobs if past.peak_bytes is not None]
    return [
        float(len(jobs)), len(remaining) / len(jobs) if jobs else NONE,
        *((remaining[-1], statistics.median(remaining), min(remaining), max(remaining)) if remaining else [NONE] * 4),
        *((peaks[-1], statistics.median(peaks)) if peaks else [NONE] * 2),
    ]  # fmt: skip


def _single(numbers: list[float]) -> list[float]:
    """As scikit-learn's trees see them: rounded to single precision."""
    form = f"{len(numbers)}f"
    return list(struct.unpack(form, struct.pack(form, *numbers)))


def _log(value: float | None) -> float:
    return NONE if value is None else math.log1p(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    user: str
    features: list[float]
    elapsed: float
    at: float  # when this was known
    ended_at: float  # of its job
    remaining: float  # log of seconds
    share: float | None  # log of the share of what is left of the walltime; None: nothing is
    peak: float | None  # log of bytes


def examples(jobs: Sequence[Past]) -> list[Example]:
    """Each job at each landmark that it has reached, in the order in which the jobs ended."""
    ends = sorted(jobs, key=lambda past: past.ended_at)
    moments = sorted(
        ((past.subject.started_at + mark, mark, past) for past in jobs for mark in LANDMARKS if past.seconds > mark),
        key=lambda moment: moment[0],
    )
    known, place, found = Known(), 0, []
    for at, mark, past in moments:
        while place < len(ends) and ends[place].ended_at <= at:
            known.add(ends[place])
            place += 1
        features = known.features(past.subject, mark)
        remaining = math.log(max(past.seconds - mark, LEAST))
        found.append(
            Example(
                user=past.subject.user, features=features, elapsed=mark, at=at, ended_at=past.ended_at,
                remaining=remaining,
                share=None if left_of(past.subject, mark) is None else remaining - yardstick(features),
                peak=None if past.peak_bytes is None else math.log(max(past.peak_bytes, LEAST)),
            )
        )  # fmt: skip
    return sorted(found, key=lambda example: example.ended_at)
