"""A process costs its device nothing before it needs it: its server has not opened it, and it has no standby. What
becomes of such a process, and of one whose device cannot be opened."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import harness
from tests.migration.moves import info, moved, other, resumed, suspended
from tests.recovery.conftest import PROGRAMS
from xmigd.client import Refused
from xmigd.demo.node import Node, Program
from xmigd.native import SERVER

FULL = Path(__file__).parents[2] / "build" / "native" / "tests" / "full" / SERVER
OUT_OF_MEMORY = "2\n"


def tell(program: Program, what: str) -> str:
    assert program.process.stdin is not None
    program.process.stdin.write(f"{what}\n")
    program.process.stdin.flush()
    return harness.answer(program)


@pytest.fixture
def start(kernels: Path) -> Callable[[Node], Program]:
    def starter(node: Node) -> Program:
        program = harness.start(node, PROGRAMS / "opening.py", kernels=kernels)
        harness.go(program)
        assert "{0}" in tell(program, "ask")
        return program

    return starter


@pytest.fixture
def program(daemon: Node, start: Callable[[Node], Program]) -> Program:
    """It knows which devices there are, and has done no more."""
    return start(daemon)


def is_unopened(program: Program) -> bool:
    """One server, and nobody in its place."""
    found = info(program)
    one = harness.server_pids(program.node) == [found["server_pid"]]
    return one and (found["state"], found["standby"], found["server_bytes"]) == ("running", None, 0)


def has_standby(program: Program) -> None:
    harness.wait_until(lambda: info(program)["standby"] == "warm", "a standby")


def lose_server(program: Program) -> None:
    before = harness.kill_server(program)
    harness.wait_until(lambda: info(program)["server_pid"] not in (None, before), "another server has it")
    program.until("running")


def works(program: Program) -> None:
    """It has what it needs, and goes on when a server is lost."""
    assert tell(program, "work") == "1\n"
    has_standby(program)
    lose_server(program)
    assert tell(program, "work") == "2\n"


@pytest.mark.parametrize("way", ["retain", "create"])
def test_it_has_a_standby_when_it_has_a_context(program: Program, way: str) -> None:
    before = tell(program, "ask")
    assert before.endswith("active 0\n")
    assert is_unopened(program)
    assert tell(program, "info") == "201\n"  # no context, natively
    assert is_unopened(program)
    assert tell(program, way) == "0\n"
    has_standby(program)
    assert tell(program, "ask").partition(" active")[0] == before.partition(" active")[0]
    works(program)
    assert [(r["outcome"], r["exact"]) for r in program.recoveries()] == [("resumed", True)]


def test_on_a_null_device(native_dir: Path, start: Callable[[Node], Program]) -> None:
    with harness.own_node(native_dir, devices="null:0") as node:
        program = start(node)
        assert is_unopened(program)
        assert tell(program, "retain") == "0\n"
        has_standby(program)


def test_its_server_is_killed(program: Program) -> None:
    before = tell(program, "ask")
    for _ in range(2):
        lose_server(program)
        assert is_unopened(program)
    assert tell(program, "ask") == before
    assert tell(program, "retain") == "0\n"
    works(program)
    assert {(r["outcome"], r["exact"]) for r in program.recoveries()} == {("resumed", True)}


def test_its_server_is_killed_while_it_opens(program: Program) -> None:
    server = info(program)["server_pid"]
    harness.stop(server)
    assert program.process.stdin is not None
    program.process.stdin.write("retain\n")
    program.process.stdin.flush()
    harness.wait_until(lambda: harness.stands_still(program), "it waits")
    os.kill(server, signal.SIGKILL)
    assert harness.answer(program) == "0\n"
    works(program)


def test_another_daemon(daemon: Node, program: Program) -> None:
    server = info(program)["server_pid"]
    daemon.kill()
    daemon.start()
    harness.found_again(daemon)
    assert program.until("running")["server_pid"] == server
    assert is_unopened(program)
    assert tell(program, "retain") == "0\n"
    works(program)


def test_it_opens_while_no_daemon_is_there(daemon: Node, program: Program) -> None:
    daemon.kill()
    assert tell(program, "retain") == "0\n"
    daemon.start()
    harness.found_again(daemon)
    has_standby(program)
    works(program)


def test_its_server_is_killed_while_no_daemon_is_there(daemon: Node, program: Program) -> None:
    """There is nothing of it that anybody would have to hold."""
    server = info(program)["server_pid"]
    daemon.kill()
    os.kill(server, signal.SIGKILL)
    daemon.start()
    harness.found_again(daemon)
    program.until("running")
    assert is_unopened(program)
    assert tell(program, "retain") == "0\n"
    works(program)


def test_it_is_moved(program: Program) -> None:
    target = other(program)
    moved(program, target)
    assert info(program)["device"] == target
    has_standby(program)
    assert tell(program, "retain") == "0\n"
    works(program)


def test_it_is_suspended(program: Program) -> None:
    suspended(program)
    resumed(program, other(program))
    assert tell(program, "retain") == "0\n"
    works(program)


def test_it_is_paused(program: Program) -> None:
    harness.open_devices(program)
    has_standby(program)
    assert tell(program, "retain") == "0\n"
    works(program)


def test_a_fault_that_is_armed_before(program: Program) -> None:
    program.inject("fault", sequence=2)
    assert tell(program, "retain") == "0\n"
    assert tell(program, "work") == "1\n"
    harness.injected(program)
    assert tell(program, "work") == "2\n"
    assert [fault["kind"] for fault in program.faults()] == ["injected"]


@pytest.fixture
def full(native_dir: Path, tmp_path: Path) -> Iterator[Node]:
    """Its servers are those of the native tests: each refuses two contexts. So there is never a standby."""
    if not FULL.exists():
        pytest.skip(f"{FULL} is not there: make native-test builds it")
    shutil.copytree(native_dir, tmp_path, dirs_exist_ok=True)
    shutil.copy(FULL, tmp_path / SERVER)
    with harness.own_node(tmp_path) as node:
        yield node


@pytest.mark.parametrize("way", ["retain", "create"])
def test_a_full_device(full: Node, start: Callable[[Node], Program], way: str) -> None:
    """The program is informed as it is natively, by the call that makes the context, and may try again."""
    program = start(full)
    assert [tell(program, way) for _ in range(2)] == [OUT_OF_MEMORY] * 2
    assert is_unopened(program)
    assert tell(program, way) == "0\n"
    assert [tell(program, "work") for _ in range(2)] == ["1\n", "2\n"]
    reported = [line for line in program.lines("server") if "no context on device cpu:" in line]
    assert len(reported) == 2, program.lines("server")


def test_a_full_device_beside_one_that_has_room(full: Node, kernels: Path) -> None:
    """Likewise with a device that the program begins to use later."""
    program = harness.start(full, PROGRAMS / "contexts.py", kernels=kernels, device="cpu:0,1")
    harness.go(program)
    assert [tell(program, "retain 1") for _ in range(3)] == [OUT_OF_MEMORY, OUT_OF_MEMORY, "0\n"]
    assert tell(program, "work 1") == "1\n"
    assert [tell(program, "retain 0") for _ in range(2)] == [OUT_OF_MEMORY] * 2
    assert tell(program, "work 1") == "2\n"
    assert [tell(program, each) for each in ("retain 0", "work 0", "work 1")] == ["0\n", "1\n", "3\n"]


def test_a_full_device_and_a_lost_server(full: Node, start: Callable[[Node], Program]) -> None:
    program = start(full)
    assert tell(program, "retain") == OUT_OF_MEMORY
    lose_server(program)
    assert is_unopened(program)
    answers = [tell(program, "retain") for _ in range(3)]
    assert answers == [OUT_OF_MEMORY, OUT_OF_MEMORY, "0\n"], "\n".join(map(str, program.lines())) + full.log.read_text()
    assert [tell(program, "work") for _ in range(2)] == ["1\n", "2\n"]


def test_a_full_device_and_a_request_of_the_daemon(full: Node, start: Callable[[Node], Program]) -> None:
    program = start(full)
    path = f"/v1/processes/{info(program)['id']}:suspend"
    with contextlib.suppress(Refused):
        operation = full.client.post(path, {"to": "host"})
        operation = full.client.get(f"/v1/operations/{operation['id']}/wait", timeout=60)
        assert (operation["state"], "its log says why" in str(operation["error"])) == ("failed", True), operation
    assert info(program)["state"] == "running"
    assert [tell(program, "retain") for _ in range(2)] == [OUT_OF_MEMORY, "0\n"]
    assert tell(program, "work") == "1\n"
