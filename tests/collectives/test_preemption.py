"""Jobs of several ranks make room as one thing, or not at all."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.collectives.conftest import Launch, enough, lines_of
from tests.collectives.test_steps import ranks_of
from tests.collectives.test_suspension import begin, begun, check_asleep, does, done, states
from tests.migration.moves import ended
from tests.scheduling.preempting import is_cancelled
from xmigd.demo.node import Node


def test_all_ranks_are_preempted_and_continue(node: Node, launch: Launch, tmp_path: Path) -> None:
    program = launch("steps", 2, 0)
    begun(tmp_path, 2)
    refused = ended(node, begin(node, program, "preempt", prefer="checkpoint"))
    assert (refused["state"], refused["error"]["code"]) == ("failed", "not_preempted")
    assert states(node, program) == {"running"}
    result = does(node, program, "preempt")["result"]
    assert (result["how"], result["process_location"]) == ("suspended", "host")
    check_asleep(node, program)
    does(node, program, "continue", devices=["cpu:1", "cpu:0"])
    assert states(node, program) == {"running"}

    server = ranks_of(node, program)[1]["server_pid"]
    os.kill(server, signal.SIGSTOP)
    operation = begin(node, program, "preempt", deadline_seconds=0.3)
    is_cancelled(node, operation)
    os.kill(server, signal.SIGCONT)
    operation = ended(node, operation)
    assert (operation["state"], operation["error"]["code"]) == ("failed", "deadline_exceeded")
    assert states(node, program) == {"running"}
    enough(tmp_path)
    assert lines_of(program, timeout=120) == done(2)
