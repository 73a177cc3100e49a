"""The last checkpoint: of a process that no recovery brings further, before its program is informed that it is lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.criu.test_client_dump import STEPS, criu_or_skip, let_end, start, wait_for_lines
from tests.migration.moves import succeeded
from xmigd.demo.node import Node, Program

pytestmark = pytest.mark.criu

# A recovery counts as progress only if it came further than the one before.
SETTINGS: dict[str, object] = {"max_attempts": 1, "stable_after": 1e6, "standby": False}
AT_REST = STEPS * 2 // 3 + 1  # lines, when the program only repeats itself


def events(node: Node, kind: str) -> list[dict[str, Any]]:
    return [event["data"] for event in node.client.get("/v1/events", limit=1000) if event["type"] == kind]


def lose(program: Program) -> None:
    """Let its servers die of themselves, until it is lost. It stands still: no replay comes further than another."""
    harness.wait_until(lambda: bool((program.info() or {}).get("snapshots")), "it has a snapshot")
    os.kill(program.process.pid, signal.SIGSTOP)
    before = None
    while (found := program.until("running", "losing", "lost", "ended"))["state"] == "running":
        if found["server_pid"] not in (before, None):
            before = found["server_pid"]
            os.kill(before, signal.SIGABRT)


def test_it_is_made_and_restored(native_dir: Path, tmp_path: Path) -> None:
    output, undisturbed = tmp_path / "steps", tmp_path / "undisturbed"
    with harness.own_node(native_dir, devices="cpu:0,cpu:1", port=-1, criu=criu_or_skip(), **SETTINGS) as node:
        let_end(undisturbed)
        assert start(node, native_dir, undisturbed, 0).finish()[0] == 0
        node.environment["PAGEABLE"] = "1"  # nothing lies beside the snapshot
        program = start(node, native_dir, output, 0)
        wait_for_lines(output, AT_REST)
        lose(program)
        harness.wait_until(lambda: bool(events(node, "checkpoint.last")), "it is made")
        last = events(node, "checkpoint.last")[0]
        assert last["new"]
        assert last["hint"] == f"xmigctl restore {last['checkpoint'][:12]}"
        program.process.kill()
        program.process.wait()
        os.truncate(output.with_suffix(".err"), 0)  # the program may have written that it is lost
        succeeded(node, node.client.post(f"/v1/checkpoints/{last['checkpoint']}:restore", {"devices": ["cpu:1"]}))
        let_end(output)
        wait_for_lines(output, STEPS)
        assert output.read_text() == undisturbed.read_text()


def test_the_newest_that_there_is(native_dir: Path, tmp_path: Path) -> None:
    """No new one can be made; the program is informed that it is lost, and what there is can be restored."""
    output, criu = tmp_path / "steps", tmp_path / "criu"
    criu.symlink_to(criu_or_skip())
    with harness.own_node(native_dir, port=-1, criu=criu, **SETTINGS) as node:
        program = start(node, native_dir, output, 0)
        wait_for_lines(output, AT_REST)
        row = succeeded(node, node.client.post("/v1/checkpoints", {"job": program.job}))
        checkpoint = row["result"]["checkpoint"]
        criu.unlink()
        lose(program)
        harness.wait_until(lambda: bool(events(node, "checkpoint.last")), "it is reported")
        last = events(node, "checkpoint.last")[0]
        assert (last["new"], last["checkpoint"]) == (False, checkpoint)
        assert events(node, "checkpoint.failed")[0]["why"] == "last"
        os.kill(program.process.pid, signal.SIGCONT)
        assert program.finish()[0] != 0
