"""Ranks whose memory is equal, and one in which it is not any more: a bit was flipped, and no device reported it.

What programs do on purpose, and what happens to their servers, is not taken for that."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.collectives.conftest import PROGRAMS, enough, lines_of
from tests.collectives.test_lost_ranks import of_rank
from tests.collectives.test_replicas import overwrite
from xmigd.demo.node import Node, Program
from xmigd.errors import XmigError
from xmigd.groups.replicas import CHANGES, CONSTANT

RANKS = 3
CHUNK = 2 << 20
PARAMETERS, CONSTANTS, OWN = range(3)  # in the file that the program leaves
WATCHED = 9  # chunks: of parameters, and of constants
EQUAL = "0 words wrong"


@pytest.fixture(scope="module")
def node(native_dir: Path) -> Iterator[Node]:
    """Compares at every round."""
    devices = ",".join(f"cpu:{number}" for number in range(RANKS + 1))
    with harness.own_node(native_dir, devices=devices, port=-1, replica_check=0.01, snapshot_cost=0.5) as node:
        yield node


def begin(
    node: Node, folder: Path, ranks: int = RANKS, *, replica_policy: str | None = None, does: str = ""
) -> Program:
    command: list[str | Path] = [sys.executable, PROGRAMS / "launch.py", str(ranks), folder, PROGRAMS / "equal.py", "0"]
    return node.program(command, name="equal", replica_policy=replica_policy, environment={"DOES": does})


def of_ranks(node: Node, program: Program) -> dict[str, Any]:
    return dict(node.client.get(f"/v1/jobs/{program.job}/ranks"))


def are_watched(node: Node, program: Program, chunks: int = WATCHED) -> None:
    """So many chunks are known to be equal, also those that never change."""

    def watched() -> bool:
        assert program.process.poll() is None, program.process.communicate()
        found = of_ranks(node, program)["comparison"]
        return found is not None and found["watched"] >= chunks

    harness.wait_until(watched, f"{chunks} chunks are compared", timeout=120)


def compare_again(node: Node, program: Program, times: int) -> None:
    """At so many more rounds."""
    seen = {of_ranks(node, program)["comparison"]["round"]}

    def enough_rounds() -> bool:
        seen.add(of_ranks(node, program)["comparison"]["round"])
        return len(seen) > times

    harness.wait_until(enough_rounds, f"{times} comparisons", timeout=120)


def memory_of(folder: Path, rank: int, which: int) -> int:
    return int((folder / f"memory.{rank}").read_text().split()[which])


def flip(node: Node, program: Program, process: str, address: int | None) -> None:
    fault = {"kind": "flip", "process": process} | ({} if address is None else {"address": address})
    node.client.post(f"/v1/jobs/{program.job}/faults:inject", fault)


def difference(node: Node, program: Program) -> dict[str, Any]:
    harness.wait_until(lambda: of_ranks(node, program)["differences"], "a difference is found", timeout=60)
    (found,) = of_ranks(node, program)["differences"]
    return dict(found)


def faults(node: Node, program: Program) -> list[dict[str, Any]]:
    return [one for one in node.client.get("/v1/faults", job=program.job) if one["kind"] == "corruption"]


def ends_equal(program: Program, folder: Path) -> None:
    enough(folder)
    lines = lines_of(program, timeout=60)
    assert all(EQUAL in line for line in lines), lines


def found_nothing(node: Node, program: Program) -> None:
    assert of_ranks(node, program)["differences"] == []
    assert faults(node, program) == []


@pytest.mark.parametrize("which", [PARAMETERS, CONSTANTS])
def test_a_flipped_bit(node: Node, tmp_path: Path, which: int) -> None:
    """In what changes with each step, and in what never does: it is known where, and the job goes on."""
    program = begin(node, tmp_path)
    are_watched(node, program)
    victim = of_rank(node, program, tmp_path, 1)
    chunk = memory_of(tmp_path, 1, which)
    flip(node, program, victim["id"], chunk + CHUNK - 8)
    found = difference(node, program)
    (suspect,) = found["suspects"]
    assert (suspect["rank"], suspect["process_id"]) == (1, victim["id"])
    assert (found["addresses"], found["chunks"], found["equal"], found["policy"]) == ([chunk], 1, [0, 2], "report")
    (fault,) = faults(node, program)
    assert fault["process_id"] == victim["id"]
    assert f"silent corruption in rank 1: the chunk of 2 MiB at {chunk:#x}" in fault["text"]
    assert fault["text"] in "\n".join(map(str, program.lines()))
    compare_again(node, program, 4)
    assert len(of_ranks(node, program)["differences"]) == 1, "it is found once"
    enough(tmp_path)
    wrong = [EQUAL not in line for line in sorted(lines_of(program, timeout=60))]
    assert wrong == [False, which == PARAMETERS, False]


def test_one_of_two(node: Node, tmp_path: Path) -> None:
    program = begin(node, tmp_path, 2)
    are_watched(node, program, WATCHED - 1)
    victim = of_rank(node, program, tmp_path, 1)
    chunk = memory_of(tmp_path, 1, PARAMETERS) + 3 * CHUNK
    flip(node, program, victim["id"], chunk + CHUNK - 8)
    found = difference(node, program)
    assert [one["rank"] for one in found["suspects"]] == [0, 1]
    assert (found["addresses"], found["equal"]) == ([chunk], [])
    assert {one["process_id"] for one in faults(node, program)} == {one["process_id"] for one in found["suspects"]}
    enough(tmp_path)
    lines_of(program, timeout=60)


def test_where_it_is_flipped_is_chosen(node: Node, tmp_path: Path) -> None:
    """For drills: memory that is compared."""
    program = begin(node, tmp_path)
    harness.wait_until(lambda: (tmp_path / "began.1").exists(), "it has begun")
    victim = of_rank(node, program, tmp_path, 1)
    with pytest.raises(XmigError, match="no memory of the process is compared"):
        flip(node, program, victim["id"], None)
    are_watched(node, program)
    with pytest.raises(XmigError, match="a bit is flipped at a record"):
        node.client.post(f"/v1/jobs/{program.job}/faults:inject", {"kind": "flip", "point": "kernel", "address": 1})
    flip(node, program, victim["id"], None)
    harness.wait_until(lambda: "an armed fault is injected" in node.log.read_text(), "it is flipped")
    ends_or_differs(program, tmp_path)


def ends_or_differs(program: Program, folder: Path) -> None:
    """The step after may write over it."""
    enough(folder)
    assert len(lines_of(program, timeout=60)) == RANKS


def test_memory_of_its_own(node: Node, tmp_path: Path) -> None:
    """Nobody knows what it should be. Nor is there anything at an address that the program has not."""
    program = begin(node, tmp_path)
    are_watched(node, program)
    victim = of_rank(node, program, tmp_path, 1)
    for address in (memory_of(tmp_path, 1, OWN) + 5, memory_of(tmp_path, 1, OWN) + (1 << 30), 5):
        flip(node, program, victim["id"], address)
    compare_again(node, program, 5)
    found_nothing(node, program)
    ends_equal(program, tmp_path)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("does", ["work", "again", "alone", "apart"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_what_programs_do_on_purpose(node: Node, tmp_path: Path, does: str, ranks: int) -> None:
    program = begin(node, tmp_path, ranks, does=does)
    are_watched(node, program, WATCHED if ranks > 2 else WATCHED - 1)
    (tmp_path / "now").touch()
    harness.wait_until(lambda: all((tmp_path / f"done.{one}").exists() for one in range(ranks)), "it is done")
    compare_again(node, program, 8)
    found_nothing(node, program)
    ends_equal(program, tmp_path)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(3))
def test_what_happens_to_servers(node: Node, tmp_path: Path, seed: int) -> None:
    """Kills, moves, and the loss of a daemon: all that changes is who has the memory."""
    chance = random.Random(seed)
    program = begin(node, tmp_path)
    are_watched(node, program)
    for _ in range(4):
        victim = of_rank(node, program, tmp_path, chance.randrange(RANKS))
        if chance.random() < 0.5:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim["server_pid"], signal.SIGKILL)
        else:
            target = {"device": f"cpu:{RANKS}" if victim["device"] != f"cpu:{RANKS}" else "cpu:0"}
            with contextlib.suppress(XmigError):
                node.client.post(f"/v1/processes/{victim['id']}:migrate", target)
        compare_again(node, program, 2)
    found_nothing(node, program)
    node.kill()
    node.start()
    harness.found_again(node)
    are_watched(node, program)  # which the next daemon learns anew
    found_nothing(node, program)
    ends_equal(program, tmp_path)


def test_after_a_recovery(node: Node, tmp_path: Path) -> None:
    """What was learnt before it counts."""
    program = begin(node, tmp_path)
    are_watched(node, program)
    os.kill(of_rank(node, program, tmp_path, 2)["server_pid"], signal.SIGKILL)
    harness.wait_until(lambda: of_rank(node, program, tmp_path, 2)["recoveries"] == 1, "it is recovered")
    compare_again(node, program, 1)
    assert of_ranks(node, program)["comparison"]["watched"] == WATCHED
    flip(node, program, of_rank(node, program, tmp_path, 0)["id"], memory_of(tmp_path, 0, PARAMETERS) + CHUNK - 8)
    assert [one["rank"] for one in difference(node, program)["suspects"]] == [0]
    enough(tmp_path)
    lines_of(program, timeout=60)


def test_the_job_is_stopped(node: Node, tmp_path: Path) -> None:
    program = begin(node, tmp_path, replica_policy="stop")
    are_watched(node, program)
    flip(node, program, of_rank(node, program, tmp_path, 1)["id"], memory_of(tmp_path, 1, PARAMETERS) + CHUNK - 8)
    program.process.communicate(timeout=60)
    assert program.process.returncode != 0
    harness.wait_until(lambda: node.client.get(f"/v1/jobs/{program.job}")["state"] == "stopped", "it is stopped")
    lines = "\n".join(map(str, program.lines()))
    assert "the job is ended, as its replica policy says: silent corruption in rank 1" in lines
    assert "the last group snapshot is round" in lines


@pytest.mark.parametrize("which", [PARAMETERS, CONSTANTS])
def test_it_is_restored_from_the_majority(node: Node, tmp_path: Path, which: int) -> None:
    """Whatever the flipped bit was in has what the others hold, again and again, and all go on."""
    program = begin(node, tmp_path, replica_policy="restore")
    for count in range(1, 3):
        are_watched(node, program)
        victim = of_rank(node, program, tmp_path, count)
        flip(node, program, victim["id"], memory_of(tmp_path, count, which) + CHUNK - 8)
        harness.wait_until(lambda: restored(program) == count, "it is restored", timeout=60)  # noqa: B023
        are_running_again(node, program, tmp_path, count)
        compare_again(node, program, CHANGES + 2 if which == PARAMETERS else CONSTANT + 2)  # the rank is watched again
    assert [one["suspects"][0]["rank"] for one in of_ranks(node, program)["differences"]] == [2, 1]
    ends_equal(program, tmp_path)


def test_what_others_have_is_wrong(node: Node, tmp_path: Path) -> None:
    """Their shadows, and nobody knows before it is hashed: the rank goes on with what it had, and so do all."""
    program = begin(node, tmp_path, replica_policy="restore")
    are_watched(node, program)
    for rank in (0, 2):
        overwrite(of_rank(node, program, tmp_path, rank)["server_pid"])
    compare_again(node, program, 3)  # what has changed since is in the shadows again: all but the constants
    victim = of_rank(node, program, tmp_path, 1)
    flip(node, program, victim["id"], memory_of(tmp_path, 1, CONSTANTS) + CHUNK - 8)
    none = "0 of 1 chunks that differed from other ranks were replaced"
    harness.wait_until(lambda: none in "\n".join(program.lines("server")), "nobody has it")
    are_running_again(node, program, tmp_path, 1)
    compare_again(node, program, 2)
    ends_equal(program, tmp_path)


def restored(program: Program) -> int:
    return sum("1 of 1 chunks that differed from other ranks were replaced" in line for line in program.lines("server"))


def are_running_again(node: Node, program: Program, folder: Path, recoveries: int) -> None:
    def all_are() -> bool:
        ranks = [of_rank(node, program, folder, rank) for rank in range(RANKS)]
        return all(one["state"] == "running" and one["recoveries"] >= recoveries for one in ranks)

    harness.wait_until(all_are, "all run again")


def test_servers_are_killed_while_it_is_restored(node: Node, tmp_path: Path) -> None:
    """Each next one does it again."""
    program = begin(node, tmp_path, replica_policy="restore")
    are_watched(node, program)
    victim = of_rank(node, program, tmp_path, 1)
    fault = {"kind": "kill", "point": "replay", "process": victim["id"]}
    flip(node, program, victim["id"], memory_of(tmp_path, 1, PARAMETERS) + CHUNK - 8)
    harness.wait_until(lambda: of_ranks(node, program)["differences"], "it is found", timeout=60)
    with contextlib.suppress(XmigError):  # it may be over
        node.client.post(f"/v1/jobs/{program.job}/faults:inject", fault)
    are_running_again(node, program, tmp_path, 1)
    are_watched(node, program)
    found = of_ranks(node, program)["differences"]
    assert all(one["suspects"][0]["rank"] == 1 for one in found)
    ends_equal(program, tmp_path)


def test_ranks_are_not_compared(native_dir: Path, tmp_path: Path) -> None:
    with harness.own_node(native_dir, port=-1, replica_check=0) as node:
        program = begin(node, tmp_path, 2)

        def same_places() -> int:
            return sum(one["same_place"] is True for one in of_ranks(node, program)["snapshots"])

        harness.wait_until(lambda: same_places() >= 3, "rounds")
        assert of_ranks(node, program)["comparison"] is None
        ends_equal(program, tmp_path)
