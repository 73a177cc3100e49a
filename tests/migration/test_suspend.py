"""Suspension and resumption with real servers: to host memory and to files, here and elsewhere, across a restart."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import forked, harness
from tests.migration.moves import begin, ended, info, kill, refusal, resumed, suspended
from tests.recovery.conftest import Starter
from xmigd.demo.node import Node, Program
from xmigd.host_memory import available_memory

STEPS = 3000
PARTS = (200, 300, 50, 400)


def check_free(daemon: Node, program: Program, where: str) -> None:
    """No server of it is left, a standby neither, and it waits."""
    left = harness.server_pids(daemon)
    asleep = info(program)
    assert (asleep["state"], asleep["location"], asleep["suspended"]) == ("suspended", where, True)
    assert not left


@pytest.mark.parametrize("to", ["host", "file"])
def test_suspended_and_resumed_here_and_elsewhere(
    daemon: Node, start: Starter, undisturbed: Callable[..., str], to: str
) -> None:
    expected = undisturbed("training", STEPS, 8)
    harness.wait_until(lambda: not harness.server_pids(daemon), "the undisturbed one's servers have gone")
    program = start("training", STEPS, 8, STEPS - 100)
    harness.go(program)
    folder = daemon.folder / "suspended" / info(program)["id"]
    for device in ("cpu:1", "cpu:1", "cpu:0"):
        result = suspended(program, to)["result"]
        assert result["process_location"] == to
        check_free(daemon, program, to)
        assert folder.exists() == (to == "file")
        if to == "file":
            assert {os.stat(path).st_mode & 0o777 for path in folder.iterdir()} <= {0o600}
        assert harness.stands_still(program) or program.process.poll() is None
        resumed(program, device)
        assert (program.until("running")["device"], info(program)["location"]) == (device, "device")
    assert harness.output(program) == expected
    program.until("ended")
    harness.wait_until(lambda: harness.held(daemon).memfds == 0, "nothing is left")
    assert not folder.exists()


def test_suspended_again_as_soon_as_it_is_resumed(daemon: Node, start: Starter) -> None:
    """The files of the time before are still on their way out."""
    program = start("training", 100000, 8)
    harness.go(program)
    for _ in range(20):
        suspended(program, "file")
        resumed(program)
    program.process.kill()
    program.until("ended")
    assert not (daemon.folder / "suspended" / info(program)["id"]).exists()


def test_the_daemon_is_restarted_while_it_is_suspended(daemon: Node, start: Starter) -> None:
    quiet, program = start("stepwise"), start("stepwise")
    for each in (quiet, program):
        harness.go(each)
    for part, to in zip(PARTS[:2], ("host", "file"), strict=True):
        assert harness.steps(program, part) == harness.steps(quiet, part)
        suspended(program, to)
        harness.ask(program, part)
        daemon.kill()
        daemon.start()
        harness.wait_until(lambda: bool(info(program)["held_bytes"]), "it is found again")
        assert info(program)["state"] == "suspended"
        resumed(program)
        assert harness.answer(program) == harness.steps(quiet, part)
    for each in (quiet, program):
        harness.output(each)


def test_a_server_dies_while_it_suspends_or_resumes(
    daemon: Node, start: Starter, undisturbed: Callable[..., str]
) -> None:
    """It is running or suspended, and goes on from either."""
    expected = undisturbed("training", STEPS, 8)
    program = start("training", STEPS, 8, STEPS - 100)
    harness.go(program)
    for _ in range(3):
        source = program.until("running")["server_pid"]
        path = f"/v1/processes/{info(program)['id']}"
        operation = daemon.client.post(f"{path}:suspend", {"to": "host"})
        kill(source)
        ended(daemon, operation)
        if state_without(program, [source]) == "running":
            suspended(program)
        operation = daemon.client.post(f"{path}:resume", {"device": "cpu:1"})
        victims = harness.server_pids(daemon)
        for pid in victims:
            kill(pid)
        ended(daemon, operation)
        if state_without(program, victims) == "suspended":
            resumed(program, "cpu:1")
    assert harness.output(program) == expected


def state_without(program: Program, killed: list[int]) -> str:
    """Whether it runs or is suspended, once the daemon has noticed that these have gone."""

    def settled() -> bool:
        now = info(program)
        return now["state"] in ("running", "suspended") and now["server_pid"] not in killed

    harness.wait_until(settled, "it runs, or is suspended")
    return str(info(program)["state"])


def test_a_program_that_is_suspended_ends_when_it_is_killed(daemon: Node, start: Starter) -> None:
    program = start("training", 100000)
    harness.go(program)
    suspended(program, "file")
    problem = refusal(daemon, "/v1/migrations", {"process": info(program)["id"], "target": "cpu:1"})
    assert (problem["code"], problem["process_location"]) == ("suspended", "file")
    program.process.kill()
    program.process.communicate()
    program.until("ended")
    harness.wait_until(lambda: harness.held(daemon).memfds == 0, "nothing is left")
    assert not (daemon.folder / "suspended" / info(program)["id"]).exists()


HUNGRY = """
import select, sys
from cuda.bindings import driver
def good(answer):
    assert answer[0] == 0, answer
    return answer[-1]
good(driver.cuInit(0))
good(driver.cuCtxSetCurrent(good(driver.cuDevicePrimaryCtxRetain(0))))
memory = good(driver.cuMemAlloc(int(sys.argv[1])))
print("it has it", flush=True)
while not select.select([sys.stdin], [], [], 0.005)[0]:  # it works on, so that there are snapshots
    good(driver.cuMemsetD8(memory, 1, 1))
"""


def refused(node: Node, to: str, size: int) -> dict[str, Any]:
    """With what a program of so many bytes may not be suspended. It goes on."""
    program = node.program([sys.executable, "-c", HUNGRY, str(size)], stdin=subprocess.PIPE)
    assert program.process.stdout is not None
    assert program.process.stdout.readline() == "it has it\n"
    harness.wait_until(lambda: (info(program)["live_bytes"] or 0) >= size, "its memory is in a snapshot")
    problem = refusal(node, f"/v1/processes/{info(program)['id']}:suspend", {"to": to})
    assert (problem["process_location"], problem["phase"]) == ("source", "planning")
    assert info(program)["state"] == "running"
    assert program.process.stdin is not None
    program.process.stdin.write("\n")
    assert program.finish()[0] == 0
    return problem


def test_more_than_the_host_has(native_dir: Path) -> None:
    size = 128 << 30  # of a device that holds nothing
    if available_memory() > size:
        pytest.skip("this machine has more memory than the largest program here")
    with harness.own_node(native_dir, devices="null:0", device_memory=0) as node:
        problem = refused(node, "host", size)
    assert problem["code"] == "pool_too_small"
    assert "the process needs 128.0 GiB" in problem["detail"]


def test_more_than_the_file_system_has(native_dir: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="xmig-") as folder, contextlib.ExitStack() as after:
        small = Path(folder) / "small"
        small.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(small)]
        if (done := subprocess.run(mount, capture_output=True, text=True, check=False)).returncode != 0:
            pytest.skip(f"no file system of one's own: {done.stderr.strip()}")
        after.callback(subprocess.run, ["umount", "--lazy", str(small)], check=True)
        settings = {"native_dir": native_dir, "device_memory": 1 << 30, "database": small / "xmig.db"}
        with forked.Node(Path(folder), **settings) as node:
            problem = refused(node, "file", 128 << 20)
    assert problem["code"] == "file_system_full"
    assert f"{small} has" in problem["detail"]


def test_it_moves_again_after_it_was_resumed(daemon: Node, start: Starter) -> None:
    quiet, program = start("stepwise"), start("stepwise")
    for each in (quiet, program):
        harness.go(each)
    for part in PARTS:
        harness.ask(program, part)
        suspended(program)
        resumed(program, "cpu:1")
        assert harness.answer(program) == harness.steps(quiet, part)
        assert ended(daemon, begin(program, "cpu:0"))["state"] == "succeeded"
    for each in (quiet, program):
        harness.output(each)
