"""A server that dies: at any moment, again and again, stopped before, or while it recovers."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from functools import partial

from tests import harness
from tests.recovery.conftest import Starter
from xmigd.demo.node import Node, Program

STEPS = 1500
KILLS = 20


def check_recovered(program: Program, at_least: int) -> None:
    """Every recovery came to its end and was exact."""
    program.until("ended")
    recoveries = program.recoveries()
    assert len(recoveries) >= at_least
    # The last may have been cut short by the program's own end.
    outcomes = {r["outcome"] for r in recoveries[:-1]} | ({recoveries[-1]["outcome"]} - {"abandoned"})
    assert outcomes == {"resumed"}
    assert all(r["exact"] for r in recoveries if r["outcome"] == "resumed")


def has_another(program: Program, before: int | None) -> bool:
    """Does another server than this one have the program?"""
    return (program.info() or {})["server_pid"] not in (None, before)


def has_standby(program: Program) -> bool:
    info = program.info() or {}
    return (info["state"], info["standby"]) == ("running", "warm")


def test_random_moments(start: Starter, undisturbed: Callable[..., str]) -> None:
    expected = undisturbed("training", 4 * STEPS)
    chance = random.Random(11)
    program = start("training", 4 * STEPS, 0, 4 * STEPS - 100)
    harness.go(program)
    for _ in range(KILLS):
        # Mostly while it works, sometimes while it recovers: on a busy machine it would get nowhere.
        if chance.random() < 0.8:
            program.until("running")
        time.sleep(chance.uniform(0.02, 0.2))
        harness.kill_server(program)
    assert harness.output(program) == expected
    check_recovered(program, at_least=2)


def test_many_kills_leak_nothing(daemon: Node, start: Starter, undisturbed: Callable[..., str]) -> None:
    expected = undisturbed("training", 4 * STEPS)
    first = start("training", 1)
    harness.go(first)
    harness.output(first)
    harness.wait_until(lambda: harness.held(daemon).memfds == 0, "everything of the first programs is gone")
    before = harness.held_at_rest(daemon)
    program = start("training", 4 * STEPS, 0, 4 * STEPS - 100)
    harness.go(program)
    for count in range(1, 31):
        assert harness.kill_server(program)
        harness.wait_until(lambda count=count: len(program.recoveries()) == count, "it is noticed")  # type: ignore[misc]
        program.until("running")
    assert harness.output(program) == expected
    check_recovered(program, at_least=30)
    harness.wait_until(lambda: harness.held(daemon) == before, f"as before: {before}")


def test_killed_while_it_recovers(start: Starter, undisturbed: Callable[..., str]) -> None:
    expected = undisturbed("training", STEPS, 64)
    program = start("training", STEPS, 64, STEPS - 100)
    harness.go(program)
    for _ in range(4):
        # One that has to be started first, and dies as it starts, has not recovered anything.
        harness.wait_until(lambda: has_standby(program), "it runs, and has a standby")
        before = harness.kill_server(program)
        # The state may be over before it is looked at; that another server has the program is not.
        harness.wait_until(partial(has_another, program, before), "the next server")
        second = harness.kill_server(program)
        assert second
        # Not before the daemon knows: until then it says that the dead one runs.
        harness.wait_until(partial(has_another, program, second), "the one after that")
    program.until("running")
    assert harness.output(program) == expected
    check_recovered(program, at_least=4)
    assert sum(r["attempts"] for r in program.recoveries()) == 8


def test_killed_at_every_replay(start: Starter, undisturbed: Callable[..., str]) -> None:
    """Whatever kills each server as it begins to replay: the daemon does not spin, but says that it waits."""
    deaths = 7
    expected = undisturbed("training", STEPS)
    program = start("training", STEPS)
    for _ in range(deaths):
        program.inject("kill", point="replay", sequence=1)
    for sequence in (4000, 8000, 12_000):  # several: right after a snapshot there is nothing to replay
        program.inject("kill", sequence=sequence)
    harness.go(program)
    began = time.monotonic()
    reported = "servers in a row were lost without progress; the next one follows in"
    harness.wait_until(lambda: reported in (program.until("recovering")["why"]), "the state tells of the pause")
    assert harness.output(program) == expected
    # Three are replaced at once, the others after 0.1, 0.2, 0.4, 0.8, 1.6 s.
    assert time.monotonic() - began >= 3.1
    check_recovered(program, at_least=1)
    (recovery,) = [r for r in program.recoveries() if r["attempts"] > 1]
    assert recovery["attempts"] == deaths + 1
    assert [reported in line for line in recovery["story"]].count(True) == deaths + 1 - 3


def test_stopped_then_killed(start: Starter) -> None:
    quiet = start("stepwise")
    harness.go(quiet)
    expected = [harness.steps(quiet, 200), harness.steps(quiet, 300)]
    program = start("stepwise")
    server = program.until("running")["server_pid"]
    harness.go(program)
    answers = [harness.steps(program, 200)]
    harness.stop(server)
    harness.ask(program, 300)
    # It first has to do what does not need the server.
    harness.wait_until(lambda: harness.stands_still(program), "the program waits for the server")
    os.kill(server, signal.SIGKILL)
    answers.append(harness.answer(program))
    assert answers == expected
    program.until("running")  # it has its answer while the replay that gave it is still going on
    harness.output(program)
    check_recovered(program, at_least=1)
    assert program.recoveries()[-1]["outcome"] == "resumed"


def test_standby_killed(start: Starter, daemon: Node, undisturbed: Callable[..., str]) -> None:
    """A warm standby that dies is replaced; nobody notices."""
    expected = undisturbed("training", STEPS)
    program = start("training", STEPS, 0, STEPS - 100)
    info = program.until("running")
    harness.open_devices(program)
    harness.wait_until(lambda: has_standby(program) and len(harness.server_pids(daemon)) == 2, "a standby, no others")
    (standby,) = set(harness.server_pids(daemon)) - {info["server_pid"]}
    os.kill(standby, signal.SIGKILL)
    harness.wait_until(lambda: set(harness.server_pids(daemon)) - {info["server_pid"], standby} != set(), "another")
    harness.go(program)
    os.kill(info["server_pid"], signal.SIGKILL)
    harness.wait_until(lambda: [r["outcome"] for r in program.recoveries()] == ["resumed"], "it is recovered")
    assert harness.output(program) == expected
    check_recovered(program, at_least=1)
