"""Faults at every point where one can be injected, and faults that are the program's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests import harness
from tests.recovery.conftest import Starter

STEPS = 400
RECORDS = (40, 700, 2500)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["kill", "fault"])
@pytest.mark.parametrize("point", ["record", "kernel", "copy"])
def test_in_the_work(start: Starter, undisturbed: Callable[..., str], point: str, kind: str) -> None:
    expected = undisturbed("training", STEPS)
    program = start("training", STEPS)
    for sequence in RECORDS:
        program.inject(kind, point=point, sequence=sequence)
    harness.go(program)
    assert harness.output(program) == expected
    program.until("ended")
    recoveries = program.recoveries()
    assert len(recoveries) == len(RECORDS)
    assert all(r["exact"] for r in recoveries)
    assert [f["kind"] for f in program.faults()] == ["injected"] * len(RECORDS)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["kill", "fault"])
@pytest.mark.parametrize("chunk", [0, 1, 5])
def test_during_a_snapshot(start: Starter, undisturbed: Callable[..., str], kind: str, chunk: int) -> None:
    expected = undisturbed("training", STEPS, 16)
    program = start("training", STEPS, 16, STEPS - 100)  # at the latest there it rests, and a snapshot is taken
    program.inject(kind, point="snapshot", sequence=chunk)
    harness.go(program)
    harness.wait_until(lambda: [r["outcome"] for r in program.recoveries()] == ["resumed"], "it is recovered")
    assert harness.output(program) == expected
    program.until("ended")
    assert [(r["outcome"], r["exact"]) for r in program.recoveries()] == [("resumed", True)]


@pytest.mark.parametrize("kind", ["kill", "fault"])
def test_during_a_replay(start: Starter, undisturbed: Callable[..., str], kind: str) -> None:
    expected = undisturbed("training", STEPS)
    program = start("training", STEPS)
    for sequence in range(500, 5000, 500):  # several: right after a snapshot there is nothing to replay
        program.inject("kill", sequence=sequence)
    for record in (1, 2, 5, 100, 300):  # on a busy machine the last snapshot is a few records old, or some hundred
        program.inject(kind, point="replay", sequence=record)
    harness.go(program)
    assert harness.output(program) == expected
    program.until("ended")
    recoveries = program.recoveries()
    assert all((r["outcome"], r["exact"]) == ("resumed", True) for r in recoveries)
    assert sum(r["attempts"] - 1 for r in recoveries) >= 2


def test_kernel_without_end(start: Starter, undisturbed: Callable[..., str]) -> None:
    """A kernel hangs; whoever kills the server frees the program."""
    expected = undisturbed("training", STEPS)
    program = start("training", STEPS)
    program.inject("hang", point="kernel", sequence=1000)
    harness.go(program)
    harness.injected(program)
    harness.wait_until(lambda: harness.stands_still(program), "the program waits for the kernel")
    assert program.process.poll() is None
    harness.kill_server(program)
    assert harness.output(program) == expected


@pytest.mark.parametrize(("which", "error"), [("store", 700), ("assert", 710), ("trap", 719), ("misaligned", 716)])
def test_own_fault_reaches_the_program(start: Starter, which: str, error: int) -> None:
    program = start("own_fault", which)
    harness.go(program)
    output = harness.output(program)
    assert f"error {error}" in output
    assert "after a reset" in output
    program.until("ended")
    faults = program.faults()
    # Once in the first run, once in the replay, and then it was the program's own.
    assert [f["kind"] for f in faults][:2] == ["device", "device"]
    assert {f["error"] for f in faults if f["error"] is not None} == {error}
    assert program.recoveries()[-1]["delivered_error"] == error


@pytest.mark.parametrize(("value", "at_launch"), [("1", 719), ("0", 0), ("", 0)])
def test_a_launch_that_blocks_is_reported_of_its_kernel(start: Starter, value: str, at_launch: int) -> None:
    """CUDA_LAUNCH_BLOCKING=1 is how programs are debugged: the error comes from the launch that caused it."""
    program = start("blocking", environment={"CUDA_LAUNCH_BLOCKING": value})
    program.inject("kill", sequence=4)
    harness.go(program)
    _, *reported = harness.output(program).splitlines()
    assert reported == [f"launch {at_launch}", "synchronize 719"]


def test_own_fault_and_kills(start: Starter) -> None:
    """The error stays with the program across further recoveries, and so does the reset."""
    outputs = []
    for kills in ((), (6, 8, 11, 14)):
        program = start("own_fault", "assert")
        for sequence in kills:
            program.inject("kill", sequence=sequence)
        harness.go(program)
        outputs.append(harness.output(program))
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("kills", [(), (20, 30)])
def test_memory_of_another_device(start: Starter, kills: tuple[int, ...]) -> None:
    """A kernel that touches another device's memory without access faults, as on a GPU."""
    program = start("peer_fault", device="cpu:0,1")
    for sequence in kills:
        program.inject("kill", sequence=sequence)
    harness.go(program)
    reported = harness.output(program).splitlines()
    assert reported[0] == "error 700"
    assert [line.rpartition(" ")[0] for line in reported[1:]] == ["the other device", "with access"]
    program.until("ended")
    assert 700 in [r["delivered_error"] for r in program.recoveries()]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["kill", "fault"])
@pytest.mark.parametrize("point", ["record", "kernel", "copy"])
def test_in_the_work_of_two_devices(start: Starter, undisturbed: Callable[..., str], point: str, kind: str) -> None:
    expected = undisturbed("split", STEPS, device="cpu:0,1")
    program = start("split", STEPS, device="cpu:0,1")
    for sequence in (41, 400, 1701, 2502):  # of either device
        program.inject(kind, point=point, sequence=sequence)
    harness.go(program)
    assert harness.output(program) == expected
    program.until("ended")
    assert all(r["exact"] for r in program.recoveries())
    assert [f["kind"] for f in program.faults()] == ["injected"] * 4
