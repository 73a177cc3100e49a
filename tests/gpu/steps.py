"""Step times and start-up: natively and under xMIG in turn, in one run, the ratio of the medians.

One pair of runs says enough where the outcome is not in doubt: see `settled`."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from tests.gpu.bench import Bench, Outcome
from tests.gpu.cases import Case
from tests.gpu.compare import differences, distance
from xmigd.measurements import Row

PAIRS = 2  # at most
START_TARGET = 1.1
SURE_START = 0.03  # what starts of one program are apart, as a rule


def measure(bench: Bench, case: Case) -> Iterator[Row]:
    native: list[Outcome] = []
    xmig: list[Outcome] = []
    with bench.node() as node:
        while len(native) < PAIRS and not settled(case, native, xmig):
            native.append(bench.native(case))
            xmig.append(bench.under(node, case))
    cuts = [cut["ms"] for outcome in xmig for cut in outcome.cuts]
    yield Row(
        name=f"{case.name}: step", value=round(ratio(native, xmig, "step_s"), 4), unit="× native", target=case.target,
        better="lower", conditions=f"{case.said}; {times(native, xmig, 'step_s')}; {len(cuts)} cuts"
        + (f" of {median(cuts):.1f} ms" if cuts else ""),
    )  # fmt: skip
    yield Row(
        name=f"{case.name}: start to first step", value=round(ratio(native, xmig, "first_step_s"), 3), unit="× native",
        target=START_TARGET, better="lower", conditions=f"{case.said}; {times(native, xmig, 'first_step_s')}",
    )  # fmt: skip
    if case.deterministic:
        found = [text for outcome in xmig for text in differences(native[0].result, outcome.result)]
        unsure = [text for outcome in native[1:] for text in differences(native[0].result, outcome.result)]
        said = f"; two native ones: {len(unsure)}" if native[1:] else ""
        yield Row(
            name=f"{case.name}: differences", value=len(found), unit="in all", target=0, better="lower",
            conditions=f"of {len(xmig)} run{'s' * (len(xmig) > 1)} from a native one, to the last bit{said}",
        )  # fmt: skip
    else:
        yield spread(case, native, xmig)


def settled(case: Case, native: list[Outcome], xmig: list[Outcome]) -> bool:
    """Is one pair of runs enough? When its results are the same to the bit, and step time and start-up are further from
    their targets than blocks of steps of one run are from each other (a start has no blocks: SURE_START)."""
    if len(native) != 1 or not case.deterministic or case.target is None:
        return False
    if differences(native[0].result, xmig[0].result):
        return False
    step = ratio(native, xmig, "step_s") / case.target
    start = ratio(native, xmig, "first_step_s") / START_TARGET
    apart = max(scatter(outcome) for outcome in (*native, *xmig))
    return abs(step - 1) > apart and abs(start - 1) > SURE_START


def scatter(outcome: Outcome) -> float:
    """How far the middle half of a run's blocks of steps is apart, relative to their median."""
    return float((outcome.result["upper_s"] - outcome.result["lower_s"]) / outcome.result["step_s"])


def ratio(native: list[Outcome], xmig: list[Outcome], key: str) -> float:
    return float(median(o.result[key] for o in xmig) / median(o.result[key] for o in native))


def times(native: list[Outcome], xmig: list[Outcome], key: str) -> str:
    """Both sides' times, in the order in which they were measured."""

    def side(outcomes: list[Outcome]) -> str:
        return ", ".join(f"{1000 * o.result[key]:.4g}" for o in outcomes)

    return f"native {side(native)} ms, xMIG {side(xmig)} ms"


def spread(case: Case, native: list[Outcome], xmig: list[Outcome]) -> Row:
    """How far the losses are from native ones, in terms of how far native ones are from each other."""
    apart = distance(native[0].result, native[1].result)
    away = max(min(distance(n.result, x.result) for n in native) for x in xmig)
    said = f"mean relative difference from the nearer native run {away:.3g}, between two native runs {apart:.3g}"
    return Row(
        name=f"{case.name}: distance of the losses", value=round(away / apart, 3) if apart else away,
        unit="× native spread" if apart else "relative", target=2 if apart else 0, better="lower", conditions=said,
    )  # fmt: skip
