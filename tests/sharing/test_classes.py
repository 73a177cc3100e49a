"""Kernels of best-effort jobs wait while a critical job on their device has work, and for no longer than they may."""

from __future__ import annotations

import time
from pathlib import Path

from tests import harness
from tests.cli.conftest import ctl
from tests.migration.moves import info
from tests.sharing.conftest import MIB, PROGRAMS, Starter, answer, ask, has_answered, sharing
from xmigd.demo.node import Node, Program

WAIT = 5.0  # seconds that a kernel waits at most, in the fixture `daemon`


def shares(*programs: Program) -> None:
    harness.wait_until(lambda: all(sharing(each)["shares"] for each in programs), "their servers see each other")


def ends(program: Program) -> None:
    assert program.process.stdin is not None
    program.process.stdin.close()
    assert program.process.wait(60) == 0


def test_it_waits_and_goes_on(daemon: Node, start: Starter) -> None:
    """It waits while the other works, and not while that rests, stands still or is gone. Its results are the same."""
    alone = start("steps", device="cpu:1")
    assert answer(alone) == "ready to work"

    def expected() -> str:
        ask(alone, 20)
        return answer(alone)

    critical = start("busy", priority="critical")
    steps = start("steps", priority="best-effort")
    assert (answer(critical), answer(steps)) == ("busy", "ready to work")
    shares(critical, steps)

    def waits() -> bool:
        """Let it do 20 steps. Holds when it waits in the middle of them; all of them may meet a moment of rest."""
        before = sharing(steps)["held_kernels"]
        ask(steps, 20)

        def held() -> bool:
            return bool(sharing(steps)["held_kernels"] > before)

        harness.wait_until(lambda: held() or has_answered(steps), "it waits or has done all", closely=True)
        if held():
            return True
        assert answer(steps) == expected()
        return False

    harness.wait_until(waits, "a kernel has waited", closely=True)
    began = time.monotonic()
    # The critical job's server stands still in the middle of its work: nobody waits for it for long.
    harness.stop(info(critical)["server_pid"])
    assert answer(steps) == expected()
    assert time.monotonic() - began < 20 * WAIT  # so long all of them would have waited
    now = sharing(steps)
    ask(steps, 20)
    assert answer(steps) == expected()
    assert sharing(steps)["overdue_kernels"] == now["overdue_kernels"]
    critical.process.kill()
    critical.until("ended")
    ask(steps, 20)
    assert answer(steps) == expected()

    def nothing_waits() -> bool:
        before = sharing(steps)["held_kernels"]
        ask(steps, 20)
        return answer(steps).startswith("20 ") and sharing(steps)["held_kernels"] == before

    harness.wait_until(nothing_waits, "its server knows that it is alone")
    for each in (steps, alone):
        ends(each)


def test_no_longer_than_it_may(native_dir: Path, kernels: Path) -> None:
    """A critical job that never rests holds nobody up for ever. A server that takes over knows its neighbours."""
    with harness.own_node(native_dir, device_memory=256 * MIB, port=-1, best_effort_wait=0.01) as node:

        def start(name: str, priority: str) -> Program:
            started = harness.start(
                node, PROGRAMS / f"{name}.py", kernels=kernels, device="cpu:0", request={"priority": priority}
            )
            harness.go(started)
            return started

        critical, steps = start("busy", "critical"), start("steps", "best-effort")
        assert (answer(critical), answer(steps)) == ("busy", "ready to work")
        shares(critical, steps)

        def works() -> bool:
            ask(steps, 20)
            return answer(steps).startswith("20 ") and sharing(steps)["overdue_kernels"] > 0

        harness.wait_until(works, "a kernel has waited as long as it may")
        harness.kill_server(steps)
        harness.kill_server(critical)
        before = sharing(steps)["overdue_kernels"]
        harness.wait_until(lambda: works() and sharing(steps)["overdue_kernels"] > before, "so has one after that")
        ends(steps)
        ends(critical)


def test_best_effort_jobs_take_turns(daemon: Node, start: Starter) -> None:
    """Both get on, and each waits for the other."""
    pair = [start("busy", priority="best-effort"), start("steps", priority="best-effort")]
    assert [answer(each) for each in pair] == ["busy", "ready to work"]
    shares(*pair)

    def both_waited() -> bool:
        ask(pair[1], 50)
        answer(pair[1])
        return all(sharing(each)["held_kernels"] > 0 for each in pair)

    harness.wait_until(both_waited, "each has waited for the other")
    shown = ctl(daemon, "sharing", pair[0].job).stdout
    assert "best-effort\nmemory quota  all of each device\n" in shown
    (row,) = (line.split() for line in shown.splitlines() if "cpu:0" in line)
    assert row[2] == "yes"
    assert int(row[3]) > 0, shown
    for each in pair:
        ends(each)


def test_the_class_normal_has_no_part_in_it(daemon: Node, start: Starter) -> None:
    critical, steps = start("busy", priority="critical"), start("steps")
    assert (answer(critical), answer(steps)) == ("busy", "ready to work")
    shares(critical)
    ask(steps, 50)
    assert answer(steps).startswith("50 ")
    assert (sharing(steps)["shares"], sharing(steps)["held_kernels"]) == (False, 0)
    for each in (steps, critical):
        ends(each)
