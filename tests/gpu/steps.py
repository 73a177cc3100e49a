"""Step times and start-up: natively and under xMIG in turn, in one run, the ratio of the medians."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from tests.gpu.bench import Bench, Outcome
from tests.gpu.cases import Case
from tests.gpu.compare import differences, distance
from xmigd.measurements import Row

PAIRS = 2


def measure(bench: Bench, case: Case) -> Iterator[Row]:
    native: list[Outcome] = []
    xmig: list[Outcome] = []
    with bench.node() as node:
        for _ in range(PAIRS):
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
        target=1.1, better="lower", conditions=f"{case.said}; {times(native, xmig, 'first_step_s')}",
    )  # fmt: skip
    if case.deterministic:
        found = [text for outcome in xmig for text in differences(native[0].result, outcome.result)]
        unsure = differences(native[0].result, native[1].result)
        yield Row(
            name=f"{case.name}: differences", value=len(found), unit="in all", target=0, better="lower",
            conditions=f"of {PAIRS} runs from a native one, to the last bit; two native ones: {len(unsure)}",
        )  # fmt: skip
    else:
        yield spread(case, native, xmig)


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
