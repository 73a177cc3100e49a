"""Ranks whose servers are lost go on together, and nothing of it is seen in what they compute."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.collectives.conftest import PROGRAMS, Launch, lines_of
from xmigd.demo.node import Node, Program

RANKS = 4
DONE = [f"{rank}: done" for rank in range(RANKS)]


def ranks_of(node: Node, program: Program) -> list[dict[str, Any]]:
    return sorted(node.client.get("/v1/processes", job=program.job), key=lambda one: int(one["pid"]))


def begun(folder: Path) -> None:
    harness.wait_until(lambda: all((folder / f"began.{rank}").exists() for rank in range(RANKS)), "all have begun")


def kill(*servers: int | None) -> None:
    for server in servers:
        if server:
            with contextlib.suppress(ProcessLookupError):
                os.kill(server, signal.SIGKILL)


def all_run(node: Node, program: Program) -> bool:
    """Or they have ended."""
    return all(one["state"] in ("running", "draining", "ended") for one in ranks_of(node, program))


def test_undisturbed(node: Node, launch: Launch, tmp_path: Path) -> None:
    """Snapshots are taken by all ranks in the same rounds."""
    program = launch("steps", RANKS, 200)
    begun(tmp_path)
    harness.wait_until(
        lambda: (
            all((one["snapshots"] or 0) >= 3 for one in ranks_of(node, program)) or program.process.poll() is not None
        ),
        "snapshots of all ranks",
    )
    assert program.process.poll() is None
    assert lines_of(program, timeout=60) == DONE


@pytest.mark.parametrize("seed", range(3))
def test_servers_are_killed(node: Node, launch: Launch, tmp_path: Path, seed: int) -> None:
    """One or several at a time, also while the ranks are being recovered."""
    chance = random.Random(seed)
    program = launch("steps", RANKS, 400)
    begun(tmp_path)
    for _ in range(6):
        time.sleep(chance.uniform(0.05, 0.5))
        if chance.random() < 0.7:
            harness.wait_until(lambda: all_run(node, program), "all ranks run again")
        servers = [one["server_pid"] for one in ranks_of(node, program)]
        kill(*chance.sample(servers, min(len(servers), chance.choice([1, 1, 2, RANKS]))))
    assert lines_of(program, timeout=60) == DONE
    assert not [line for line in program.lines() if "the process is lost" in str(line)], program.lines()


def test_the_daemon_is_killed_meanwhile(node: Node, launch: Launch, tmp_path: Path) -> None:
    program = launch("steps", RANKS, 400)
    begun(tmp_path)
    time.sleep(0.5)
    node.kill()
    node.start()
    harness.found_again(node)
    time.sleep(0.3)
    kill(ranks_of(node, program)[1]["server_pid"])
    assert lines_of(program, timeout=60) == DONE


def test_a_fault_is_injected(node: Node, launch: Launch, tmp_path: Path) -> None:
    """A sticky fault of a rank's device."""
    program = launch("steps", RANKS, 300)
    begun(tmp_path)
    time.sleep(0.4)
    victim = ranks_of(node, program)[2]["id"]
    node.client.post(
        f"/v1/jobs/{program.job}/faults:inject", {"kind": "fault", "point": "record", "sequence": 0, "error": 700,
                                                  "process": victim}
    )  # fmt: skip
    assert lines_of(program, timeout=60) == DONE


def test_a_journal_that_fills_while_others_wait(native_dir: Path, tmp_path: Path) -> None:
    """Nobody waits for ever, and the log has what it costs."""
    with harness.own_node(native_dir, devices="cpu:0,cpu:1", port=-1, journal_mib=4) as node:
        launch: list[str | Path] = [
            sys.executable,
            PROGRAMS / "launch.py",
            "2",
            tmp_path,
            PROGRAMS / "faults.py",
            "loads",
        ]
        program = node.program(launch, name="loads")
        assert lines_of(program, timeout=60) == ["0: went on", "1: went on"]
        assert any("a snapshot was taken alone" in str(line) for line in program.lines("server"))
