"""A daemon of one's own in a folder of its own, and programs that run under it: for the demo, tests and benchmarks."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol, Self

from xmigd.client import Client
from xmigd.errors import StartError
from xmigd.settings import Settings

PATIENCE = 60.0  # seconds for anything that takes milliseconds on a machine that is not overloaded
# Seconds between two looks. Who looks again at once takes the processor from what is waited for. So pauses grow with
# the time that has gone.
SHORTEST_PAUSE, LONGEST_PAUSE = 0.002, 0.05
PART_OF_WAITING = 1 / 20


def looks(patience: float, *, closely: bool = False) -> Iterator[None]:
    """When to look whether what is waited for has come: at least once, and for the last time after ``patience``
    seconds. ``closely``: what may be over within milliseconds."""
    begun = time.monotonic()
    while True:
        yield
        gone = time.monotonic() - begun
        if gone > patience:
            return
        pause = SHORTEST_PAUSE if closely else min(max(SHORTEST_PAUSE, gone * PART_OF_WAITING), LONGEST_PAUSE)
        time.sleep(pause)


def status(api_socket: Path, path: str) -> int | None:
    """Of the answer to a GET. None: nobody takes connections there, or whoever took this one has gone.

    Over one connection, and not by httpx, which leaves its socket open when it cannot connect. That somebody was there
    a moment ago says nothing: a server that a daemon was starting when it ended has its sockets until it is another
    program.
    """
    with contextlib.closing(http.client.HTTPConnection("localhost")) as connection:
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(PATIENCE)
        try:
            connection.sock.connect(str(api_socket))
            connection.request("GET", path)
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return None


class Child(Protocol):
    """The daemon's process: what is used of Popen."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, number: int, /) -> None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


class Node:
    """An xmigd with its sockets, database and log in `folder`. ``settings``: XMIG_* variables, without the prefix."""

    def __init__(self, folder: Path, **settings: object) -> None:
        self.folder = folder
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("XMIG_") or k == "XMIG_NATIVE_DIR"}
        self.environment.pop("CUDA_VISIBLE_DEVICES", None)  # `devices` says which there are; programs may set their own
        values = {"runtime_dir": folder, "database": folder / "xmig.db", "devices": "cpu:0,cpu:1", "port": 0} | settings
        self.environment |= {f"XMIG_{name.upper()}": str(value) for name, value in values.items()}
        self.settings = Settings(runtime_dir=folder)
        self.client = Client(self.settings, keep=True)
        self.process: Child | None = None
        self._programs: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        for program in self._programs:
            with program:  # closes its pipes and waits
                program.kill()
        self.stop()
        self.client.close()

    @property
    def log(self) -> Path:
        return self.folder / "xmigd.log"

    def start(self) -> None:
        """Start it and wait until it takes programs. Raises StartError with the end of its log."""
        self.launch()
        assert self.process is not None
        for _ in looks(PATIENCE):
            if self.process.poll() is not None:
                break
            if status(self.settings.api_socket, "/v1/node") == 200:
                return
        last = self.log.read_text(errors="replace").strip().splitlines()[-5:]
        self.stop()
        raise StartError("xmigd did not start: " + " | ".join(last), hint=f"its log is {self.log}")

    def launch(self) -> None:
        """Start it and do not wait."""
        with self.log.open("ab") as log:
            self.process = self.popen(log)

    def popen(self, log: IO[bytes]) -> Child:
        """The daemon's process."""
        return subprocess.Popen(
            [sys.executable, "-m", "xmigd.main"], env=self.environment, stdin=subprocess.DEVNULL, stdout=log,
            stderr=log, start_new_session=True,
        )  # fmt: skip

    def stop(self) -> None:
        """SIGTERM, and wait for its end."""
        self.client.close()
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self.process = None

    def kill(self) -> None:
        """SIGKILL: what a crash of the daemon is."""
        self.client.close()
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.process = None

    def program(
        self,
        command: Sequence[str | Path],
        *,
        name: str = "",
        device: str | None = None,
        hang_timeout: float | None = None,
        replica_policy: str | None = None,
        environment: Mapping[str, str] | None = None,
        nodes: Sequence[str] = (),
        request: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Program:
        """Start a program under the shim, as `xmigctl run` does. ``options`` go to Popen; standard output is text.
        ``request``: what else the job is to have."""
        words = [str(word) for word in command]
        job = self.client.post(
            "/v1/jobs",
            {
                "name": name,
                "command": " ".join(words)[:4096],
                "device": device,
                "hang_timeout": hang_timeout,
                "replica_policy": replica_policy,
                "nodes": list(nodes),
                **(request or {}),
            },
        )
        theirs = self.environment.get("LD_LIBRARY_PATH")
        path = job["library_path"] + (f":{theirs}" if theirs else "")
        variables = (
            job["defaults"]
            | self.environment
            | job["environment"]
            | {"LD_PRELOAD": job["preload"], "LD_LIBRARY_PATH": path}
            | dict(environment or {})
        )
        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True} | options
        process = subprocess.Popen(words, env=variables, **options)
        self._programs.append(process)
        return Program(self, job["id"], process)


class Program:
    """A program under the shim."""

    def __init__(self, node: Node, job: str, process: subprocess.Popen[str]) -> None:
        self.node = node
        self.job = job
        self.process = process

    def info(self) -> dict[str, Any] | None:
        """What the daemon knows about its process, or None before the handshake. Its children are programs, too."""
        found = self.node.client.get("/v1/processes", job=self.job)
        own = [one for one in found if one["pid"] == self.process.pid] or found  # not if it was restored
        return dict(own[0]) if own else None

    def until(self, *states: str, closely: bool = False) -> dict[str, Any]:
        """Wait until its process is in one of these states. ``closely``: which it may have left milliseconds later.
        Raises TimeoutError."""
        info: dict[str, Any] | None = None
        for _ in looks(PATIENCE, closely=closely):
            info = self.info()
            if info is not None and info["state"] in states:
                return info
        found = f"{info['state']} ({info['why']})" if info else "unknown"
        raise TimeoutError(f"the process is {found}, not {' or '.join(states)}")

    def inject(self, kind: str, *, point: str = "record", sequence: int = 0, error: int = 719) -> None:
        """Arm a fault that is injected once, at the first fitting record from ``sequence`` on."""
        body = {"kind": kind, "point": point, "sequence": sequence, "error": error}
        self.node.client.post(f"/v1/jobs/{self.job}/faults:inject", body)

    def recoveries(self) -> list[dict[str, Any]]:
        """Its recoveries, oldest first."""
        return list(reversed(self.node.client.get("/v1/recoveries", job=self.job, limit=1000)))

    def faults(self) -> list[dict[str, Any]]:
        """Its faults, oldest first."""
        return list(reversed(self.node.client.get("/v1/faults", job=self.job, limit=1000)))

    def lines(self, *sources: str) -> list[str]:
        """Its job's log, oldest first: what these have reported, otherwise the program and the daemon, but not its
        servers."""
        lines = self.node.client.get(f"/v1/jobs/{self.job}/logs", limit=1000)
        return [str(line["text"]) for line in lines if line["source"] in (sources or ("program", "xmigd"))]

    def position(self) -> int:
        """The last record that is known to be executed: that of the last snapshot. 0 before the first."""
        info = self.info()
        snapshots = self.node.client.get(f"/v1/processes/{info['id']}/segments", limit=1) if info else []
        return int(snapshots[0]["sequence"]) if snapshots else 0

    def finish(self, timeout: float = 120) -> tuple[int, str]:
        """Wait for its end: exit code and output. A program that takes longer is killed."""
        try:
            output, _ = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            raise
        return self.process.returncode, output or ""
