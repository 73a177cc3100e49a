"""A daemon, programs whose steps are known, and what a trace's file has to be."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.recovery.conftest import kernels
from xmigd.demo.node import Node, Program

__all__ = ["kernels", "node", "run_steps"]

PROGRAMS = Path(__file__).parent / "programs"
RunSteps = Callable[[], Program]


@pytest.fixture(scope="module")
def node(native_dir: Path) -> Iterator[Node]:
    with harness.own_node(native_dir, devices="cpu:0,cpu:1", port=-1, profile_every=64) as node:
        yield node


@pytest.fixture
def run_steps(node: Node, kernels: Path) -> Iterator[RunSteps]:
    """`steps`, which goes on until the test is over, and then has computed without an error."""
    started: list[Program] = []

    def start() -> Program:
        program = harness.start(node, PROGRAMS / "steps.py", kernels=kernels)
        started.append(program)
        harness.go(program)
        return program

    yield start
    for program in started:
        assert "steps True" in harness.output(program)


def take(node: Node, program: Program, seconds: float) -> dict[str, Any]:
    """The operation, as it begins."""
    return dict(node.client.post(f"/v1/jobs/{program.job}/traces", {"seconds": seconds}))


def over(node: Node, operation: dict[str, Any]) -> dict[str, Any]:
    """The operation, once it is over."""
    while operation["state"] in ("pending", "running"):
        operation = node.client.get(f"/v1/operations/{operation['id']}/wait", timeout=30)
    return operation


def fetch(node: Node, operation: dict[str, Any]) -> dict[str, Any]:
    assert operation["state"] == "succeeded", operation
    document = json.loads(node.client.get_bytes(f"/v1/traces/{operation['id']}"))
    check_format(document)
    return dict(document)


def check_format(document: Any) -> None:
    """What the Trace Event Format demands, and what makes sense: on one thread nothing begins before what is before it
    has ended."""
    assert set(document) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert document["displayTimeUnit"] in ("ms", "ns")
    named: set[tuple[int, int]] = set()
    threads: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in document["traceEvents"]:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["name"], str)
        match event["ph"]:
            case "M":
                assert event["name"] in (
                    "process_name", "thread_name", "process_sort_index", "thread_sort_index",
                )  # fmt: skip
                if event["name"] == "thread_name":
                    named.add((event["pid"], event["tid"]))
            case "X":
                assert event["dur"] >= 0
                assert event["cat"].split(",")[0] in ("kernel", "copy", "memset", "graph", "collective", "xmig")
                threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
            case "i":
                assert event["s"] in ("g", "p", "t")
                assert event["ts"] >= 0
            case other:
                raise AssertionError(f"no such phase: {other}")
    assert threads.keys() <= named
    for (_, thread), spans in threads.items():
        if thread == 0:  # of xMIG: a snapshot may lie in a replay
            continue
        spans.sort()
        # Two events of a stream, of which a float of milliseconds says the time
        assert all(end <= begin + 0.2 for (_, end), (begin, _) in itertools.pairwise(spans))


def slices(document: dict[str, Any], category: str) -> list[dict[str, Any]]:
    return [
        event for event in document["traceEvents"]
        if event["ph"] == "X" and category in event["cat"].split(",")
    ]  # fmt: skip
