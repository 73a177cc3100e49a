"""What a profile and a trace cost: launches executed by the null device, which does nothing, so that only the server's
time counts. A GPU's driver takes some 2.3 µs for a launch (docs/profile.md)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from tests.bench.native import Programs
from xmigd.client import Refused
from xmigd.demo.node import Node
from xmigd.measurements import Row

OF_A_LAUNCH = 2310.0  # ns that a launch takes in all on an H200


def measure(programs: Programs, runs: int) -> Iterator[Row]:
    """Rows, each beside one without. In turn, so that what the machine does besides meets all alike."""
    taken: dict[str, list[float]] = {"none": [], "profile": [], "trace": []}
    with (
        programs.node("null:0", profile_every=0) as without, programs.node("null:0", profile_every=64) as profiled,
    ):  # fmt: skip
        for _ in range(runs):
            taken["none"].append(programs.run(without, "calls", "sustained")["per_second"])
            taken["profile"].append(programs.run(profiled, "calls", "sustained")["per_second"])
            taken["trace"].append(traced(programs, without))
    # The least, since what else the machine does only adds to it, and the difference is what counts.
    each = {name: 1e9 / max(rates) for name, rates in taken.items()}
    yield Row(
        name="a launch, no profile and no trace", value=round(each["none"], 1), unit="ns", better="lower",
        conditions="sustained launches with 8 parameters, null device, until all are executed; the least of the runs",
    )  # fmt: skip
    for name, text in (
        ("profile", "with a profile (profile_every 64)"),
        ("trace", "while a trace is taken"),
    ):
        yield Row(
            name=f"a launch, {text}", value=round(each[name], 1), unit="ns", better="lower",
            conditions=f"the same; {each[name] - each['none']:+.1f} ns",
        )  # fmt: skip
    yield Row(
        name="cost of a profile, share of a launch on a GPU", target=1, better="lower", unit="%",
        value=round(100 * (each["profile"] - each["none"]) / OF_A_LAUNCH, 2),
        conditions=f"the difference of the first two rows, of {OF_A_LAUNCH / 1e3:g} µs",
    )  # fmt: skip


def traced(programs: Programs, node: Node) -> float:
    """Launches a second, while a trace is taken."""
    over = threading.Event()

    def take() -> None:
        while not over.wait(0.02):
            for job in node.client.get("/v1/jobs", live=True):
                with contextlib.suppress(Refused):  # a trace of it is under way, or it has no process yet
                    node.client.post(f"/v1/jobs/{job['id']}/traces", {"seconds": 10})

    thread = threading.Thread(target=take)
    thread.start()
    try:
        return float(programs.run(node, "calls", "sustained")["per_second"])
    finally:
        over.set()
        thread.join()
