"""Best-effort jobs whose quotas do not fit into a device together take turns on it, in host memory meanwhile."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import harness
from tests.migration.moves import info, succeeded
from tests.scheduling.preempting import continued, preempted
from tests.sharing.conftest import MIB, PROGRAMS, answer, ask
from xmigd.client import Refused
from xmigd.demo.node import Node, Program

Start = Callable[..., Program]
SLICE = 0.5


@pytest.fixture
def node(native_dir: Path) -> Iterator[Node]:
    with harness.own_node(
        native_dir, devices="cpu:0", device_memory=512 * MIB, port=-1, rotation_slice=SLICE, standby=False
    ) as node:
        yield node


@pytest.fixture
def begin(node: Node, kernels: Path) -> Iterator[Start]:
    """Start a job with a quota of so many MiB, of which it holds all but 50; it is admitted once there is room."""
    begun: list[Program] = []

    def begin(mib: int = 300, priority: str = "best-effort", held: int | None = None) -> Program:
        request = {"priority": priority, "memory_quota": mib * MIB}
        holds = mib - 50 if held is None else held

        def admitted() -> bool:
            with contextlib.suppress(Refused):
                begun.append(
                    harness.start(node, PROGRAMS / "steps.py", holds, kernels=kernels, device="cpu:0", request=request)
                )
                return True
            return False

        harness.wait_until(admitted, "there is room for it")
        started = begun[-1]
        harness.go(started)
        assert answer(started) == "ready to work"
        return started

    yield begin
    for each in begun:
        each.process.kill()
        each.process.wait()


def swaps(program: Program, kind: str) -> int:
    found = program.node.client.get("/v1/operations", job=program.job, kind=kind, limit=1000)
    return sum(each["requestor"] == "rotation" for each in found)


def is_suspended(program: Program) -> bool:
    return bool(info(program)["state"] == "suspended")


def test_they_take_turns(node: Node, begin: Start) -> None:
    first = begin()
    # A job that asks for room at its start is given it: the first one has had its slice then.
    second = begin()
    for program in (first, second):  # each answers, though they are never there at the same time
        ask(program, 30)
    expected = answer(first)
    assert answer(second) == expected
    harness.wait_until(lambda: min(swaps(each, "resumption") for each in (first, second)) >= 1, "both have come back")
    # One of a higher class does not wait for the slice, and nobody is suspended for what cannot fit.
    with pytest.raises(Refused) as refused:
        node.client.post("/v1/jobs", {"memory_quota": 600 * MIB, "device": "cpu:0"})
    assert refused.value.code == "quota_too_large"
    critical = begin(400, "critical")
    assert is_suspended(first)
    assert is_suspended(second)
    critical.process.kill()
    critical.until("ended")
    for program in (first, second):
        ask(program, 30)
    assert answer(first) == answer(second)


def test_one_that_is_preempted_while_it_waits_stays_away(node: Node, begin: Start) -> None:
    first, second = begin(), begin()

    def preempted_as_it_waits() -> bool:
        harness.wait_until(lambda: is_suspended(first), "it waits")
        if preempted(first, prefer="suspend")["ms"] == 0:
            return True
        continued(node, first.job)
        return False

    harness.wait_until(preempted_as_it_waits, "it was suspended before")
    third = begin()
    before = [swaps(each, "resumption") for each in (first, second, third)]
    harness.wait_until(lambda: swaps(third, "resumption") >= before[2] + 2, "others take turns")
    assert (is_suspended(first), swaps(first, "resumption")) == (True, before[0])
    for each in (second, third):
        ask(each, 30)
    assert answer(second) == answer(third)


def test_one_that_is_suspended_while_it_waits_stays_away(node: Node, begin: Start) -> None:
    """It is in host memory already. Resumed by request, it takes its turns again."""
    first, second = begin(), begin()

    def suspended_as_it_waits() -> bool:
        harness.wait_until(lambda: is_suspended(first), "it waits")
        with contextlib.suppress(Refused):  # its turn has come
            operation = node.client.post(f"/v1/jobs/{first.job}:suspend", {"to": "host"})
            operation = node.client.get(f"/v1/operations/{operation['id']}/wait", timeout=60)
            result = operation["result"] or {}
            if operation["state"] == "succeeded" and result["downtime_ms"] is None:
                return True
            if operation["state"] == "succeeded":  # it ran
                succeeded(node, node.client.post(f"/v1/jobs/{first.job}:resume", {}))
        return False

    harness.wait_until(suspended_as_it_waits, "it was suspended before")
    third = begin()
    before = [swaps(each, "resumption") for each in (first, third)]
    harness.wait_until(lambda: swaps(third, "resumption") >= before[1] + 2, "others take turns")
    assert (is_suspended(first), swaps(first, "resumption")) == (True, before[0])
    second.process.kill()
    third.process.kill()
    harness.wait_until(lambda: resumed(first), "it goes on")
    ask(first, 30)
    assert answer(first)


def resumed(program: Program) -> bool:
    """Once there is room for it."""
    with contextlib.suppress(Refused):
        operation = program.node.client.post(f"/v1/jobs/{program.job}:resume", {})
        return bool(succeeded(program.node, operation))
    return False


def test_a_large_one_is_not_overtaken_for_ever(node: Node, begin: Start) -> None:
    """Two small ones have to go for it, and their slices never end together."""
    large = begin(400, held=20)
    small = [begin(200, held=20) for _ in range(3)]
    assert is_suspended(large)
    for turn in (1, 2):
        harness.wait_until(lambda turn=turn: swaps(large, "resumption") >= turn, "the large one comes")  # type: ignore[misc]
        harness.wait_until(lambda: is_suspended(large), "and gives way")
    for each in (large, *small):
        ask(each, 30)
    assert len({answer(each) for each in (large, *small)}) == 1


def test_nobody_goes_for_what_cannot_come(node: Node, begin: Start) -> None:
    """The device takes nobody, so who is there stays."""
    jobs = begin(), begin()
    there: list[Program] = []

    def stays() -> bool:
        """For six slices. A swap that had begun before may still take who is there away."""
        node.client.patch("/v1/devices/cpu:0", {"cordoned": True, "reason": "a new fan"}, "*")
        there[:] = [each for each in jobs if not is_suspended(each)]
        before, end = [swaps(each, "suspension") for each in jobs], time.monotonic() + 6 * SLICE
        while len(there) == 1 and time.monotonic() < end:
            if is_suspended(there[0]) or [swaps(each, "suspension") for each in jobs] != before:
                there.clear()
        if len(there) != 1:
            node.client.patch("/v1/devices/cpu:0", {"cordoned": False}, "*")
        return len(there) == 1

    harness.wait_until(stays, "who is there stays")
    before = swaps(there[0], "suspension")
    node.client.patch("/v1/devices/cpu:0", {"cordoned": False}, "*")
    harness.wait_until(lambda: swaps(there[0], "suspension") > before, "they take turns again")
