"""What the tests of moves with real servers share."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Any

from tests import harness
from xmigd.client import Refused
from xmigd.demo.node import Node, Program

OVER = ("succeeded", "failed", "cancelled")


def info(program: Program) -> dict[str, Any]:
    # A program is served before it is written down, and the daemon tells only of what is.
    harness.wait_until(lambda: program.info() is not None, "the daemon has written the program down")
    found = program.info()
    assert found is not None
    return found


def other(program: Program) -> str:
    """The device on which it is not."""
    return "cpu:1" if info(program)["device"] == "cpu:0" else "cpu:0"


def begin(program: Program, target: str | None = None, **fields: Any) -> dict[str, Any]:
    """Start a move; the operation."""
    body = {"process": info(program)["id"], "target": target or other(program), **fields}
    found: dict[str, Any] = program.node.client.post("/v1/migrations", body)
    return found


def ended(node: Node, operation: dict[str, Any], timeout: float = 60) -> dict[str, Any]:
    """The operation once it is over."""
    end = time.monotonic() + timeout
    while operation["state"] not in OVER:
        assert time.monotonic() < end, f"{operation}"
        operation = node.client.get(f"/v1/operations/{operation['id']}/wait", timeout=10)
    return operation


def succeeded(node: Node, operation: dict[str, Any], timeout: float = 60) -> dict[str, Any]:
    """The operation once it is over, and has succeeded."""
    operation = ended(node, operation, timeout)
    assert operation["state"] == "succeeded", f"{operation}"  # whole: of what is no text, pytest leaves parts out
    return operation


def moved(program: Program, target: str | None = None) -> dict[str, Any]:
    """Move it and wait; the operation has succeeded."""
    return succeeded(program.node, begin(program, target))


def reaches(node: Node, operation: dict[str, Any], *phases: str) -> dict[str, Any]:
    """The operation in one of these phases, or over: phases pass quickly."""
    while True:
        operation = node.client.get(f"/v1/operations/{operation['id']}")
        if operation["phase"] in phases or operation["state"] in OVER:
            return operation


def target_pid(node: Node, program: Program, before: set[int]) -> int | None:
    """The server that was not there before."""
    found = set(harness.server_pids(node)) - before
    return min(found) if found else None


def suspended(program: Program, to: str = "host") -> dict[str, Any]:
    path = f"/v1/processes/{info(program)['id']}:suspend"
    return succeeded(program.node, program.node.client.post(path, {"to": to}))


def resumed(program: Program, device: str | None = None) -> dict[str, Any]:
    path = f"/v1/processes/{info(program)['id']}:resume"
    return succeeded(program.node, program.node.client.post(path, {} if device is None else {"device": device}))


def kill(pid: int | None) -> None:
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def refusal(node: Node, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The problem with which it is refused."""
    try:
        node.client.post(path, body)
    except Refused as error:
        return dict(error.problem)
    raise AssertionError("it was not refused")
