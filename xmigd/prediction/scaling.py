"""What a job's step would take on other numbers of devices, from steps that were measured (docs/prediction.md).

    step(k) = serial + parallel / k + ring (k - 1) / k + hops (k - 1)        all four at least 0

`serial` does not get shorter, `parallel` is shared by k devices; each of them sends and receives (k - 1) / k of what a
ring reduces, in a number of messages that grows with k. Few measurements leave many models. So there are two answers:
the one model that needs the least `hops` to meet them, and the range of all models that agree with them.

Linear programs, with SciPy, in a process of its own: `python -m xmigd.prediction.scaling`. Without I/O otherwise.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from xmigd.child import answer_of

COMMAND = (sys.executable, "-m", "xmigd.prediction.scaling")
SECONDS = 20.0  # that it may take
MOST_OUTPUT = 1 << 20  # bytes
LEAST_COUNTS = 2  # different numbers of devices that must have been measured
NOISE = 0.05  # how far a measured step may be off
WIDEST = 2.0  # a range whose end is more than so many times its begin says nothing that one could act upon
RARELY = 0.1  # what a share of the step in hops costs, in shares by which a measurement is missed
NOT_INSTALLED = "SciPy is not installed (pip install 'xmig[prediction]')"
TERMS = 4
MOST_DEVICES = 1024
_DIGITS = re.compile(r"\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A job that ran on so many devices."""

    devices: int
    step_ms: float
    collectives: float | None = None  # share of the time in which a device was in one


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """What is not known is None."""

    devices: int
    step_ms: float | None = None
    least_ms: float | None = None
    most_ms: float | None = None
    unknown: str = ""  # why; empty: it is known


@dataclass(frozen=True, slots=True)
class Point:
    """All jobs of a number of devices."""

    devices: int
    step_ms: float  # their median
    off: float  # how far each may be off: a share of it
    collectives: float | None


def is_installed() -> bool:
    return importlib.util.find_spec("scipy") is not None


async def scaled(measured: Sequence[Measured], devices: Sequence[int]) -> list[Scaled]:
    """Raises nothing for a solver that fails."""
    if why := _too_little(measured):
        return [Scaled(devices=each, unknown=why) for each in devices]
    body = json.dumps({"measured": [asdict(each) for each in measured], "devices": list(devices)}).encode()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    out, why = await answer_of(COMMAND, body, within=SECONDS, most=MOST_OUTPUT, environment=environment)
    if out is None:
        why = f"the solver {why or f'took longer than {SECONDS:g} s'}"
        return [Scaled(devices=each, unknown=why) for each in devices]
    return [Scaled(**each) for each in json.loads(out)]


def _too_little(measured: Sequence[Measured]) -> str:
    counts = {each.devices for each in measured}
    if len(counts) < LEAST_COUNTS:
        return f"steps were measured on {len(counts)} numbers of devices; {LEAST_COUNTS} are needed"
    return "" if is_installed() else NOT_INSTALLED


def points_of(measured: Sequence[Measured]) -> list[Point]:
    found = []
    for devices in sorted({each.devices for each in measured}):
        there = [each for each in measured if each.devices == devices]
        steps = [each.step_ms for each in there]
        middle = statistics.median(steps)
        spent = [each.collectives for each in there if each.collectives is not None]
        off = max(NOISE, max(abs(step - middle) for step in steps) / middle)
        found.append(Point(devices, middle, off, max(spent) if spent else None))
    return found


def terms(devices: float) -> list[float]:
    return [1.0, 1 / devices, (devices - 1) / devices, devices - 1]


def scale(measured: Sequence[Measured], devices: Sequence[int]) -> list[Scaled]:
    """Needs SciPy."""
    if why := _too_little(measured):
        return [Scaled(devices=each, unknown=why) for each in devices]
    points = points_of(measured)
    if (model := _simplest(points)) is None:
        return [Scaled(devices=each, unknown="no model agrees with what was measured") for each in devices]
    bounds = _agreeing(points)
    return [_at(each, model, bounds) for each in devices]


Rows = tuple[list[list[float]], list[float]]  # sums of terms, and what each is at most


def _at(devices: int, model: Sequence[float], agreeing: Rows) -> Scaled:
    here = terms(devices)
    step = sum(a * b for a, b in zip(model, here, strict=True))
    ends = [_least([sign * each for each in here], agreeing) for sign in (1, -1)]
    if ends[0] is None or ends[1] is None:
        return Scaled(devices=devices, unknown="steps of so many devices have no bound")
    low, high = (abs(sum(a * b for a, b in zip(end, here, strict=True))) for end in ends if end is not None)
    low, high = min(low, step), max(high, step)
    if high > WIDEST * low:
        return Scaled(
            devices=devices,
            unknown=f"models that agree with the measured steps differ too much: {low:.3g} ms to {high:.3g} ms",
        )
    return Scaled(devices=devices, step_ms=step, least_ms=low, most_ms=high)


def _simplest(points: Sequence[Point]) -> list[float] | None:
    """That misses the points least, in shares of each; hops count as a miss, a little."""
    count, last = len(points), points[-1].devices
    cost = [0.0, 0.0, 0.0, RARELY * (last - 1) / points[-1].step_ms, *[1.0] * count]
    rows, most = [], []
    for number, point in enumerate(points):
        for sign in (1.0, -1.0):
            row = [sign * each / point.step_ms for each in terms(point.devices)]
            rows.append([*row, *(-1.0 if other == number else 0.0 for other in range(count))])
            most.append(sign)
    found = _least(cost, (rows, most))
    return None if found is None else found[:TERMS]


def _agreeing(points: Sequence[Point]) -> Rows:
    """Models that are as far off as each point may be; further, if there is none. Time in collectives is at most what
    the devices were in them: they wait for each other there, too."""
    rows, most = _limits(points, 0.0)
    slack = _least([0.0] * TERMS + [1.0], ([[*row, -1.0] for row in rows], most))
    return _limits(points, 0.0 if slack is None else slack[TERMS] * (1 + 1e-6) + 1e-9)


def _limits(points: Sequence[Point], slack: float) -> Rows:
    rows, most = [], []
    for point in points:
        here = [each / point.step_ms for each in terms(point.devices)]
        rows += [here, [-each for each in here]]
        most += [1 + point.off + slack, point.off + slack - 1]
        if point.collectives is not None:
            rows.append([0.0, 0.0, *here[2:]])
            most.append(point.collectives + point.off + slack)
    return rows, most


def _least(cost: Sequence[float], rows: Rows) -> list[float] | None:
    """Of what is at least 0; None: there is nothing, or no least."""
    from scipy.optimize import linprog

    found: Any = linprog(cost, A_ub=rows[0], b_ub=rows[1], bounds=(0, None), method="highs")
    return [float(each) for each in found.x] if found.status == 0 else None


def kind_of(name: str, command: str, devices: int) -> tuple[str, str]:
    """Jobs of one kind differ in their number of devices: where the command has this number, it may have another.
    Every other number stays, a batch size among them. Names do not change the work."""
    return _DIGITS.sub("#", name), _DIGITS.sub(lambda found: "#" if found[0] == str(devices) else found[0], command)


def is_usable(step_ms: float | None) -> bool:
    return step_ms is not None and math.isfinite(step_ms) and step_ms > 0


def main() -> None:
    os.nice(10)  # recoveries come first
    request = json.load(sys.stdin)
    found = scale([Measured(**each) for each in request["measured"]], request["devices"])
    json.dump([asdict(each) for each in found], sys.stdout)


if __name__ == "__main__":
    main()
