"""Ranks whose servers are lost go on together, and nothing of it is seen in what they compute."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.collectives.conftest import PROGRAMS, Launch, enough, lines_of
from xmigd.demo.node import Node, Program

RANKS = 4
DONE = [f"{rank}: done" for rank in range(RANKS)]
MADE = f"a communicator of {RANKS} is made ahead"
USED = f"a communicator of {RANKS} ranks was made ahead"


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
    assert program.process.poll() is None, "they have ended"
    return all(one["state"] == "running" for one in ranks_of(node, program))


@pytest.mark.parametrize("seed", range(2))
def test_killed_while_communicators_are_made(node: Node, launch: Launch, tmp_path: Path, seed: int) -> None:
    """Who waits for the lost rank is recovered with it: its program hears of no failure."""
    chance = random.Random(seed)
    program = launch("steps", RANKS, 0, SPLIT_EVERY="1")
    begun(tmp_path)
    for _ in range(6):
        time.sleep(chance.uniform(0.02, 0.2))
        harness.wait_until(lambda: all_run(node, program), "all ranks run again")
        kill(chance.choice([one["server_pid"] for one in ranks_of(node, program)]))
    enough(tmp_path)
    assert lines_of(program, timeout=60) == DONE


def has_recovered(node: Node, program: Program, times: int) -> bool:
    """In this order: a recovery counts from its beginning."""
    return all(one["recoveries"] >= times for one in ranks_of(node, program)) and all_run(node, program)


def take_snapshots(node: Node, program: Program) -> None:
    """All ranks do."""
    harness.wait_until(
        lambda: all((one["snapshots"] or 0) >= 3 for one in ranks_of(node, program)), "snapshots of all ranks"
    )


def test_undisturbed(node: Node, launch: Launch, tmp_path: Path) -> None:
    """Snapshots are taken by all ranks in the same rounds."""
    program = launch("steps", RANKS, 0)
    begun(tmp_path)
    take_snapshots(node, program)
    enough(tmp_path)
    assert lines_of(program, timeout=60) == DONE


def kill_at_random(node: Node, program: Program, seed: int) -> None:
    """One server or several at a time, also while the ranks are being recovered."""
    chance = random.Random(seed)
    for _ in range(6):
        time.sleep(chance.uniform(0.05, 0.5))
        if chance.random() < 0.7:
            harness.wait_until(lambda: all_run(node, program), "all ranks run again")
        servers = [one["server_pid"] for one in ranks_of(node, program)]
        kill(*chance.sample(servers, min(len(servers), chance.choice([1, 1, 2, RANKS]))))


@pytest.mark.parametrize("seed", range(3))
def test_servers_are_killed(node: Node, launch: Launch, tmp_path: Path, seed: int) -> None:
    program = launch("steps", RANKS, 0)
    begun(tmp_path)
    kill_at_random(node, program, seed)
    enough(tmp_path)
    assert lines_of(program, timeout=60) == DONE
    assert not [line for line in program.lines() if "the process is lost" in str(line)], program.lines()


def steps(node: Node, folder: Path, **environment: str) -> Program:
    begin: list[str | Path] = [sys.executable, PROGRAMS / "launch.py", str(RANKS), folder, PROGRAMS / "steps.py"]
    return node.program([*begin, "0"], name="steps", environment=environment)


def test_standbys_make_communicators_ahead(native_dir: Path, tmp_path: Path) -> None:
    """All ranks use what their standbys have made."""
    settings = {"devices": "cpu:0,cpu:1", "port": -1, "standby_communicators_mib": 1024}
    with harness.own_node(native_dir, **settings) as node:

        def at_least(text: str, times: int) -> bool:
            return node.log.read_text().count(text) >= times

        program = steps(node, tmp_path)
        begun(tmp_path)
        harness.wait_until(partial(at_least, MADE, RANKS), "the standbys have made their communicator")
        kill(ranks_of(node, program)[1]["server_pid"])
        harness.wait_until(partial(at_least, USED, RANKS), "all have used it")
        enough(tmp_path)
        assert lines_of(program, timeout=60) == DONE


def test_no_standby_makes_any(native_dir: Path, tmp_path: Path) -> None:
    """If nobody has given it memory for that."""
    with harness.own_node(native_dir, devices="cpu:0,cpu:1", port=-1) as node:
        program = steps(node, tmp_path)
        begun(tmp_path)
        time.sleep(0.5)
        kill(ranks_of(node, program)[0]["server_pid"])
        harness.wait_until(lambda: has_recovered(node, program, 1), "all have recovered")
        enough(tmp_path)
        assert lines_of(program, timeout=60) == DONE
        log = node.log.read_text()
        assert USED not in log
        assert "is made ahead" not in log


def lose_the_daemon(node: Node, program: Program) -> None:
    """And a server, when there is a new one."""
    time.sleep(0.5)
    node.kill()
    node.start()
    harness.found_again(node)
    time.sleep(0.3)
    kill(ranks_of(node, program)[1]["server_pid"])
    harness.wait_until(lambda: has_recovered(node, program, 1), "all have recovered")


def test_the_daemon_is_killed_meanwhile(node: Node, launch: Launch, tmp_path: Path) -> None:
    program = launch("steps", RANKS, 0)
    begun(tmp_path)
    lose_the_daemon(node, program)
    enough(tmp_path)
    assert lines_of(program, timeout=60) == DONE


def test_a_fault_is_injected(node: Node, launch: Launch, tmp_path: Path) -> None:
    """A sticky fault of a rank's device."""
    program = launch("steps", RANKS, 0)
    begun(tmp_path)
    time.sleep(0.4)
    victim = ranks_of(node, program)[2]["id"]
    node.client.post(
        f"/v1/jobs/{program.job}/faults:inject", {"kind": "fault", "point": "record", "sequence": 0, "error": 700,
                                                  "process": victim}
    )  # fmt: skip
    harness.wait_until(lambda: has_recovered(node, program, 1), "all have recovered")
    enough(tmp_path)
    assert lines_of(program, timeout=60) == DONE


@pytest.mark.parametrize("victim", range(RANKS))
def test_killed_while_others_have_taken_their_snapshot(
    node: Node, launch: Launch, tmp_path: Path, victim: int
) -> None:  # fmt: skip
    """It takes its own again. Since its last one it has made communicators and ended them, as have the others."""
    program = launch("steps", RANKS, 0, SPLIT_EVERY="3")
    begun(tmp_path)
    name = ranks_of(node, program)[victim]["id"]
    fault = {"kind": "kill", "point": "snapshot", "sequence": 1, "process": name}
    for count in range(1, 4):
        node.client.post(f"/v1/jobs/{program.job}/faults:inject", fault)
        harness.wait_until(partial(has_recovered, node, program, count), "all have recovered")
    enough(tmp_path)
    assert lines_of(program, timeout=60) == DONE
    of_it = [line for line in node.log.read_text().splitlines() if f"process={name[:12]}" in line]
    assert any("taken again" in line for line in of_it)


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


def test_threads_with_a_rank_each(node: Node, launch: Launch, tmp_path: Path) -> None:
    """A thread waits for its rank's part before another begins that of its own: the replay does not wait for ever."""
    program = launch("rank_threads", 1, 0, device="cpu:0,1")
    harness.wait_until((tmp_path / "began.0").exists, "it has begun")
    for times in range(1, 6):
        time.sleep(0.3)
        kill(ranks_of(node, program)[0]["server_pid"])
        harness.wait_until(partial(has_recovered, node, program, times), "it has recovered")
    enough(tmp_path)
    assert lines_of(program, timeout=60) == ["0: done"]
