"""Best-effort jobs whose quotas do not fit into a device together take turns on it, in host memory meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import harness
from tests.migration.moves import info
from tests.sharing.conftest import MIB, PROGRAMS, answer, ask
from xmigd.client import Refused
from xmigd.demo.node import Node, Program


@pytest.fixture
def node(native_dir: Path) -> Iterator[Node]:
    with harness.own_node(
        native_dir, devices="cpu:0", device_memory=512 * MIB, port=-1, rotation_slice=0.5, standby=False
    ) as node:
        yield node


def test_they_take_turns(node: Node, kernels: Path) -> None:
    def start(priority: str = "best-effort", mib: int = 300) -> Program:
        request = {"priority": priority, "memory_quota": mib * MIB}
        started = harness.start(node, PROGRAMS / "steps.py", mib - 50, kernels=kernels, device="cpu:0", request=request)
        harness.go(started)
        assert answer(started) == "ready to work"
        return started

    def swaps(job: str, kind: str) -> int:
        found = node.client.get("/v1/operations", job=job, limit=100)
        return sum(each["kind"] == kind and each["requestor"] == "rotation" for each in found)

    first = start()
    # A job that asks for room at its start is given it: the first one has had its slice then.
    started: list[Program] = []

    def admitted() -> bool:
        with contextlib.suppress(Refused):
            started.append(start())
        return bool(started)

    harness.wait_until(admitted, "the first one's slice is over")
    (second,) = started
    for program in (first, second):  # each answers, though they are never there at the same time
        ask(program, 30)
    expected = answer(first)
    assert answer(second) == expected
    harness.wait_until(
        lambda: min(swaps(each.job, "resumption") for each in (first, second)) >= 1, "both have come back"
    )
    # One of a higher class does not wait for the slice, and nobody is suspended for what cannot fit.
    with pytest.raises(Refused) as refused:
        node.client.post("/v1/jobs", {"memory_quota": 600 * MIB, "device": "cpu:0"})
    assert refused.value.code == "quota_too_large"
    critical = start("critical", 400)
    assert {info(each)["state"] for each in (first, second)} == {"suspended"}
    critical.process.kill()
    critical.until("ended")
    for program in (first, second):
        ask(program, 30)
    assert answer(first) == answer(second)
    for program in (first, second):
        program.process.kill()
