"""Ranks of which one hangs, or that wait for each other: all are recovered together, and a slow rank is no hang."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.collectives.conftest import PROGRAMS, Launch, enough, lines_of
from tests.collectives.test_lost_ranks import logs
from tests.collectives.test_steps import DONE, RANKS, begun, has_recovered, ranks_of
from xmigd.demo.node import Node, Program

PATIENCE = 3.0  # seconds; on a busy machine what is done in a moment takes one
WAITS = "a rank waits for others"  # in the daemon's log


def hang(node: Node, program: Program, *ranks: int) -> None:
    """The next copy of each of them never ends."""
    for rank in ranks:
        node.client.post(
            f"/v1/jobs/{program.job}/faults:inject",
            {"kind": "hang", "point": "copy", "sequence": 0, "process": ranks_of(node, program)[rank]["id"]},
        )


def injected(program: Program) -> list[tuple[str, int]]:
    return [(one["process_id"], one["error"]) for one in program.faults() if one["kind"] == "injected"]


def recoveries(program: Program, process: str) -> list[dict[str, Any]]:
    return [one for one in program.recoveries() if one["process_id"] == process]


@pytest.mark.parametrize("hanging", [(2,), (0, 3)])
def test_ranks_that_hang(node: Node, launch: Launch, tmp_path: Path, hanging: tuple[int, ...]) -> None:
    program = launch("steps", RANKS, 0, hang_timeout=PATIENCE)
    begun(tmp_path)
    processes = [one["id"] for one in ranks_of(node, program)]
    hang(node, program, *hanging)
    harness.wait_until(lambda: len(injected(program)) == len(hanging), "they hang")
    harness.wait_until(lambda: has_recovered(node, program, 1), "all have recovered")
    enough(tmp_path)
    assert lines_of(program, timeout=60) == DONE
    # The second may not have got to where it hangs when the first was found: then it does so afterwards, or is
    # being recovered then.
    done = [[(one["outcome"], one["exact"]) for one in recoveries(program, each)] for each in processes]
    assert all(each in [[("resumed", True)] * times for times in range(1, len(hanging) + 1)] for each in done), done
    assert sorted(injected(program)) == sorted((processes[rank], 702) for rank in hanging)


def all_wait(node: Node, program: Program, recovered: int) -> bool:
    """Rank 1 hangs, and all have reported that they wait. False if it has no collective left to wait for: then it is
    known as the one that hangs, and all have recovered."""
    reported = node.log.read_text().count(WAITS)
    hang(node, program, 1)

    def all_have() -> bool:
        return node.log.read_text().count(WAITS) >= reported + RANKS

    harness.wait_until(lambda: all_have() or has_recovered(node, program, recovered + 1), "it is found")
    return all_have()


def test_the_daemon_is_killed_while_a_rank_hangs(node: Node, launch: Launch, tmp_path: Path) -> None:
    """Servers that have reported it do so again to the next one."""
    program = launch("steps", RANKS, 0, hang_timeout=PATIENCE)
    begun(tmp_path)
    recovered = 0
    while not all_wait(node, program, recovered):  # it was found by itself, behind its last collective
        recovered += 1
    node.kill()
    node.start()
    harness.found_again(node)
    harness.wait_until(lambda: has_recovered(node, program, recovered + 1), "all have recovered")
    enough(tmp_path)
    assert lines_of(program, timeout=60) == DONE
    faults = [one for one in program.faults() if one["kind"] != "injected"]
    assert {(one["kind"], one["error"]) for one in faults} == {("timeout", 702)}
    assert len(injected(program)) == recovered, "of the one that the daemon did not survive nobody knows any more"


def test_a_rank_that_is_slow_on_its_host(launch: Launch) -> None:
    """Nobody hangs: whose device waits and whose program waits for that is not all of the ranks."""
    program = launch("faults", 4, "sleeps", 2.5 * PATIENCE, hang_timeout=PATIENCE)
    assert lines_of(program, timeout=90) == [f"{rank}: went on" for rank in range(4)]
    assert (program.faults(), program.recoveries()) == ([], [])


def test_a_group_that_hangs_again_and_again(native_dir: Path, tmp_path: Path) -> None:
    """As one that waits for itself does. It ends like a single process whose recoveries make no progress."""
    with harness.own_node(native_dir, devices="cpu:0,cpu:1", port=-1, max_attempts=2) as node:
        command: list[str | Path] = [sys.executable, PROGRAMS / "launch.py", "2", tmp_path, PROGRAMS / "faults.py"]
        program = node.program([*command, "deadlock"], name="deadlock", hang_timeout=1.0)
        assert {line.split(":")[1] for line in lines_of(program, timeout=90)} <= {" failed with 702", " failed with 46"}
        logs(program, "2 recoveries in a row made no progress; the last: no rank has got further for 1 s")
        assert {one["outcome"] for one in program.recoveries()} == {"resumed", "lost"}
        assert {(one["kind"], one["error"]) for one in program.faults()} == {("timeout", 702)}
        assert len(program.faults()) == 6
