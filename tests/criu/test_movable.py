"""What xmigd.checkpoints.movable says of programs, and what CRIU does with them: it refuses what was foretold, and
nothing else."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.checkpoints.small import CASES, running, things_outside
from tests.criu.test_client_dump import criu_or_skip, let_end, start, wait_for_lines
from xmigd.checkpoints.movable import Criu, obstacles, processes_of
from xmigd.demo.node import Node

pytestmark = pytest.mark.criu
PR_SET_CHILD_SUBREAPER = 36


@pytest.fixture(scope="module")
def binary() -> str:
    return criu_or_skip()


@pytest.fixture(scope="module")
def version(binary: str) -> tuple[int, ...]:
    printed = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"Version: (\d+)\.(\d+)", printed)
    assert found, printed
    return int(found[1]), int(found[2])


@pytest.fixture
def reaper() -> Iterator[None]:
    """This process becomes the parent of those whose parent has ended, so that their numbers become free at once."""
    prctl = ctypes.CDLL(None).prctl
    assert prctl(PR_SET_CHILD_SUBREAPER, 1) == 0
    yield
    assert prctl(PR_SET_CHILD_SUBREAPER, 0) == 0


def reap(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def errors(log: Path) -> list[str]:
    return [line for line in log.read_text().splitlines() if "Error" in line]


@pytest.mark.parametrize("name", CASES)
def test_criu_refuses_what_stands_in_the_way(
    name: str, tmp_path: Path, binary: str, version: tuple[int, ...], reaper: None
) -> None:
    """What it dumps, and what nothing stops from being moved, it restores, too."""
    case = CASES[name]
    images = tmp_path / "images"
    images.mkdir()
    (tmp_path / "own").mkdir()
    pids: list[int] = []
    with (
        things_outside(tmp_path / "outside") as outside,
        running(case.program, tmp_path / "own", own_session=case.own_session, outside=json.dumps(outside)) as pid,
    ):
        pids = processes_of(pid)
        found = obstacles(pid, Criu(version=version))
        refused = [each for each in found if each.stops == "here"]
        done = criu(binary, "dump", images, "-t", str(pid))
        if not case.certain and (done.returncode == 0) == bool(refused):
            pytest.skip(f"on this machine CRIU does something else with it: {errors(images / 'dump')}")
        assert (done.returncode != 0) == bool(refused), (found, errors(images / "dump"))
        if all(each.stops == "depends" for each in found):
            reap(pids)
            restored = criu(binary, "restore", images, "--restore-detached")
            assert restored.returncode == 0, (found, errors(images / "restore"))
    reap(pids)


def criu(binary: str, action: str, images: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [binary, action, "-D", str(images), "-v4", "-o", action, *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_a_program_under_xmig(daemon: Node, native_dir: Path, tmp_path: Path, binary: str) -> None:
    """Nothing stands in its way, and CRIU dumps it."""
    output = tmp_path / "steps"
    program = start(daemon, native_dir, output, 0.01)
    wait_for_lines(output, 3)
    program.until("running")
    found = daemon.client.get(f"/v1/jobs/{program.job}/movable")
    (one,) = found["programs"]
    assert {each["code"] for each in one["obstacles"] if each["stops"] != "depends"} == set(), one["obstacles"]
    assert (found["movable"], found["dumpable"], one["pids"]) == (True, True, [program.process.pid])
    (tmp_path / "images").mkdir()
    done = criu(binary, "dump", tmp_path / "images", "-t", str(program.process.pid), "--leave-running")
    assert done.returncode == 0, errors(tmp_path / "images" / "dump")
    let_end(output)
    assert program.finish()[0] == 0
