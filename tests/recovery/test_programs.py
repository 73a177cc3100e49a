"""Programs that end badly, run short of something, or are hostile: each loses its own job at most."""

from __future__ import annotations

import resource
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import harness
from tests.recovery.conftest import Starter
from xmigd.demo.node import Node


def test_killed_program_leaves_nothing(daemon: Node, start: Starter) -> None:
    before = harness.held_at_rest(daemon)
    for _ in range(5):
        program = start("training", 100_000)
        harness.go(program)
        time.sleep(0.1)
        program.process.send_signal(signal.SIGKILL)
        program.process.communicate()
        program.until("ended")
    harness.wait_until(lambda: harness.held(daemon) == before, f"as before: {before}")


def test_stopped_job(daemon: Node, start: Starter) -> None:
    program = start("training", 100_000)
    harness.go(program)
    daemon.client.delete(f"/v1/jobs/{program.job}")
    program.process.communicate(timeout=60)
    assert program.process.returncode == -signal.SIGTERM
    program.until("ended")


@pytest.fixture(scope="session")
def corrupt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("corrupt") / "corrupt.so"
    source = harness.ROOT / "tests" / "recovery" / "corrupt.cc"
    subprocess.run(
        ["c++", "-std=c++20", "-O1", "-shared", "-fPIC", f"-I{harness.ROOT / 'shim'}", source, "-o", library],
        check=True,
    )
    return library


@pytest.mark.parametrize("kind", range(6))
def test_garbage_in_the_journal(
    daemon: Node, start: Starter, undisturbed: Callable[..., str], corrupt: Path, kind: int
) -> None:
    expected = undisturbed("training", 300)
    neighbour = start("training", 300)
    hostile = start("garbage", corrupt, kind)
    harness.go(hostile)
    assert "lost" in harness.output(hostile)
    hostile.until("lost", "ended")
    faults = hostile.faults()
    assert faults[-1]["kind"] == "garbage"
    assert faults[-1]["text"]
    harness.go(neighbour)
    assert harness.output(neighbour) == expected
    assert neighbour.faults() == []


def test_server_without_descriptors(daemon: Node, start: Starter) -> None:
    """Physical memory is descriptors. A server that has none left answers with out of memory, and works on."""
    program = start("short_of_memory")
    server = program.until("running")["server_pid"]
    used = len(list(Path(f"/proc/{server}/fd").iterdir()))
    resource.prlimit(server, resource.RLIMIT_NOFILE, (used, resource.prlimit(server, resource.RLIMIT_NOFILE)[1]))
    harness.go(program)
    assert harness.output(program).splitlines() == ["out of memory 2", "and on"]


def test_idle_uses_no_processor(start: Starter) -> None:
    """A generous bound; the benchmark measures it."""
    program = start("training", 10)
    info = program.until("running")
    time.sleep(0.5)
    pids = (info["server_pid"], program.process.pid)
    before = [harness.cpu_seconds(pid) for pid in pids]
    time.sleep(2)
    used = [harness.cpu_seconds(pid) - was for pid, was in zip(pids, before, strict=True)]
    assert max(used) < 0.5
    harness.go(program)
    harness.output(program)


def test_client_holds_nothing_but_memory(daemon: Node, start: Starter) -> None:
    """After the handshake: no socket, no device file, no descriptor of the shim's at all, so that CRIU can move it."""
    program = start("training", 10)
    links = [str(entry.readlink()) for entry in Path(f"/proc/{program.process.pid}/fd").iterdir()]
    assert not [link for link in links if not link.startswith(("pipe:", "/dev/null"))]
    maps = Path(f"/proc/{program.process.pid}/maps").read_text()
    assert "memfd:xmig-journal" in maps
    assert "/dev/nvidia" not in maps
    harness.go(program)
    harness.output(program)
