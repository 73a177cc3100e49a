"""A kernel that never ends: noticed, done again, and if it hangs again the program's own."""

from __future__ import annotations

from collections.abc import Callable

from tests import harness
from tests.recovery.conftest import Starter

STEPS = 400
PATIENCE = 3.0  # on a busy machine work that is done in a moment takes a second


def test_a_hang_that_injected_once(start: Starter, undisturbed: Callable[..., str]) -> None:
    expected = undisturbed("training", STEPS)
    program = start("training", STEPS, hang_timeout=PATIENCE)
    program.inject("hang", point="kernel", sequence=1000)
    harness.go(program)
    assert harness.output(program) == expected
    program.until("ended")
    assert [(f["kind"], f["error"]) for f in program.faults()] == [("injected", 702)]
    assert [(r["outcome"], r["exact"]) for r in program.recoveries()] == [("resumed", True)]


def test_a_kernel_of_the_programs_own(start: Starter) -> None:
    program = start("hanging", "endless", hang_timeout=PATIENCE)
    harness.go(program)
    assert "after a reset" in harness.output(program)
    program.until("ended")
    first, second, *rest = program.faults()
    assert [f["error"] for f in (first, second)] == [702, 702]
    assert "no progress" in first["text"]
    assert (first["sequence"], second["op"]) == (None, "xmLaunch")  # found in the replay
    assert [(f["kind"], f["sequence"], f["error"]) for f in rest] == [("program", second["sequence"], 702)]
    assert program.recoveries()[-1]["delivered_error"] == 702


def test_waiting_is_not_hanging(start: Starter) -> None:
    """What waits for the program, or for a value, or just takes long, and a program that does nothing."""
    program = start("hanging", "waits", 4, hang_timeout=1.5)
    harness.go(program)
    assert "after slow kernels" in harness.output(program)
    program.until("ended")
    assert program.faults() == []


def test_never(start: Starter) -> None:
    program = start("training", STEPS, hang_timeout=0)
    program.inject("hang", point="kernel", sequence=1000)
    harness.go(program)
    harness.injected(program)
    harness.wait_until(lambda: harness.stands_still(program), "the program waits for the kernel")
    assert program.faults() == []
    harness.kill_server(program)
    harness.output(program)
