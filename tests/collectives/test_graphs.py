"""Graphs with collectives give what the same calls give outside of one, whatever happens to servers meanwhile."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests import harness
from tests.collectives.conftest import Launch, enough, lines_of
from tests.collectives.test_moves import move_all
from tests.collectives.test_steps import (
    DONE,
    MADE,
    RANKS,
    USED,
    begun,
    has_recovered,
    kill,
    kill_at_random,
    lose_the_daemon,
    ranks_of,
    steps,
    take_snapshots,
)
from xmigd.demo.node import Node, Program


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_kind(launch: Launch, ranks: int) -> None:
    assert lines_of(launch("captured", ranks)) == [f"{rank}: done" for rank in range(ranks)]


def graphed(launch: Launch, **environment: str) -> Program:
    return launch("steps", RANKS, 0, GRAPHS="1", **environment)


def test_snapshots_between_launches(node: Node, launch: Launch, tmp_path: Path) -> None:
    """And within: ranks stop at equal counts of collectives, some of them in the middle of a graph."""
    program = graphed(launch)
    begun(tmp_path)
    take_snapshots(node, program)
    enough(tmp_path)
    assert lines_of(program, timeout=60) == DONE
    assert all(one["recoveries"] == 0 for one in ranks_of(node, program))


@pytest.mark.parametrize("seed", range(3))
def test_servers_are_killed(node: Node, launch: Launch, tmp_path: Path, seed: int) -> None:
    """One or several at a time, at any moment of a launch."""
    program = graphed(launch)
    begun(tmp_path)
    kill_at_random(node, program, seed)
    enough(tmp_path)
    assert lines_of(program, timeout=60) == DONE
    assert any(one["recoveries"] for one in ranks_of(node, program))
    assert not [line for line in program.lines() if "the process is lost" in str(line)], program.lines()


@pytest.mark.parametrize("victim", [0, 3])
def test_killed_while_others_have_taken_their_snapshot(
    node: Node, launch: Launch, tmp_path: Path, victim: int
) -> None:  # fmt: skip
    program = graphed(launch, SPLIT_EVERY="3")
    begun(tmp_path)
    fault = {"kind": "kill", "point": "snapshot", "sequence": 1, "process": ranks_of(node, program)[victim]["id"]}
    for count in range(1, 4):
        node.client.post(f"/v1/jobs/{program.job}/faults:inject", fault)
        harness.wait_until(partial(has_recovered, node, program, count), "all have recovered")
    enough(tmp_path)
    assert lines_of(program, timeout=60) == DONE


def test_ranks_move(node: Node, launch: Launch, tmp_path: Path) -> None:
    """Their communicators are others afterwards; the graphs stay."""
    program = graphed(launch)
    begun(tmp_path)
    move_all(node, program)
    enough(tmp_path)
    assert lines_of(program, timeout=60) == DONE
    assert all(one["recoveries"] == 0 for one in ranks_of(node, program))


def test_standbys_make_communicators_ahead(native_dir: Path, tmp_path: Path) -> None:
    settings = {"devices": "cpu:0,cpu:1", "port": -1, "standby_communicators_mib": 1024}
    with harness.own_node(native_dir, **settings) as node:
        program = steps(node, tmp_path, GRAPHS="1")
        begun(tmp_path)
        harness.wait_until(lambda: node.log.read_text().count(MADE) >= RANKS, "the standbys have made theirs")
        kill(ranks_of(node, program)[1]["server_pid"])
        harness.wait_until(lambda: node.log.read_text().count(USED) >= RANKS, "all have used it")
        enough(tmp_path)
        assert lines_of(program, timeout=60) == DONE


def test_the_daemon_is_killed_meanwhile(node: Node, launch: Launch, tmp_path: Path) -> None:
    program = graphed(launch)
    begun(tmp_path)
    lose_the_daemon(node, program)
    enough(tmp_path)
    assert lines_of(program, timeout=60) == DONE
