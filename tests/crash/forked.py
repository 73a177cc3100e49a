"""A node whose daemons are forked (tests/forked.py), and are killed and started again without a word."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.daemon.node import until
from tests.forked import Zygote
from xmigd.demo.node import Node, looks, status


class ForkedNode(Node):
    def __init__(self, folder: Path, zygote: Zygote, **settings: object) -> None:
        super().__init__(folder, **settings)
        self._zygote = zygote
        self.daemon_environment: dict[str, str] = {}  # that its programs do not have
        self.daemon_pid = 0

    @property
    def is_alive(self) -> bool:
        # Not its state: that of a process is its first thread's, and the others may still hold its files.
        return bool(self.daemon_pid) and Path(f"/proc/{self.daemon_pid}").exists()

    def launch(self) -> None:
        self.daemon_pid = self._zygote.fork(self.environment | self.daemon_environment, self.log).pid

    def start(self) -> None:
        self.launch()
        until(lambda: not self.is_alive or self.is_ready(), "it is ready, or dead")
        assert self.is_alive, self.log.read_text()[-3000:]

    def is_ready(self) -> bool:
        return status(self.settings.api_socket, "/readyz") == 200

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def _end(self, number: int) -> None:
        if self.daemon_pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.daemon_pid, number)
            until(lambda: not self.is_alive, "the daemon is gone")
            self.daemon_pid = 0

    @contextlib.contextmanager
    def http(self) -> Iterator[httpx.Client]:
        """Requests that do not wait for a daemon that is away."""
        transport = httpx.HTTPTransport(uds=str(self.settings.api_socket), verify=False)
        with httpx.Client(transport=transport, base_url="http://localhost", timeout=60) as client:
            yield client

    def get(self, path: str, **params: Any) -> Any:
        with self.http() as http:
            answer = http.get(path, params=params)
            assert answer.is_success, answer.text
            return answer.json()


def settle(node: ForkedNode, process: str) -> None:
    """Wait until nothing that an earlier daemon had begun is open, and its process is the only one that lives."""

    def settled() -> bool:
        open_ones = [o for state in ("pending", "running") for o in node.get("/v1/operations", state=state)]
        live = node.get("/v1/processes", live=True)
        return not open_ones and [(each["id"], each["state"]) for each in live] == [(process, "running")]

    for _ in looks(60):
        if settled():
            return
    raise AssertionError(f"not settled: {node.get('/v1/processes', live=True)}")
