"""Daemons that are forked from a process that has imported everything (zygote.py): they start in a fraction of the
time, also in other namespaces. What happens when one is executed, tests/daemon has."""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from xmigd.database import migrate
from xmigd.database.engine import make_engine
from xmigd.demo import node

ROOT = Path(__file__).parent.parent
PATIENCE = 0.05  # seconds for which one thread listens to the zygote before another may
AT_FIRST = dict(os.environ)  # not what a test has set for itself
first = threading.Lock()  # of several nodes that start at once, one makes what all use


class Zygote:
    """``environment``: what only counts when a program is started, LD_LIBRARY_PATH."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("zygote.py")],
            env=AT_FIRST | {"PYTHONPATH": str(ROOT)} | dict(environment or {}), stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )  # fmt: skip
        self._lock = threading.Lock()  # who holds it listens
        self._reported = b""
        self._ended: dict[int, int] = {}

    def fork(
        self, environment: Mapping[str, str], log: Path, folder: Path | None = None, *, program: Path | None = None,
        namespaces: Sequence[Path] = (),
    ) -> Forked:  # fmt: skip
        """A daemon, in `folder`. What it says goes into `log`. `program`: what is executed instead of xmigd.
        `namespaces`: which it enters; with one of processes among them, the daemon is this one's child."""
        assert self._process.stdin is not None
        wanted = {
            "env": dict(environment), "log": str(log), "folder": str(folder or Path.cwd()),
            "program": program and str(program), "namespaces": list(map(str, namespaces)),
        }  # fmt: skip
        with self._lock:
            self._process.stdin.write(json.dumps(wanted).encode() + b"\n")
            self._process.stdin.flush()
            while not (pid := self._line(None)):
                pass
            self._ended.pop(pid, None)  # an earlier one had its number
        return Forked(self, pid)

    def exit_code(self, pid: int, timeout: float) -> int | None:
        """As Popen's returncode; None: it has not ended within `timeout` seconds."""
        end = time.monotonic() + timeout
        while True:
            left = end - time.monotonic()
            with self._lock:
                while pid not in self._ended and self._line(min(max(left, 0), PATIENCE)) is not None:
                    pass
                if pid in self._ended or left <= 0:
                    return self._ended.get(pid)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _line(self, timeout: float | None) -> int | None:
        """Listen for a line: the pid of who was born, or 0 when somebody has ended, which is noted. None: no line came
        within `timeout` seconds."""
        assert self._process.stdout is not None
        while b"\n" not in self._reported:
            if not select.select([self._process.stdout], [], [], timeout)[0]:
                return None
            reported = os.read(self._process.stdout.fileno(), 4096)
            if not reported:
                raise ChildProcessError(f"the zygote has ended, exit code {self._process.wait()}")
            self._reported += reported
        line, _, self._reported = self._reported.partition(b"\n")
        pid, *status = map(int, line.split())
        if not status:
            return pid
        self._ended[pid] = os.waitstatus_to_exitcode(status[0])
        return 0


class Forked:
    """What Popen says of a child, of a child of the zygote."""

    def __init__(self, zygote: Zygote, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._zygote = zygote

    def poll(self) -> int | None:
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        while (code := self._look(3600 if timeout is None else timeout)) is None:
            if timeout is not None:
                raise subprocess.TimeoutExpired(["xmigd"], timeout)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _look(self, timeout: float) -> int | None:
        if self.returncode is None:
            self.returncode = self._zygote.exit_code(self.pid, timeout)
        return self.returncode


@functools.cache
def zygote() -> Zygote:
    """This process's own, for all of its tests."""
    made = Zygote()
    atexit.register(made.close)
    return made


def can_be(environment: Mapping[str, str]) -> bool:
    """Would a daemon with these variables be what it is if it is executed?"""

    def at_start(variables: Mapping[str, str]) -> dict[str, str]:
        read = ("LD_", "PYTHON", "GLIBC_")
        return {k: v for k, v in variables.items() if k.startswith(read) and k != "PYTHONPATH"}

    path = environment.get("PYTHONPATH")
    return at_start(environment) == at_start(AT_FIRST) and path in (None, str(ROOT), AT_FIRST.get("PYTHONPATH"))


@functools.cache
def new_database() -> bytes:
    """As a daemon makes one, in the tenth of a second that each of many would take again. tests/daemon has those that
    make their own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "xmig.db"
        engine = make_engine(path, writer=True)
        migrate.upgrade(path, engine)
        engine.dispose()
        return path.read_bytes()


def begin(
    node: node.Node, log: IO[bytes], database: Path, *, program: Path | None = None, namespaces: Sequence[Path] = ()
) -> Forked:
    """The daemon of a node, as Zygote.fork has it, with a new `database` if there is none."""
    assert can_be(node.environment), "forked, it would not be what it is when it is executed"
    with first:
        zygote()
        if not database.exists() and database.parent.exists():
            database.write_bytes(new_database())
            database.chmod(0o600)
    return zygote().fork(node.environment, Path(log.name), program=program, namespaces=namespaces)


class Node(node.Node):
    """A node like any."""

    def popen(self, log: IO[bytes]) -> node.Child:
        if not can_be(self.environment):
            return super().popen(log)
        return begin(self, log, Path(self.environment["XMIG_DATABASE"]))
