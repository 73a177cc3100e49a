"""A real xmigd on cpu devices with a real xmig-web in front of it."""

from __future__ import annotations

import os
import random
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.daemon.node import Node as ScriptedNode
from tests.harness import ROOT
from xmigd.demo.node import Node, Program

PATIENCE = 60.0


class Front:
    """`xmig-web` at a free port. ``settings``: XMIG_WEB_* variables, without the prefix."""

    def __init__(self, node: Node | ScriptedNode, **settings: object) -> None:
        self.log = node.folder / "xmig-web.log"
        socket = node.settings.api_socket if isinstance(node, Node) else node.runtime_dir / "api.sock"
        values = {"api": f"unix:{socket}", "port": 0, "local": 1} | settings
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("XMIG_")}
        self.environment |= {f"XMIG_WEB_{name.upper()}": str(value) for name, value in values.items()}
        self.environment["PYTHONPATH"] = str(ROOT)
        self.process: subprocess.Popen[bytes] | None = None
        self.address = ""

    def __enter__(self) -> Self:
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "xmigd.web.main"], env=self.environment, stdin=subprocess.DEVNULL, stderr=log
            )
        end = time.monotonic() + PATIENCE
        while not (found := re.search(r"is ready .*?(https?://[\w.:\[\]]+)", self.log.read_text())):
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < end, "xmig-web does not start"
            time.sleep(0.01)
        self.address = found[1]
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        assert self.process is not None
        self.process.terminate()
        assert self.process.wait(PATIENCE) == 0
        reported = self.log.read_text()
        assert "Traceback" not in reported, reported
        assert "never retrieved" not in reported, reported


def port_for_long() -> str:
    """A free port that stays free when nobody listens there: none of those which whoever asks for any is given."""
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    while True:
        port = random.choice(range(max(1024, low - 10_000), low) or range(high, 1 << 16) or range(1024, 1 << 16))
        with socket.socket() as ours:
            try:
                ours.bind(("127.0.0.1", port))
            except OSError:
                continue
        return str(port)


def start_calm(node: Node, name: str, *, mebibytes: int = 16, **options: Any) -> Program:
    """A program that computes until its standard input ends, and then says whether everything was exact."""
    calm = Path(__file__).parent / "calm.py"
    program = node.program(
        [sys.executable, calm, str(mebibytes)], name=name, stdin=subprocess.PIPE, stderr=subprocess.PIPE, **options
    )
    assert program.process.stdout is not None
    assert program.process.stdout.readline() == "begun\n"
    program.until("running")
    return program


def end_calm(program: Program) -> None:
    out, err = program.process.communicate("\n", timeout=PATIENCE)
    assert out.startswith("exact"), err
    program.until("ended")  # the daemon sees it later; a program that starts now would go to another device
