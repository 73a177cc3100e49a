"""Jobs that are suspended within a deadline, or not at all, with real servers."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from tests import harness
from tests.migration.moves import ended, info
from tests.recovery.conftest import Starter
from xmigd.client import Refused
from xmigd.demo.node import Node

from .preempting import continued, is_cancelled, preempt, preempted, refusal


def test_and_continues(daemon: Node, start: Starter) -> None:
    quiet, program = start("stepwise"), start("stepwise")
    for each in (quiet, program):
        harness.go(each)
    for prefer, device in (("suspend", "cpu:1"), ("either", "cpu:0")):
        assert harness.steps(program, 50) == harness.steps(quiet, 50)
        result = preempted(program, prefer=prefer)
        assert (result["how"], result["process_location"], result["job"]) == ("suspended", "host", program.job)
        assert info(program)["state"] == "suspended"
        assert preempted(program, prefer=prefer)["ms"] == 0  # it is already
        continued(daemon, program.job, devices=[device])
        assert program.until("running")["device"] == device
        assert refusal(daemon, f"/v1/jobs/{program.job}:continue") == "not_suspended"
    assert harness.steps(program, 50) == harness.steps(quiet, 50)
    for each in (quiet, program):
        harness.output(each)

    def is_over() -> bool:
        try:
            ended(daemon, preempt(program))  # it may begin while the last server goes
        except Refused as error:
            return error.code == "not_found"
        return False

    harness.wait_until(is_over, "its end is known")
    harness.wait_until(lambda: daemon.client.get(f"/v1/jobs/{program.job}")["state"] == "ended", "it is over")
    assert refusal(daemon, f"/v1/jobs/{program.job}:continue") == "not_preempted"


def test_while_it_is_resumed(daemon: Node, start: Starter) -> None:
    """It is still suspended then: whoever gets its device would find it there again a moment later."""
    quiet, program = start("stepwise"), start("stepwise")
    for each in (quiet, program):
        harness.go(each)
    assert harness.steps(program, 50) == harness.steps(quiet, 50)
    preempted(program, prefer="suspend")
    going_on = daemon.client.post(f"/v1/jobs/{program.job}:continue", {})
    assert preempted(program, prefer="suspend")["how"] == "suspended"
    assert ended(daemon, going_on)["state"] == "succeeded"
    assert info(program)["state"] == "suspended"
    continued(daemon, program.job)
    assert harness.steps(program, 50) == harness.steps(quiet, 50)
    for each in (quiet, program):
        harness.output(each)


def test_the_deadline_passes(daemon: Node, start: Starter) -> None:
    """Its server does not do its part, and the job goes on where it was."""
    program = start("stepwise")
    harness.go(program)
    first = harness.steps(program, 50)
    (server,) = {info(program)["server_pid"]}
    os.kill(server, signal.SIGSTOP)
    operation = preempt(program, deadline_seconds=0.3)
    is_cancelled(daemon, operation)
    os.kill(server, signal.SIGCONT)
    operation = ended(daemon, operation)
    error = operation["error"]
    assert (operation["state"], error["code"], error["process_location"]) == (
        "failed", "deadline_exceeded", "source",
    )  # fmt: skip
    assert info(program)["state"] == "running"
    assert first
    assert preempted(program)["how"] == "suspended"  # the next time
    continued(daemon, program.job)
    assert harness.steps(program, 50)
    harness.output(program)


def test_somebody_cancels(daemon: Node, start: Starter) -> None:
    program = start("stepwise")
    harness.go(program)
    harness.steps(program, 50)
    server = info(program)["server_pid"]
    os.kill(server, signal.SIGSTOP)
    operation = preempt(program)
    daemon.client.delete(f"/v1/operations/{operation['id']}")
    is_cancelled(daemon, operation)
    os.kill(server, signal.SIGCONT)
    assert ended(daemon, operation)["state"] == "cancelled"
    assert info(program)["state"] == "running"
    assert refusal(daemon, f"/v1/jobs/{program.job}:continue") == "not_suspended"
    harness.output(program)


def test_it_is_not_possible(daemon: Node, start: Starter) -> None:
    program = start("stepwise")
    harness.go(program)
    harness.steps(program, 5)
    path = f"/v1/processes/{info(program)['id']}"
    daemon.client.post(f"{path}:pause")
    operation = ended(daemon, preempt(program, prefer="suspend"))
    assert (operation["state"], operation["error"]["code"]) == ("failed", "not_preempted")
    assert "(paused)" in operation["error"]["detail"]
    daemon.client.post(f"{path}:continue")
    assert harness.steps(program, 5)
    harness.output(program)


@pytest.mark.parametrize("leave", [Node.kill, Node.stop])
def test_the_daemon_leaves_meanwhile(daemon: Node, start: Starter, leave: Callable[[Node], None]) -> None:
    """What it answers afterwards is so."""
    quiet, program = start("stepwise"), start("stepwise")
    for each in (quiet, program):
        harness.go(each)
    assert harness.steps(program, 50) == harness.steps(quiet, 50)
    operation = preempt(program, prefer="suspend")
    leave(daemon)
    daemon.start()
    harness.found_again(daemon)
    operation = ended(daemon, operation)
    if operation["state"] == "succeeded":
        assert info(program)["state"] == "suspended"
        continued(daemon, program.job)
    else:
        assert operation["error"]["code"] == "interrupted"
        assert info(program)["state"] == "running"
    assert harness.steps(program, 50) == harness.steps(quiet, 50)
    for each in (quiet, program):
        harness.output(each)
