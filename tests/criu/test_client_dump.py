"""A program under the shim is dumped and restored with CRIU while its GPU server lives on."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.migration.moves import moved, resumed, suspended
from xmigd.demo.node import Node, Program

ROOT = Path(__file__).parents[2]
STEPS = 60


def criu_or_skip() -> str:
    if os.geteuid() != 0:
        pytest.skip("only root can use CRIU")
    program = criu_program()
    if program is None:
        pytest.skip("there is no CRIU 4: packaging/setup/criu.sh says why")
    return program


@cache
def criu_program() -> str | None:
    found = subprocess.run([ROOT / "packaging" / "setup" / "criu.sh"], capture_output=True, text=True, check=False)
    return found.stdout.strip() if found.returncode == 0 else None


@pytest.fixture(scope="session")
def criu() -> Callable[..., None]:
    """CRIU with a working folder for images; fails with the end of its log."""
    binary = criu_or_skip()

    def run(action: str, images: Path, *options: str) -> None:
        images.mkdir(exist_ok=True)
        log = images / f"{action}.log"
        command: list[str | Path] = [binary, action, "-D", images, "-o", log.name, "-v4", *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, f"{done.stderr}\n{log.read_text()[-4000:]}"

    return run


def start(node: Node, native_dir: Path, output: Path, pause: float, **options: Any) -> Program:
    """The program in a session of its own and with nothing open but a file, as CRIU wants it."""
    command: list[str | Path] = [sys.executable, ROOT / "tests" / "criu" / "client.py", output, str(STEPS), str(pause)]
    with output.with_suffix(".err").open("wb") as errors:
        return node.program(
            command, environment={"KERNELS": str(native_dir / "xmig_kernels.so")}, start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=errors, **options,
        )  # fmt: skip


def let_end(output: Path) -> None:
    """All that was to be done to it has been done."""
    output.with_suffix(".go").touch()


def wait_for_lines(output: Path, count: int) -> None:
    end = time.monotonic() + 60
    while not output.exists() or len(output.read_text().splitlines()) < count:
        assert time.monotonic() < end, f"{output} has fewer than {count} lines"
        time.sleep(0.005)


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def dumped(
    daemon: Node, native_dir: Path, tmp_path: Path, criu: Callable[..., None], *,
    pause: float = 0.02, move: bool = False,
) -> tuple[Path, Path, Program, dict[str, Any]]:  # fmt: skip
    """A program that was paused and dumped on its way: the undisturbed output, its own so far, it, and its process."""
    undisturbed = tmp_path / "undisturbed"
    let_end(undisturbed)
    assert start(daemon, native_dir, undisturbed, 0).finish()[0] == 0

    output = tmp_path / "steps"
    program = start(daemon, native_dir, output, pause)
    wait_for_lines(output, STEPS // 4)
    program.until("running")
    if move:
        moved(program)
    info = program.until("running")
    daemon.client.post(f"/v1/processes/{info['id']}:pause", {})
    criu("dump", tmp_path / "images", "-t", str(program.process.pid))
    program.process.wait()
    return undisturbed, output, program, info


def test_client_holds_neither_socket_nor_device(daemon: Node, native_dir: Path, tmp_path: Path) -> None:
    output = tmp_path / "steps"
    program = start(daemon, native_dir, output, 0.05)
    wait_for_lines(output, 3)
    held = [os.readlink(entry) for entry in Path(f"/proc/{program.process.pid}/fd").iterdir()]
    program.process.kill()
    program.process.wait()
    assert sorted(set(held)) == sorted(["/dev/null", str(output), str(output.with_suffix(".err"))])


@pytest.mark.criu
def test_program_is_dumped_and_restored(
    daemon: Node, native_dir: Path, tmp_path: Path, criu: Callable[..., None]
) -> None:
    undisturbed, output, program, info = dumped(daemon, native_dir, tmp_path, criu)
    server = info["server_pid"]
    assert alive(server)

    criu("restore", tmp_path / "images", "--restore-detached", "--pidfile", str(tmp_path / "pid"))
    restored = int((tmp_path / "pid").read_text())
    before = len(output.read_text().splitlines())
    daemon.client.post(f"/v1/processes/{info['id']}:rebind", {"pid": restored})
    let_end(output)
    wait_for_lines(output, STEPS)
    assert before < STEPS
    assert output.read_text() == undisturbed.read_text()
    after = program.info()
    assert after is not None
    assert (after["recoveries"], after["pid"]) == (0, restored)


@pytest.mark.criu
def test_restored_program_survives_the_loss_of_its_server(
    daemon: Node, native_dir: Path, tmp_path: Path, criu: Callable[..., None]
) -> None:
    undisturbed, output, program, info = dumped(daemon, native_dir, tmp_path, criu)
    criu("restore", tmp_path / "images", "--restore-detached", "--pidfile", str(tmp_path / "pid"))
    daemon.client.post(f"/v1/processes/{info['id']}:rebind", {"pid": int((tmp_path / "pid").read_text())})
    program.inject("kill")
    harness.wait_until(lambda: [each["outcome"] for each in program.recoveries()] == ["resumed"], "it is recovered")
    let_end(output)
    wait_for_lines(output, STEPS)
    assert output.read_text() == undisturbed.read_text()
    assert len(program.recoveries()) == 1


@pytest.mark.criu
def test_restored_program_is_moved_and_suspended(
    daemon: Node, native_dir: Path, tmp_path: Path, criu: Callable[..., None]
) -> None:
    """What it was before it was dumped, and what it is now, has the same servers."""
    undisturbed, output, program, info = dumped(daemon, native_dir, tmp_path, criu, pause=0.1, move=True)
    criu("restore", tmp_path / "images", "--restore-detached", "--pidfile", str(tmp_path / "pid"))
    restored = int((tmp_path / "pid").read_text())
    daemon.client.post(f"/v1/processes/{info['id']}:rebind", {"pid": restored})
    moved(program)
    suspended(program)
    resumed(program, info["device"])
    moved(program)
    let_end(output)
    wait_for_lines(output, STEPS)
    assert output.read_text() == undisturbed.read_text()
    after = program.info()
    assert after is not None
    assert (after["recoveries"], after["pid"]) == (0, restored)


def test_pause_and_continue(daemon: Node, native_dir: Path, tmp_path: Path) -> None:
    output = tmp_path / "steps"
    program = start(daemon, native_dir, output, 0.01)
    wait_for_lines(output, 3)
    info = program.until("running")
    daemon.client.post(f"/v1/processes/{info['id']}:pause", {})
    daemon.client.post(f"/v1/processes/{info['id']}:continue", {})
    let_end(output)
    assert program.finish()[0] == 0
    assert len(output.read_text().splitlines()) == STEPS
