"""One program, undisturbed and then across the deaths of its servers: it does not notice them."""

from __future__ import annotations

from typing import Any

from tests.gpu.bench import Bench
from tests.gpu.cases import Case
from tests.gpu.compare import differences
from tests.gpu.injections import Injection, arm
from tests.harness import ROOT
from xmigd.demo.node import Node

START = ROOT / "tests" / "conformance" / "start.py"
# At these records of the journal, or the first after them. The shortest program makes a thousand.
KILLS = [Injection("kill", 0, "record", sequence) for sequence in (150, 400, 650, 900)]


def check(bench: Bench, node: Node, case: Case) -> dict[str, Any]:
    """Its results, which mean nothing here: they only have to be the same ones."""
    undisturbed = bench.under(node, case)
    assert undisturbed.recoveries == []
    with bench.started(case, node, launcher=START) as running:
        assert running.program is not None
        running.ready()  # a short one may end before all of them are there
        running.program.until("running")
        arm(running.program, KILLS)
        running.go()
        disturbed = running.finish()
    assert differences(undisturbed.result, disturbed.result) == []
    # A server may die before the one before it is replaced: that is one recovery, in two attempts.
    assert len(running.program.faults()) >= len(KILLS)
    assert {(recovery["outcome"], recovery["exact"]) for recovery in disturbed.recoveries} == {("resumed", True)}
    return disturbed.result
