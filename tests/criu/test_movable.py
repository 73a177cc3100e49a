"""What xmigd.checkpoints.movable says of programs, and what CRIU does with them: it refuses what was foretold, and
nothing else."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.checkpoints.small import CASES, running, things_outside
from tests.criu.test_client_dump import criu_or_skip, let_end, start, wait_for_lines
from xmigd.checkpoints.movable import Criu, obstacles
from xmigd.demo.node import Node

pytestmark = pytest.mark.criu


@pytest.fixture(scope="module")
def binary() -> str:
    return criu_or_skip()


@pytest.fixture(scope="module")
def version(binary: str) -> tuple[int, ...]:
    printed = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"Version: (\d+)\.(\d+)", printed)
    assert found, printed
    return int(found[1]), int(found[2])


@pytest.mark.parametrize("name", CASES)
def test_criu_refuses_what_stands_in_the_way(name: str, tmp_path: Path, binary: str, version: tuple[int, ...]) -> None:
    case = CASES[name]
    images = tmp_path / "images"
    images.mkdir()
    (tmp_path / "own").mkdir()
    with (
        things_outside(tmp_path / "outside") as outside,
        running(case.program, tmp_path / "own", own_session=case.own_session, outside=json.dumps(outside)) as pid,
    ):
        found = [each for each in obstacles(pid, Criu(version=version)) if each.stops == "here"]
        command = [binary, "dump", "-t", str(pid), "-D", str(images), "--leave-running", "-v4", "-o", "log"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        reported = [line for line in (images / "log").read_text().splitlines() if "Error" in line]
        if not case.certain and done.returncode == 0:
            pytest.skip("on this machine CRIU dumps it")
        assert (done.returncode != 0) == bool(found), (found, reported)


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
    command = [binary, "dump", "-t", str(program.process.pid), "-D", str(tmp_path / "images"), "--leave-running"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    let_end(output)
    assert program.finish()[0] == 0
