"""Memory that the service manager keeps: the daemon and a server die at the same moment, and nothing is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import harness
from tests.recovery.conftest import PROGRAMS
from tests.recovery.kept_memory import memory
from tests.recovery.service_manager import ManagedNode
from xmigd.demo.node import Program

PARTS = (200, 300, 50)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[ManagedNode]:
    with ManagedNode(tmp_path, adoption_grace=0.5) as node:
        yield node


def stepwise(node: ManagedNode, kernels: Path) -> Program:
    program = harness.start(node, PROGRAMS / "stepwise.py", kernels=kernels)
    harness.go(program)
    return program


@pytest.fixture
def expected(node: ManagedNode, kernels: Path) -> list[str]:
    """The answers of a program that nothing happens to."""
    program = stepwise(node, kernels)
    answers = [harness.steps(program, part) for part in PARTS]
    harness.output(program)
    return answers


def kill_both(node: ManagedNode, program: Program) -> None:
    """Whatever they are doing."""
    server = program.until("running")["server_pid"]
    harness.stop(server)
    node.kill()
    os.kill(server, signal.SIGKILL)


def settled(node: ManagedNode) -> bool:
    """Has the manager been informed of everything that the daemon holds, and the daemon of what the servers hold?"""
    assert node.process is not None
    servers = set().union(*map(memory, harness.server_pids(node)))
    return len(node.memory) >= 5 and node.memory == memory(node.process.pid) and servers <= node.memory


def test_daemon_and_server_die_together(node: ManagedNode, kernels: Path, expected: list[str]) -> None:
    program = stepwise(node, kernels)
    answers = []
    for part in PARTS:
        answers.append(harness.steps(program, part))
        kill_both(node, program)
        node.start()
    assert answers == expected
    program.until("running")
    harness.output(program)
    program.until("ended")
    assert [(r["outcome"], r["exact"]) for r in program.recoveries()] == [("resumed", True)] * len(PARTS)
    harness.wait_until(lambda: len(node.names) == 1, "nothing of it is kept but the index")


def test_server_dies_while_no_daemon_is_there(node: ManagedNode, kernels: Path, expected: list[str]) -> None:
    program = stepwise(node, kernels)
    answers = [harness.steps(program, PARTS[0])]
    kill_both(node, program)
    harness.ask(program, PARTS[1])
    node.start()
    answers.append(harness.answer(program))
    answers.append(harness.steps(program, PARTS[2]))
    assert answers == expected
    harness.output(program)


def test_adopted_memory_is_kept_too(node: ManagedNode, kernels: Path, expected: list[str]) -> None:
    """The second daemon is informed by the server what it has; the third has it from the second's store."""
    program = stepwise(node, kernels)
    answers = [harness.steps(program, PARTS[0])]
    node.kill()
    node.start()
    harness.wait_until(lambda: (program.info() or {})["standby"] == "warm", "the server is adopted")
    answers.append(harness.steps(program, PARTS[1]))
    kill_both(node, program)
    node.start()
    answers.append(harness.steps(program, PARTS[2]))
    assert answers == expected
    harness.output(program)


def is_lost(program: Program) -> str:
    """Wait until its program is informed that its memory is lost. Returns why."""
    harness.ask(program, 10)
    program.process.communicate(timeout=60)
    assert program.process.returncode != 0
    return str(program.until("lost", "ended")["why"])


def test_what_is_not_complete_is_not_used(node: ManagedNode, kernels: Path) -> None:
    program = stepwise(node, kernels)
    harness.steps(program, PARTS[0])
    kill_both(node, program)
    node.lose("memfd:xmig-snapshot0")
    node.start()
    assert "not kept" in is_lost(program)


def allocates_alone(node: ManagedNode, kernels: Path) -> tuple[Program, str]:
    """Its memory comes while there is no daemon that could be informed; its server dies before there is one. With its
    first answer."""
    program = harness.start(node, PROGRAMS / "stepwise.py", kernels=kernels)
    harness.wait_until(lambda: settled(node), "the store has all memory")
    server = program.until("running")["server_pid"]
    node.kill()
    harness.go(program)
    answer = harness.steps(program, PARTS[0])
    os.kill(server, signal.SIGKILL)
    return program, answer


def test_what_has_changed_since_is_in_the_backlog(node: ManagedNode, kernels: Path, expected: list[str]) -> None:
    program, answer = allocates_alone(node, kernels)
    node.start()
    assert [answer, *(harness.steps(program, part) for part in PARTS[1:])] == expected
    harness.output(program)


def test_what_has_changed_since_and_nobody_has_is_not_used(node: ManagedNode, kernels: Path) -> None:
    program, _ = allocates_alone(node, kernels)
    node.lose("socket:")
    node.start()
    assert "changed while no daemon was there" in is_lost(program)


def test_ready_watchdog_reload_and_stop(node: ManagedNode, tmp_path: Path) -> None:
    node.stop()
    node.hear()  # what the daemon reported last
    node.watchdog_us = 300_000
    configuration = tmp_path / "xmigd.toml"
    configuration.write_text("")
    node.environment["XMIG_CONFIG"] = str(configuration)
    node.reported.clear()
    node.start()
    assert node.process is not None
    harness.wait_until(lambda: node.reported.count("WATCHDOG=1") >= 3, "the watchdog is kept quiet")
    assert node.reported[0].startswith("READY=1\nSTATUS=")
    configuration.write_text('log_level = "debug"\nport = 1\n')
    before = len(node.reported)
    os.kill(node.process.pid, signal.SIGHUP)
    harness.wait_until(lambda: any(s.startswith("READY=1") for s in node.reported[before:]), "it has reloaded")
    assert any(reported.startswith("RELOADING=1\nMONOTONIC_USEC=") for reported in node.reported[before:])
    log = node.log.read_text()
    assert "changed=log_level" in log
    configuration.write_text("log_level = 7\n")
    os.kill(node.process.pid, signal.SIGHUP)
    harness.wait_until(lambda: "the settings are not taken over" in node.log.read_text(), "a mistake is reported")
    node.stop()
    node.hear()
    assert any(reported.startswith("STOPPING=1") for reported in node.reported)
