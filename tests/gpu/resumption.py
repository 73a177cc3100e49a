"""How long after a inject programs went on, as rows: what a recovery spends its time with, and the bounds of it."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from xmigd.measurements import Row

PHASES = ("detected_ms", "standby_ready_ms", "mapped_ms", "restored_ms", "replayed_ms", "resumed_ms")
MEDIAN, WORST = 500, 1500  # ms; of programs that do not run alone, and standbys that may not be warm yet


def phases_of(recoveries: list[dict[str, Any]]) -> str:
    """Milliseconds from the fault, medians."""
    return ", ".join(
        f"{name.removesuffix('_ms').replace('_', ' ')} {median(r[name] or 0 for r in recoveries):.0f}"
        for name in PHASES
    )


def rows(name: str, recoveries: list[dict[str, Any]], reported: str) -> Iterator[Row]:
    """`name`: of the program, and what injected. `recoveries`: those after which it went on, one at least."""
    resumed = [float(r["resumed_ms"]) for r in recoveries]
    slowest = max(recoveries, key=lambda r: float(r["resumed_ms"]))
    cold = sum(r["standby"] != "warm" for r in recoveries)
    yield Row(
        name=f"{name} to resumed, median", value=round(median(resumed), 1), unit="ms", target=MEDIAN, better="lower",
        conditions=f"of {len(recoveries)}, {cold} without a warm standby; medians: {phases_of(recoveries)}; "
        f"{median(r['records'] or 0 for r in recoveries):.0f} records replayed; {reported}",
    )  # fmt: skip
    yield Row(
        name=f"{name} to resumed, worst", value=round(max(resumed), 1), unit="ms", target=WORST, better="lower",
        conditions=f"{'with' if slowest['standby'] == 'warm' else 'without'} a warm standby; {phases_of([slowest])}; "
        f"{slowest['records'] or 0} records replayed; {reported}",
    )  # fmt: skip
