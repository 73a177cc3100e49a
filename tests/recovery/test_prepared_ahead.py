"""A standby prepares the recovery while the server that was lost gives its device back."""

from __future__ import annotations

from tests import harness
from tests.recovery.conftest import Starter
from tests.recovery.test_descriptors import wait_for_standby
from xmigd.demo.node import Node

MOST = 30  # kills: on a cpu device a server may be gone before the daemon has looked


def test_a_standby_prepares_while_the_lost_server_ends(start: Starter, daemon: Node) -> None:
    program = start("breathing")
    harness.go(program)
    expected = harness.steps(program, 3)
    server = kills = 0
    while kills < MOST and "prepared a recovery" not in daemon.log.read_text():
        wait_for_standby(program, after=server)
        server = harness.kill_server(program) or 0
        assert harness.steps(program, 3) == expected
        assert server
        kills += 1
    assert "prepared a recovery" in daemon.log.read_text()
    program.until("running")
    assert [(r["outcome"], r["exact"], r["standby"], r["attempts"]) for r in program.recoveries()] == [
        ("resumed", True, "warm", 1)
    ] * kills
