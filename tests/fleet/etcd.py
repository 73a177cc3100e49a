"""An etcd of its own in the network of a node."""

from __future__ import annotations

import base64
import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from tests.daemon.conftest import in_memory
from tests.harness import ROOT, wait_until
from xmigd.demo.namespaces import NetworkNode

PORTS = 2379, 2380
POST = """import sys, urllib.request
request = urllib.request.Request(sys.argv[1], sys.argv[2].encode(), {"Content-Type": "application/json"})
print(urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30).read().decode())"""


def etcd_or_skip() -> Path:
    found = subprocess.run([ROOT / "packaging" / "setup" / "etcd.sh"], capture_output=True, text=True, check=False)
    if found.returncode != 0:
        pytest.skip(found.stderr.strip() or "there is no etcd here")
    return Path(found.stdout.strip())


class EtcdServer:
    def __init__(self, program: Path) -> None:
        self._program = program
        self._folder = tempfile.TemporaryDirectory(prefix="xmig-etcd-", dir=in_memory())
        self._network: NetworkNode | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self.kill()
        self._folder.cleanup()

    def start(self, network: NetworkNode) -> None:
        """In this node's network. It need not answer yet."""
        self._network = network
        client, peer = (f"http://{network.address}:{port}" for port in PORTS)
        self._process = network.run(
            [
                self._program, "--data-dir", self._folder.name, "--listen-client-urls", client,
                "--advertise-client-urls", client, "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
                "--initial-cluster", f"default={peer}", "--unsafe-no-fsync",
            ],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    @property
    def url(self) -> str:
        assert self._network is not None
        return f"http://{self._network.address}:{PORTS[0]}"

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def starts_again(self) -> None:
        assert self._network is not None
        self.start(self._network)
        self.answers()

    def pause(self, number: int = signal.SIGSTOP) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def goes_on(self) -> None:
        self.pause(signal.SIGCONT)

    def answers(self) -> None:
        """Wait until it does."""

        def holds() -> bool:
            try:
                self.call("kv/range", {"key": key("/")})
            except subprocess.CalledProcessError:
                return False
            return True

        wait_until(holds, "etcd answers")

    def call(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        assert self._network is not None
        command = [*self._network.command, sys.executable, "-c", POST, f"{self.url}/v3/{path}", json.dumps(body)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return dict(json.loads(done.stdout))

    def leases(self) -> list[dict[str, Any]]:
        """Keys of jobs, as etcd has them."""
        return list(self.call("kv/range", {"key": key("/xmig/"), "range_end": key("/xmig0")}).get("kvs", []))


def key(name: str) -> str:
    return base64.b64encode(name.encode()).decode()
