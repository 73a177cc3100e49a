"""What an earlier daemon's CRIU has restored is ended, and never a process that has its pid by now."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import harness
from xmigd.checkpoints.criu import IDENTITY, Criu
from xmigd.checkpoints.pids import stopped
from xmigd.checkpoints.working import Working
from xmigd.ipc import pidfd

OPERATION: Any = SimpleNamespace(id="a" * 32)
# Does what the daemon relies on: it ends, and what it has restored is left stopped, with its pid in the file.
STAND_IN = f"""#!{sys.executable} -IS
import subprocess, sys
program = subprocess.Popen(["sh", "-c", "kill -STOP $$"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
open(sys.argv[sys.argv.index("--pidfile") + 1], "w").write(str(program.pid))
"""


@pytest.fixture
def left(tmp_path: Path) -> Iterator[tuple[Working, int]]:
    """A folder as a daemon leaves it that ends when CRIU has restored something, and the pid of that."""
    criu = tmp_path / "criu"
    criu.write_text(STAND_IN)
    criu.chmod(0o755)
    working = Working(tmp_path)
    folder = working.folder(OPERATION)
    folder.mkdir()
    pid = asyncio.run(Criu(criu).restore(folder, leader=True))
    harness.wait_until(lambda: stopped(pid), "stopped")
    yield working, pid
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def settle(working: Working) -> None:
    asyncio.run(working.settle(OPERATION))
    assert not working.folder(OPERATION).exists()


def test_what_was_restored_is_ended(left: tuple[Working, int]) -> None:
    working, pid = left
    assert asyncio.run(working.left(OPERATION)) == pid
    settle(working)
    harness.wait_until(lambda: not _runs(pid), "ended")


def test_also_if_others_see_another_boot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """As a unit of systemd in a container does."""
    monkeypatch.setattr(pidfd, "BOOT_ID", tmp_path / "boot_id")
    pidfd.BOOT_ID.write_text("8d7b0f6c-6f0e-4bd1-9a44-0b3a2b1d6a10\n")
    working, pid = request.getfixturevalue("left")
    assert asyncio.run(working.left(OPERATION)) == pid


def _of_another_start(identity: str) -> str:
    return identity.replace(identity[:8], "0" * 8, 1)


def _of_another_process(identity: str) -> str:
    head, _, rest = identity.rpartition(")")
    values = rest.split(" ")
    values[20] = str(int(values[20]) - 1)  # its start time
    return head + ")" + " ".join(values)


def _not_written(identity: str) -> str:
    return identity.partition("\n")[0]


@pytest.mark.parametrize("becomes", [_of_another_start, _of_another_process, _not_written])
def test_who_has_its_pid_by_now_is_not(left: tuple[Working, int], becomes: Callable[[str], str]) -> None:
    working, pid = left
    identity = working.folder(OPERATION) / IDENTITY
    identity.write_text(becomes(identity.read_text()))
    settle(working)
    assert stopped(pid)


def _runs(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
