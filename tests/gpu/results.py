"""The same results as natively, to the last bit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tests.gpu.bench import Bench, Outcome
from tests.gpu.cases import FILES, PAIR, Case
from tests.gpu.compare import differences
from xmigd.measurements import Row

NATIVE_RUNS = 4  # at most, where results differ


def measure(bench: Bench, case: Case) -> Iterator[Row]:
    native = bench.native(case)
    with bench.node() as node:
        yield compared(bench, case, native, [bench.under(node, case)])


def measure_alone(bench: Bench, case: Case) -> Iterator[Row]:
    """Each has the device for itself; both import what they need at the same time."""
    with bench.both(case) as (native, xmig):
        yield compared(bench, case, native.all_at_once(), [xmig.all_at_once()])


def compared(bench: Bench, case: Case, native: Outcome, xmig: list[Outcome]) -> Row:
    """A row that names the first differences. What native runs do not share is none."""
    found = [text for outcome in xmig for text in differences(native.result, outcome.result)]
    unsure = natively_different(bench, case, native, found) if found else set()
    found = [text for text in found if text not in unsure]
    failed = native.result.get("failed") or {}
    reported = [case.reported, *([f"different: {', '.join(found[:4])}"] if found else [])]
    reported += [f"not compared, since two native runs differ in it: {', '.join(sorted(unsure)[:4])}"] if unsure else []
    reported += [f"natively failed, too: {', '.join(failed)}"] if failed else []
    reported += [f"the program was informed: {text}" for text in xmig[0].result.get("reported", [])[:1]]
    return Row(
        name=f"{case.name}: differences", value=len(found), unit="in all", target=0, better="lower",
        conditions="; ".join(reported).replace("|", "/"),
    )  # fmt: skip


def natively_different(bench: Bench, case: Case, native: Outcome, found: list[str]) -> set[str]:
    """Where native runs differ among themselves: as many as it takes to explain what was found, or NATIVE_RUNS."""
    unsure: set[str] = set()
    for _ in range(NATIVE_RUNS - 1):
        unsure |= set(differences(native.result, bench.native(case).result))
        if unsure >= set(found):
            break
    return unsure


def two_jobs(bench: Bench) -> Iterator[Row]:
    """Two at the same time, each as if it were alone."""
    native = bench.native(PAIR)
    with bench.node() as node, contextlib.ExitStack() as stack:
        jobs = [stack.enter_context(bench.started(PAIR, node)) for _ in range(2)]
        yield compared(bench, PAIR, native, [job.finish() for job in jobs])


def device_files(bench: Bench) -> Iterator[Row]:
    """A client that holds none can be dumped."""
    native = bench.native(FILES).result["device_files"]
    with bench.node() as node:
        held = bench.under(node, FILES).result["device_files"]
    yield Row(
        name="device files of a training program", value=len(held), unit="in all", target=0, better="lower",
        conditions=f"open or mapped while it trains; natively {len(native)}",
    )  # fmt: skip
