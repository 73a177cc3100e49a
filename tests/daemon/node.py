"""A daemon under test: a real process, with the native programs or with a peer that only uses their protocol."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx

from tests import forked
from tests.harness import descriptors
from xmigd.demo.node import Child, looks, status
from xmigd.ipc.handshake import WELCOME, pack_hello, unpack_welcome

ROOT = Path(__file__).resolve().parents[2]
T = TypeVar("T")


def until(check: Callable[[], T | None], what: str, patience: float = 60.0, *, closely: bool = False) -> T:
    """The first true value of `check`. ``closely``: which may be true for milliseconds only."""
    for _ in looks(patience, closely=closely):
        if value := check():
            return value
    raise AssertionError(f"waited {patience} s in vain: {what}")


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):  # the latter: it went while it was read
        return False


class Node:
    executed = False  # but forked, from one that has imported everything

    def __init__(self, folder: Path, native: Path, **settings: str) -> None:
        self.folder = folder
        self.native = native
        self.runtime_dir = folder / "run"
        self.database = folder / "state" / "xmig.db"
        self.log = folder / "xmigd.log"
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("XMIG_")},
            "PYTHONPATH": str(ROOT),
            "XMIG_RUNTIME_DIR": str(self.runtime_dir),
            "XMIG_DATABASE": str(self.database),
            "XMIG_NATIVE_DIR": str(native),
            "XMIG_PORT": "0",
            "XMIG_DEVICE_MEMORY": str(1 << 30),
            "XMIG_LOG_LEVEL": "debug",
            **settings,
        }
        self.daemon: Child | None = None
        self._prefix: list[str] = []

    def start(self, *prefix: str) -> None:
        self.launch(*prefix)
        until(self._answers, f"xmigd answers; its log:\n{self.log.read_text()[-2000:]}")

    def launch(self, *prefix: str) -> None:
        """Start it and do not wait. Behind a prefix it is executed."""
        with open(self.log, "ab") as log:
            if self.executed or prefix or not forked.can_be(self.environment):
                self.daemon = subprocess.Popen(
                    [*prefix, sys.executable, "-m", "xmigd.main"], env=self.environment, cwd=self.folder, stdout=log,
                    stderr=log,
                )  # fmt: skip
            else:
                self.daemon = forked.zygote().fork(self.environment, self.log, self.folder)

    def _answers(self) -> bool:
        assert self.daemon is not None
        assert self.daemon.poll() is None, self.log.read_text()[-3000:]
        return status(self.runtime_dir / "api.sock", "/v1/node") == 200

    def kill(self, number: int = signal.SIGKILL) -> int:
        assert self.daemon is not None
        self.daemon.send_signal(number)
        code = self.daemon.wait(timeout=60)
        self.daemon = None
        return code

    @property
    def pid(self) -> int:
        assert self.daemon is not None
        return self.daemon.pid

    def descriptors(self) -> list[str]:
        """What the daemon has open, but for the database."""
        return descriptors(self.pid, self.database)

    def wait_until_closed(self, before: list[str]) -> None:
        """It has no more open than `before`, which `descriptors` reported."""
        now: list[str] = []

        def closed() -> bool:
            now[:] = self.descriptors()
            return len(now) <= len(before)

        try:
            until(closed, "descriptors are closed")
        except AssertionError as late:
            raise AssertionError(f"{late}: {Counter(now) - Counter(before)} more") from None

    @contextlib.contextmanager
    def http(self) -> Iterator[httpx.Client]:
        transport = httpx.HTTPTransport(uds=str(self.runtime_dir / "api.sock"), verify=False)
        with httpx.Client(transport=transport, base_url="http://localhost", timeout=60) as client:
            yield client

    def get(self, path: str, **params: Any) -> Any:
        with self.http() as client:
            answer = client.get(path, params=params)
            assert answer.is_success, answer.text
            return answer.json()

    def processes(self, **params: Any) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get("/v1/processes", **params)
        return found

    def open_devices(self) -> None:
        """As the first record of a program does: those here append none, and a real server opens for a pause, too."""
        (process,) = self.processes(live=True)
        with self.http() as http:
            for request in ("pause", "continue"):
                assert http.post(f"/v1/processes/{process['id']}:{request}").is_success

    def wait_for_standby(self, after: int | None = None) -> dict[str, Any]:
        """The process that lives, once it is running with a warm standby; on another server than `after`."""

        def standby() -> dict[str, Any] | None:
            for process in self.processes(live=True):
                settled = process["standby"] == "warm" and process["state"] == "running"
                if settled and process["server_pid"] != after:
                    return process
            return None

        return until(standby, "a standby")

    def behave(self, **behaviour: str | int | list[str]) -> None:
        file = self.runtime_dir / "behaviour.json"
        file.with_suffix(".new").write_text(json.dumps(behaviour))
        file.with_suffix(".new").replace(file)  # servers may be reading it

    def children(self) -> list[int]:
        listed = subprocess.run(["ps", "--ppid", str(self.pid), "-o", "pid="], capture_output=True, check=False)
        return [int(pid) for pid in listed.stdout.split() if alive(int(pid))]

    def servers(self) -> list[int]:
        """Every server process of this node, adopted ones too."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    command = (entry / "cmdline").read_bytes().split(b"\0")
                    if b"--control-fd" in command and os.fsencode(self.runtime_dir.resolve()) in command:
                        found.append(int(entry.name))
        return found

    def close(self) -> None:
        if self.daemon is not None:
            self.kill(signal.SIGTERM)
        for pid in self.servers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class NotAnswered(AssertionError):
    """The daemon has closed the program's connection."""


class Program:
    """A program that shakes hands as libcuda.so.1 does, in a process of its own, and then only lives."""

    def __init__(self, node: Node, job: str = "", user: int | None = None) -> None:
        code = (
            "import os,socket,sys\n"
            "if len(sys.argv) > 3:\n"
            "    os.setgroups([]); os.setgid(int(sys.argv[3])); os.setuid(int(sys.argv[3]))\n"
            "kept=[]\n"
            "def shake_hands(hello):\n"
            "    with socket.socket(socket.AF_UNIX,socket.SOCK_SEQPACKET) as s:\n"
            "        s.connect(sys.argv[1])\n"
            "        try:\n"
            "            s.send(bytes.fromhex(hello))\n"
            "            data,fds,_,_=socket.recv_fds(s,4096,8)\n"
            "        except (BrokenPipeError,ConnectionResetError):\n"
            "            data,fds=b'',[]\n"
            "        kept.extend(fds)\n"
            "        print(data.hex() or '-',len(fds),flush=True)\n"
            "shake_hands(sys.argv[2])\n"
            "for line in sys.stdin:\n"
            "    shake_hands(line.strip())\n"
        )
        self._child = subprocess.Popen(
            [
                sys.executable, "-c", code, str(node.runtime_dir / "client.sock"), pack_hello(job, "a test").hex(),
                *([] if user is None else [str(user)]),
            ],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.pid = self._child.pid

    def welcome(self, patience: float = 60.0) -> tuple[int, int, str, str]:
        """status, descriptors, job, message"""
        assert self._child.stdout is not None
        ready, _, _ = select.select([self._child.stdout], [], [], patience)
        assert ready, "no answer to the handshake"
        line = self._child.stdout.readline().split()
        assert line, "the program died"
        if line[0] == "-":
            raise NotAnswered
        status, fds, job, message = unpack_welcome(bytes.fromhex(line[0]))
        assert fds == int(line[1])
        return status, fds, job, message

    def reattach(self, job: str) -> tuple[int, int, str, str]:
        assert self._child.stdin is not None
        self._child.stdin.write(pack_hello(job, reattach=True).hex() + "\n")
        self._child.stdin.flush()
        return self.welcome()

    def kill(self) -> None:
        self._child.kill()
        self._child.communicate()

    def wait(self, patience: float = 60.0) -> int:
        return self._child.wait(patience)

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def send_raw(path: Path, data: bytes) -> bytes:
    """One message to a listening socket; what comes back, empty if the connection was only closed."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(str(path))  # waits for its place in the queue, which it does not with a time-out
        sock.settimeout(60)
        with contextlib.suppress(OSError):
            sock.send(data)
        try:
            return sock.recv(WELCOME.size)
        except ConnectionResetError:
            return b""
