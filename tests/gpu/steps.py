"""Step times, start-up and device memory, natively and under xMIG, in one run: the ratio of the medians.

Both import what they need at the same time; then each starts on the device while the other waits, and they do parts of
their steps in turn. What a machine does meanwhile happens to both. Starts in doubt are repeated."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

from tests.gpu.bench import Bench, Outcome
from tests.gpu.cases import Case
from tests.gpu.compare import differences, spread
from tests.gpu.memory import Weighing
from xmigd.measurements import Row

START_TARGET = 1.1  # and what a server's context takes
SURE_START = 0.03  # what starts of one program are apart, as a rule


def once_more(bench: Bench, case: Case) -> Iterator[Row]:
    """For `measure`, and can be beside others: another native run, because what the framework's default mode computes
    varies; and a start under xMIG, because the native run has filled the cache of what libraries compile."""
    with bench.node() as node, ThreadPoolExecutor(1) as pool:
        started = pool.submit(bench.under, node, case, "--steps 0")
        bench.once_more[case.name] = bench.native(case)
        started.result()
    yield from ()


def measure(bench: Bench, case: Case) -> Iterator[Row]:
    native, xmig, memory = in_turn(bench, case)
    native_starts, xmig_starts = [native.result["first_step_s"]], [xmig.result["first_step_s"]]
    target = START_TARGET + bench.context_s / native_starts[0]
    stopped = ""
    if xmig_starts[0] / native_starts[0] > target - SURE_START:
        with bench.both(case, "--steps 0") as (first, second):
            first.go()
            native_starts.append(first.finish().result["first_step_s"])
            second.go()
            again = second.finish()
            xmig_starts.append(again.result["first_step_s"])
        took = sum(snapshot["ms"] for snapshot in again.snapshots)
        stopped = f"; {len(again.snapshots)} snapshots in the second, of {took:.0f} ms in all"
    yield Row(
        name=f"{case.name}: step", value=round(xmig.result["step_s"] / native.result["step_s"], 4), unit="× native",
        target=case.target, better="lower", conditions=f"{case.reported}; in turns, native {quarters(native)} ms, "
        f"xMIG {quarters(xmig)} ms (the middle half of the blocks); {reported_of(xmig.snapshots)}",
    )  # fmt: skip
    yield Row(
        name=f"{case.name}: start to first step", value=round(median(xmig_starts) / median(native_starts), 3),
        unit="× native", target=round(target, 3), better="lower",
        conditions=f"{case.reported}; native {in_ms(native_starts)} ms, xMIG {in_ms(xmig_starts)} ms, of the first "
        f"{in_ms([native.result['laps_s']['imported']])} and {in_ms([xmig.result['laps_s']['imported']])} ms until all "
        f"was imported{stopped}; the target is {START_TARGET}, and a server's driver and context, which take "
        f"{bench.context_s:.2f} s",
    )  # fmt: skip
    yield memory.row(case)
    if case.deterministic:
        yield Row(
            name=f"{case.name}: differences", value=len(differences(native.result, xmig.result)), unit="in all",
            target=0, better="lower", conditions="from the native run, to the last bit",
        )  # fmt: skip
    else:
        other = bench.once_more.get(case.name) or bench.native(case)
        yield spread(case, [native, other], xmig)


def in_turn(bench: Bench, case: Case) -> tuple[Outcome, Outcome, Weighing]:
    """Native, and under xMIG; and what they take of the device before the first turn."""
    memory = Weighing(bench)
    with bench.both(case) as (native, xmig):
        native.go()
        native.turn(1)
        memory.weigh_native()
        xmig.go()
        xmig.turn(1)
        memory.weigh_xmig(xmig)
        for number in range(2, bench.turns(case) + 1):
            for running in (native, xmig):
                running.go()
                running.turn(number)
        native.go()
        first = native.finish()
        xmig.go()
        return first, xmig.finish(), memory


def quarters(outcome: Outcome) -> str:
    lower, middle, upper = (1000 * outcome.result[key] for key in ("lower_s", "step_s", "upper_s"))
    return f"{middle:.4g} ({lower:.4g} to {upper:.4g})"


def reported_of(snapshots: list[dict[str, Any]]) -> str:
    """How many, and what one took when the program had all of its memory: until then they are cheaper."""
    most = max((snapshot["live_bytes"] for snapshot in snapshots), default=0)
    full = [snapshot["ms"] for snapshot in snapshots if snapshot["live_bytes"] > 0.9 * most]
    if not full:
        return f"{len(snapshots)} snapshots"
    return f"{len(snapshots)} snapshots, {len(full)} of them with all of its memory, {median(full):.1f} ms each"


def in_ms(seconds: list[float]) -> str:
    return ", ".join(f"{1000 * each:.4g}" for each in seconds)
