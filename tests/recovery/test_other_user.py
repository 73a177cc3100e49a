"""A job of root's whose program drops to another user before its first CUDA call, or after it: as services do."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import harness
from xmigd.demo.node import Node, Program

pytestmark = harness.needs_root

NOBODY = 65534
# One that the other user may read, too: the test's own may be in root's home.
PYTHON = shutil.which("python3", path="/usr/bin:/usr/local/bin") or sys.executable
PARTS = (200, 300, 50)
DROP = f"import os; os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n"
BEFORE = DROP + "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
AFTER = f"""
import ctypes, runpy, sys
sys.argv = sys.argv[1:]
ctypes.CDLL("libcuda.so.1").cuInit(0)
{DROP}
runpy.run_path(sys.argv[0], run_name='__main__')
"""
# For a while only, as a service does around what it wants to be allowed: the first call is another user's, the program
# is root's again.
FOR_A_WHILE = f"""
import ctypes, os, runpy, sys
sys.argv = sys.argv[1:]
os.setegid({NOBODY}); os.seteuid({NOBODY})
ctypes.CDLL("libcuda.so.1").cuInit(0)
os.seteuid(0); os.setegid(0)
runpy.run_path(sys.argv[0], run_name='__main__')
"""


@pytest.fixture(scope="module")
def node(native_dir: Path) -> Iterator[Node]:
    with harness.own_node(native_dir, adoption_grace=0.5, port=-1) as node:
        node.folder.chmod(0o755)
        yield node


@pytest.fixture(scope="module")
def files(node: Node) -> Path:
    """What the other user has to be able to read."""
    folder = node.folder / "files"
    folder.mkdir()
    harness.compile_kernels(folder)
    for file in (*harness.CONFORMANCE.glob("*.py"), harness.CONFORMANCE.parent / "start.py",
                 Path(__file__).parent / "programs" / "stepwise.py", harness.cudart("13")):  # fmt: skip
        shutil.copy(file, folder)
    subprocess.run(["chmod", "-R", "a+rX", folder], check=True)
    return folder


def start(node: Node, files: Path, *command: str | Path) -> Program:
    """`command` comes before the program's own words."""
    variables = {
        "CUDART": str(files / "libcudart.so.13"), "KERNELS": str(files / "kernels.so"), "PYTHONPATH": str(files),
        "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip
    program = node.program(
        [*command, files / "start.py", files / "stepwise.py"], environment=variables, stdin=subprocess.PIPE,
        stderr=subprocess.PIPE, cwd="/",
    )  # fmt: skip
    harness.is_ready(program)
    harness.go(program)
    return program


@pytest.fixture(scope="module")
def expected(node: Node, files: Path) -> list[str]:
    program = start(node, files, PYTHON)
    answers = [harness.steps(program, part) for part in PARTS]
    harness.output(program)
    return answers


def user(pid: int) -> int:
    return int(Path(f"/proc/{pid}/status").read_text().split("Uid:")[1].split()[1])


def live_through_everything(node: Node, program: Program, expected: list[str], server_of: int) -> None:
    """Its server is killed, the daemon is, both are."""
    info = program.until("running")
    assert user(info["server_pid"]) == server_of
    answers = [harness.steps(program, PARTS[0])]
    os.kill(info["server_pid"], signal.SIGKILL)
    answers.append(harness.steps(program, PARTS[1]))
    server = program.until("running")["server_pid"]
    assert user(server) == server_of
    node.kill()
    node.start()
    assert program.until("running")["server_pid"] == server, "its server is found again"
    node.kill()
    os.kill(server, signal.SIGKILL)
    node.start()
    answers.append(harness.steps(program, PARTS[2]))
    assert answers == expected
    harness.output(program)


@pytest.mark.parametrize(
    ("code", "program_of", "server_of"),
    [(BEFORE, NOBODY, NOBODY), (AFTER, NOBODY, 0), (FOR_A_WHILE, 0, NOBODY)],
    ids=["before", "after", "for a while"],
)
def test_a_program_that_drops(
    node: Node, files: Path, expected: list[str], code: str, program_of: int, server_of: int
) -> None:
    program = start(node, files, PYTHON, "-c", code)
    assert user(program.process.pid) == program_of
    live_through_everything(node, program, expected, server_of)


@pytest.mark.parametrize("tool", ["setpriv", "su"])
def test_a_tool_that_drops(node: Node, files: Path, expected: list[str], tool: str) -> None:
    if shutil.which(tool) is None:
        pytest.skip(f"this machine has no {tool}")
    if tool == "setpriv":
        program = start(node, files, "setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", PYTHON)
    else:
        script = files / "as-nobody"
        script.write_text(f'#!/bin/sh\nexec su -s /bin/sh nobody -c "exec {shlex.quote(PYTHON)} $1 $2"\n')
        script.chmod(0o755)
        program = start(node, files, script)
    assert user(program.until("running")["pid"]) == NOBODY
    live_through_everything(node, program, expected, NOBODY)


def test_its_lines_are_its_job_s(node: Node, files: Path) -> None:
    """What the shim has to say, before and after the handshake."""
    code = DROP + (
        "import ctypes; d = ctypes.CDLL('libcuda.so.1'); assert d.cuGreenCtxCreate(None, None, 0, 0) != 0\n"
        "assert d.cuInit(0) == 0 and d.cuCtxAttach(None, 0) != 0"
    )
    program = node.program([PYTHON, "-c", code], cwd="/", stderr=subprocess.PIPE)
    _, reported = program.process.communicate(timeout=60)
    assert program.process.returncode == 0, reported
    harness.wait_until(lambda: len(program.lines("program")) == 2, "both lines")
    assert {line.split()[0] for line in program.lines()} == {"cuGreenCtxCreate", "cuCtxAttach"}
