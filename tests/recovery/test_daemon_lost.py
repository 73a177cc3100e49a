"""The daemon dies: jobs go on, and the next daemon finds them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from tests import harness
from tests.recovery.conftest import Starter
from xmigd.demo.node import Node

STEPS = 6000


def test_jobs_go_on_and_are_found_again(daemon: Node, start: Starter, undisturbed: Callable[..., str]) -> None:
    expected = undisturbed("training", STEPS)
    program = start("training", STEPS)
    server = program.until("running")["server_pid"]
    harness.go(program)
    time.sleep(0.1)
    daemon.kill()
    time.sleep(0.2)
    assert program.process.poll() is None
    daemon.start()
    info = program.until("running")
    assert info["server_pid"] == server, "the same server"
    harness.wait_until(lambda: len(harness.server_pids(daemon)) == 2, "a standby of the new daemon's")
    harness.kill_server(program)
    harness.wait_until(lambda: len(program.recoveries()) > 0, "a recovery under the new daemon")
    assert harness.output(program) == expected
    program.until("ended")
    assert [(r["outcome"], r["exact"]) for r in program.recoveries()] == [("resumed", True)]


def test_server_dies_with_the_daemon(daemon: Node, start: Starter) -> None:
    """Nobody held the memory: the program is told, and does not hang."""
    program = start("training", STEPS)
    server = program.until("running")["server_pid"]
    harness.go(program)
    time.sleep(0.1)
    daemon.kill()
    os.kill(server, signal.SIGKILL)
    _, said = program.process.communicate(timeout=60)
    assert program.process.returncode != 0
    assert "xmig" in said
    daemon.start()


def test_program_starts_while_the_daemon_is_away(daemon: Node, start: Starter) -> None:
    program = start("training", 10)
    harness.go(program)
    harness.output(program)
    daemon.stop()
    daemon.start()
    program = start("training", 10)
    harness.go(program)
    harness.output(program)
