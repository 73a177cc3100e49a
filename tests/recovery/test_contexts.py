"""Which of the devices that a program sees have contexts, in its server and its standby: those that it uses. What
becomes of programs that use one first and another later."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import harness
from tests.migration.moves import info, moved, resumed, suspended
from tests.recovery.conftest import PROGRAMS
from xmigd.demo.node import Node, Program

OPENED = re.compile(r"server=(\d+) text=.a context was opened on device (\d+) ")


@pytest.fixture(scope="module")
def node(native_dir: Path) -> Iterator[Node]:
    with harness.own_node(native_dir, devices="cpu:0,cpu:1,cpu:2,cpu:3") as node:
        yield node


@pytest.fixture
def program(node: Node, kernels: Path) -> Iterator[Program]:
    """It sees two devices and has used neither."""
    program = harness.start(node, PROGRAMS / "contexts.py", kernels=kernels, device="cpu:0,1")
    harness.go(program)
    yield program
    program.process.kill()


def tell(program: Program, what: str) -> str:
    assert program.process.stdin is not None
    program.process.stdin.write(f"{what}\n")
    program.process.stdin.flush()
    return harness.answer(program).strip()


def contexts(program: Program) -> dict[int, list[int]]:
    """What each of its servers has opened, in this order."""
    found: dict[int, list[int]] = {}
    ours = f"process={info(program)['id'][:12]}"
    for line in program.node.log.read_text().splitlines():
        if ours in line and (opened := OPENED.search(line)):
            found.setdefault(int(opened[1]), []).append(int(opened[2]))
    return found


def have(program: Program, expected: dict[int, list[int]]) -> None:
    harness.wait_until(
        lambda: info(program)["standby"] == "warm" and contexts(program) == expected, f"the contexts {expected}"
    )


def lose_server(program: Program) -> None:
    before = harness.kill_server(program)
    harness.wait_until(lambda: info(program)["server_pid"] not in (None, before), "another server has it")
    program.until("running")


def exact(program: Program) -> bool:
    return {(one["outcome"], one["exact"]) for one in program.recoveries()} == {("resumed", True)}


def test_one_of_two(program: Program) -> None:
    assert tell(program, "retain 1") == "0"
    assert tell(program, "work 1") == "1"
    assert tell(program, "module 1") == "0"
    have(program, {0: [1], 1: [1]})
    lose_server(program)
    assert tell(program, "work 1") == "2"
    have(program, {0: [1], 1: [1], 2: [1]})
    assert exact(program)


def test_then_the_second(program: Program) -> None:
    assert [tell(program, each) for each in ("retain 1", "work 1")] == ["0", "1"]
    have(program, {0: [1], 1: [1]})
    assert [tell(program, each) for each in ("retain 0", "work 0", "work 1")] == ["0", "1", "2"]
    have(program, {0: [1, 0], 1: [1, 0]})  # the standby at once
    lose_server(program)
    assert [tell(program, each) for each in ("work 0", "work 1")] == ["2", "3"]
    have(program, {0: [1, 0], 1: [1, 0], 2: [0, 1]})
    assert [tell(program, each) for each in ("peer 0", "work 1", "work 0")] == ["0", "3", "3"]
    lose_server(program)
    assert [tell(program, each) for each in ("work 1", "work 0")] == ["4", "4"]
    assert exact(program)


def test_its_server_is_killed_while_it_opens_the_second(program: Program) -> None:
    assert [tell(program, each) for each in ("retain 0", "work 0")] == ["0", "1"]
    have(program, {0: [0], 1: [0]})
    server = info(program)["server_pid"]
    harness.stop(server)
    assert program.process.stdin is not None
    program.process.stdin.write("retain 1\n")
    program.process.stdin.flush()
    harness.wait_until(lambda: harness.stands_still(program), "it waits")
    os.kill(server, signal.SIGKILL)
    assert harness.answer(program).strip() == "0"
    assert [tell(program, each) for each in ("work 1", "work 0")] == ["1", "2"]
    have(program, {0: [0], 1: [0, 1], 2: [0, 1]})
    lose_server(program)
    assert [tell(program, each) for each in ("work 1", "work 0")] == ["2", "3"]
    assert exact(program)


def test_all_that_are_retained(program: Program) -> None:
    """Natively, too, this makes a context on each, whatever else becomes of them."""
    assert [tell(program, f"retain {device}") for device in (0, 1)] == ["0", "0"]
    have(program, {0: [0, 1], 1: [0, 1]})


def test_memory_on_a_device_without_a_context(program: Program) -> None:
    assert [tell(program, each) for each in ("retain 0", "work 0", "place 1")] == ["0", "1", "0"]
    have(program, {0: [0, 1], 1: [0, 1]})
    lose_server(program)
    assert tell(program, "work 0") == "2"
    assert exact(program)


def other_devices(program: Program, leave: Callable[[], object]) -> None:
    assert [tell(program, each) for each in ("retain 1", "work 1")] == ["0", "1"]
    have(program, {0: [1], 1: [1]})
    leave()
    assert info(program)["device"] == "cpu:2,3"
    harness.wait_until(lambda: info(program)["standby"] == "warm", "a standby")
    assert {*map(tuple, contexts(program).values())} == {(1,)}
    assert [tell(program, each) for each in ("work 1", "retain 0", "work 0")] == ["2", "0", "1"]
    harness.wait_until(lambda: [*contexts(program).values()].count([1, 0]) == 2, "both have opened the other")
    lose_server(program)
    assert [tell(program, each) for each in ("work 1", "work 0")] == ["3", "2"]


def test_it_is_moved(program: Program) -> None:
    other_devices(program, lambda: moved(program, "cpu:2,3"))


def test_it_is_suspended(program: Program) -> None:
    other_devices(program, lambda: (suspended(program), resumed(program, "cpu:2,3")))


def test_another_daemon(node: Node, program: Program) -> None:
    assert [tell(program, each) for each in ("retain 1", "work 1")] == ["0", "1"]
    have(program, {0: [1], 1: [1]})
    node.kill()
    assert [tell(program, each) for each in ("retain 0", "work 0")] == ["0", "1"]
    node.start()
    harness.found_again(node)
    harness.wait_until(lambda: info(program)["standby"] == "warm", "a standby")
    assert contexts(program)[1][-2:] == [0, 1]
    lose_server(program)
    assert [tell(program, each) for each in ("work 1", "work 0")] == ["2", "2"]
