"""A daemon that only uses its protocols, as in tests/daemon; and one that answers what a test has written down."""

from __future__ import annotations

import contextlib
import io
import json
import os
import socketserver
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, Protocol
from unittest.mock import patch

import pytest

from tests.daemon.conftest import make_node, node, peer_native
from tests.daemon.node import ROOT, Node
from xmigd.cli import main

__all__ = ["make_node", "node", "peer_native"]

Answer = tuple[int, Any]  # status, body


class HasEnvironment(Protocol):
    """A daemon, as its callers find it."""

    @property
    def environment(self) -> dict[str, str]: ...


def ctl(node: HasEnvironment, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """xmigctl with these arguments, in this process, which saves its start. `more`: variables of its environment."""
    with (
        patch.dict(os.environ, node.environment | more, clear=True),
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        try:
            main(list(arguments))
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def ctl_process(node: Node | Scripted, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """The same as a process of its own: for commands that become another program, and where there is no daemon (a
    connection that fails leaves httpx's socket open until the process ends)."""
    return subprocess.run(
        [sys.executable, "-m", "xmigd.cli", *arguments], env=node.environment | more, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip


@dataclass
class Scripted:
    """An api.sock whose answers are a function's: moments that a real daemon does not stay in."""

    folder: Path
    answer: Callable[[str, str, Any], Answer] = field(default=lambda method, path, body: (404, {"detail": "nothing"}))
    requests: list[tuple[str, str, Any, dict[str, str]]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        return {"PYTHONPATH": str(ROOT), "XMIG_RUNTIME_DIR": str(self.folder), "PATH": "/usr/bin:/bin",
                "XMIG_CONFIG": "/dev/null"}  # fmt: skip


class _Handler(BaseHTTPRequestHandler):
    script: Scripted

    def do_GET(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(length)) if length else None
        self.script.requests.append((self.command, self.path, body, dict(self.headers)))
        status, answer = self.script.answer(self.command, self.path, body)
        if status == 0:  # the daemon dies with the answer
            self.connection.close()
            return
        text = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
        self.send_response(status)
        kind = "application/json" if status < 400 else "application/problem+json"
        self.send_header("Content-Type", "text/event-stream" if isinstance(answer, str) else kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_POST = do_DELETE = do_PATCH = do_GET

    def log_message(self, *_: Any) -> None:
        pass

    def address_string(self) -> str:
        return "local"


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    with tempfile.TemporaryDirectory(prefix="xmig-") as folder:
        script = Scripted(Path(folder))
        handler = type("Handler", (_Handler,), {"script": script})
        with _Server(str(script.folder / "api.sock"), handler) as server:
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
            thread.start()
            yield script
            server.shutdown()
            thread.join()
