"""The daemon dies: jobs go on, and the next daemon finds them."""

from __future__ import annotations

import os
import signal

from tests import harness
from tests.recovery.conftest import Starter
from xmigd.demo.node import Node

PARTS = (200, 300, 50, 400)


def undisturbed(start: Starter) -> list[str]:
    program = start("stepwise")
    harness.go(program)
    answers = [harness.steps(program, part) for part in PARTS]
    harness.output(program)
    return answers


def test_jobs_go_on_and_are_found_again(daemon: Node, start: Starter) -> None:
    expected = undisturbed(start)
    program = start("stepwise")
    server = program.until("running")["server_pid"]
    harness.go(program)
    answers = [harness.steps(program, PARTS[0])]
    daemon.kill()
    answers.append(harness.steps(program, PARTS[1]))
    daemon.start()
    harness.found_again(daemon)
    assert program.until("running")["server_pid"] == server, "the same server"
    answers.append(harness.steps(program, PARTS[2]))
    harness.wait_until(lambda: (program.info() or {})["standby"] == "warm", "a standby of the new daemon's")
    os.kill(server, signal.SIGKILL)
    answers.append(harness.steps(program, PARTS[3]))
    assert answers == expected
    program.until("running")
    harness.output(program)
    program.until("ended")
    assert [(r["outcome"], r["exact"]) for r in program.recoveries()] == [("resumed", True)]


def test_restarted_in_order(daemon: Node, start: Starter) -> None:
    expected = undisturbed(start)
    program = start("stepwise")
    harness.go(program)
    answers = []
    for part in PARTS:
        answers.append(harness.steps(program, part))
        daemon.stop()
        daemon.start()
    assert answers == expected
    harness.found_again(daemon)
    program.until("running")
    harness.output(program)


def test_server_dies_while_no_daemon_is_there(daemon: Node, start: Starter) -> None:
    """The descriptor store held its memory: the program waits for a daemon, and goes on."""
    expected = undisturbed(start)
    program = start("stepwise")
    server = program.until("running")["server_pid"]
    harness.go(program)
    answers = [harness.steps(program, PARTS[0])]
    daemon.kill()
    os.kill(server, signal.SIGKILL)
    harness.ask(program, PARTS[1])
    harness.wait_until(lambda: harness.stands_still(program), "the program waits for a daemon")
    daemon.start()
    answers.append(harness.answer(program))
    answers += [harness.steps(program, part) for part in PARTS[2:]]
    assert answers == expected
    harness.output(program)
