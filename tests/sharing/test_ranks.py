"""What is in communicators never waits: other ranks would wait for it, on other devices."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests import harness
from tests.collectives.conftest import PROGRAMS as RANKS
from tests.sharing.conftest import Starter, answer
from xmigd.demo.node import Node


def test_ranks_do_not_wait(daemon: Node, start: Starter, tmp_path: Path) -> None:
    critical = start("busy", priority="critical")
    assert answer(critical) == "busy"
    program = daemon.program(
        [sys.executable, RANKS / "launch.py", "2", tmp_path, RANKS / "steps.py", "0"],
        name="ranks", device="cpu:0,1", request={"priority": "best-effort"},
    )  # fmt: skip
    harness.wait_until(lambda: all((tmp_path / f"began.{rank}").exists() for rank in range(2)), "both have begun")

    def shown() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = daemon.client.get(f"/v1/jobs/{program.job}/sharing")["processes"]
        return found

    def snapshots() -> int:
        return min(one["snapshots"] or 0 for one in daemon.client.get("/v1/processes", job=program.job))

    harness.wait_until(lambda: all(one["shares"] for one in shown()), "their servers see the critical one")
    before = snapshots()
    harness.wait_until(lambda: snapshots() > before + 2, "both have executed more since")
    assert [one["held_kernels"] for one in shown()] == [0, 0]
    (tmp_path / "enough").touch()
    assert program.process.wait(60) == 0
    assert critical.process.stdin is not None
    critical.process.stdin.close()
    assert critical.process.wait(60) == 0
