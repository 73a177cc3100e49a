"""Ranks that move while the others run: nothing of it is seen in what they compute."""

from __future__ import annotations

import contextlib
import random
import time
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.collectives.conftest import Launch, enough, lines_of
from tests.collectives.test_steps import DONE, RANKS, all_run, begun, kill, ranks_of
from tests.migration.moves import ended, reaches, succeeded
from xmigd.client import Refused
from xmigd.demo.node import Node, Program

OTHER = {"cpu:0": "cpu:1", "cpu:1": "cpu:0"}


def begin(node: Node, one: dict[str, Any]) -> dict[str, Any]:
    """Of a rank, to the other device."""
    body = {"process": one["id"], "target": OTHER[one["device"]]}
    operation: dict[str, Any] = node.client.post("/v1/migrations", body)
    return operation


def begin_when_it_can(node: Node, one: dict[str, Any]) -> dict[str, Any]:
    """The daemon may not have seen yet that a server was killed."""
    begun: list[dict[str, Any]] = []

    def it_begins() -> bool:
        with contextlib.suppress(Refused):
            begun.append(begin(node, one))
        return bool(begun)

    harness.wait_until(it_begins, "its move begins")
    return begun[0]


def move_all(node: Node, program: Program) -> None:
    """Onto one device, and to the other: packed, and apart again."""
    for target in ("cpu:0", "cpu:1"):
        for one in ranks_of(node, program):
            if one["device"] != target:
                succeeded(node, begin(node, one))
        assert {one["device"] for one in ranks_of(node, program)} == {target}


def test_each_rank_moves(node: Node, launch: Launch, tmp_path: Path) -> None:
    program = launch("steps", RANKS, 0)
    begun(tmp_path)
    move_all(node, program)
    enough(tmp_path)
    assert lines_of(program, timeout=60) == DONE
    assert all(one["recoveries"] == 0 for one in ranks_of(node, program))


def test_a_rank_moves_that_is_left_in_a_communicator(node: Node, launch: Launch, tmp_path: Path) -> None:
    """Another has ended it, so that its next server does not make it again; whoever else has it still does. All can
    stand still together nevertheless, also once they have ended it, too."""
    program = launch("endings", RANKS)
    begun(tmp_path)

    def is_kept() -> bool:
        return all((one["snapshots"] or 0) > 1 for one in ranks_of(node, program))

    harness.wait_until(is_kept, "a snapshot has it")
    succeeded(node, begin(node, ranks_of(node, program)[2]))
    (tmp_path / "end").touch()
    harness.wait_until(lambda: all((tmp_path / f"ended.{rank}").exists() for rank in (0, 2, 3)), "all end it")
    for rank in range(RANKS):
        succeeded(node, begin(node, ranks_of(node, program)[rank]))
    enough(tmp_path)
    assert lines_of(program, timeout=60) == DONE
    assert all(one["recoveries"] == 0 for one in ranks_of(node, program))


@pytest.mark.parametrize("seed", range(4))
def test_servers_are_killed_while_ranks_move(node: Node, launch: Launch, tmp_path: Path, seed: int) -> None:
    """Of the rank that moves, its target, or another's, in any phase."""
    chance = random.Random(seed)
    program = launch("steps", RANKS, 0)
    begun(tmp_path)
    outcomes = []
    for number in range(4):
        harness.wait_until(lambda: all_run(node, program), "all ranks run")
        ranks = ranks_of(node, program)
        before = set(harness.server_pids(node))
        operation = begin_when_it_can(node, ranks[number % RANKS])
        operation = reaches(node, operation, chance.choice(["preparing", "copying", "handing_over", "taking"]))
        time.sleep(chance.uniform(0, 0.02))
        targets = sorted(set(harness.server_pids(node)) - before)
        victims = [ranks[number % RANKS]["server_pid"], ranks[(number + 1) % RANKS]["server_pid"], *targets[:1]]
        kill(chance.choice(victims))
        outcomes.append(ended(node, operation)["state"])
    enough(tmp_path)
    assert lines_of(program, timeout=60) == DONE
    assert set(outcomes) <= {"succeeded", "failed"}


def test_a_move_is_cancelled(node: Node, launch: Launch, tmp_path: Path) -> None:
    program = launch("steps", RANKS, 0)
    begun(tmp_path)
    for phase in ("copying", "handing_over", "copying"):
        operation = reaches(node, begin(node, ranks_of(node, program)[1]), phase)
        with contextlib.suppress(Refused):  # it is over already
            node.client.delete(f"/v1/operations/{operation['id']}")
        operation = ended(node, operation)
        assert operation["state"] in ("cancelled", "succeeded"), f"{operation}"
    enough(tmp_path)
    assert lines_of(program, timeout=60) == DONE


@pytest.mark.parametrize("phase", ["copying", "handing_over", "taking"])
def test_the_daemon_is_killed_while_a_rank_moves(node: Node, launch: Launch, tmp_path: Path, phase: str) -> None:
    program = launch("steps", RANKS, 0)
    begun(tmp_path)
    reaches(node, begin(node, ranks_of(node, program)[2]), phase)
    node.kill()
    node.start()
    harness.found_again(node)
    harness.wait_until(lambda: all_run(node, program), "all ranks run")
    enough(tmp_path)
    assert lines_of(program, timeout=60) == DONE
