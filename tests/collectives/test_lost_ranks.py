"""What happens to a rank ends in a clear error for all of them: never in wrong data, never in waiting for ever."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.collectives.conftest import Launch, lines_of
from xmigd.demo.node import Node, Program
from xmigd.native import Layout


def processes(node: Node, program: Program) -> list[dict[str, Any]]:
    return list(node.client.get("/v1/processes", job=program.job))


def of_rank(node: Node, program: Program, folder: Path, rank: int) -> dict[str, Any]:
    pid = int((folder / f"pid.{rank}").read_text())
    return next(one for one in processes(node, program) if one["pid"] == pid)


def damaged(node: Node, program: Program, folder: Path, server: int) -> bool:
    """Has the rank's process been given up? Its journal's tail goes before what its server has executed."""
    if of_rank(node, program, folder, 1)["state"] not in ("running", "recovering"):
        return True
    with contextlib.suppress(OSError):
        journals = [fd for fd in Path(f"/proc/{server}/fd").iterdir() if "journal" in str(fd.readlink())]
        for found in journals[:1]:  # a server that has ended has none
            with found.open("r+b", buffering=0) as journal:
                journal.seek(Layout().tail_offset)
                journal.write(bytes(8))
    return False


def logs(program: Program, text: str) -> None:
    """It is in the job's log, or will be soon: the daemon hears of ends one after the other. Whether the daemon reports
    it, or the server has, is chance: the program may have ended before its loss was known."""
    harness.wait_until(lambda: text in "\n".join(program.lines("program", "server", "xmigd")), f"the log has: {text}")


def test_a_rank_that_never_comes(launch: Launch) -> None:
    program = launch("faults", 3, "missing", XMIG_JOIN_TIMEOUT="2")
    assert lines_of(program) == [f"{rank}: not all of 3 ranks came within 2 s; missing: rank 2" for rank in (0, 1)]


def test_ranks_that_call_different_things(launch: Launch) -> None:
    program = launch("faults", 2, "mismatch")
    assert all("failed with" in line for line in lines_of(program))
    logs(program, "calls all-reduce of 4097 elements of type 7, operator 0 (operation 1)")


def test_a_rank_that_does_nothing(launch: Launch) -> None:
    program = launch("faults", 2, "late", XMIG_COLLECTIVE_TIMEOUT="2")
    (line,) = lines_of(program)
    assert line.startswith("0: failed with")
    logs(program, "rank 1 of 2 has done nothing for 2 s in all-reduce of 4096 elements")


def test_a_collective_is_aborted(launch: Launch) -> None:
    assert lines_of(launch("faults", 2, "abort")) == ["0: went on", "1: went on"]


def test_a_rank_that_ends_first(launch: Launch) -> None:
    assert lines_of(launch("faults", 3, "leaves")) == [f"{rank}: went on" for rank in range(3)]


def test_a_rank_that_cannot_be_recovered_ends_the_job(node: Node, launch: Launch, tmp_path: Path) -> None:
    """Its journal is garbage: nobody computes on without it, and each log says whose loss it was."""
    program = launch("faults", 3, "kill")
    harness.wait_until(lambda: all((tmp_path / f"began.{each}").exists() for each in range(3)), "all have begun")
    victim = of_rank(node, program, tmp_path, 1)
    # Its client writes there, too.
    harness.wait_until(lambda: damaged(node, program, tmp_path, victim["server_pid"]), "the server has seen it")
    lines = lines_of(program, timeout=60)
    assert [line.split(":")[0] for line in lines] == ["0", "1", "2"]
    assert all("failed with" in line for line in lines), lines
    logs(program, "does not decode")


def test_a_process_whose_communicators_have_ended(node: Node, launch: Launch, tmp_path: Path) -> None:
    program = launch("faults", 2, "ended")
    harness.wait_until(lambda: all((tmp_path / f"alone.{each}").exists() for each in range(2)), "the sums are there")
    before = of_rank(node, program, tmp_path, 0)["snapshots"]
    harness.wait_until(
        lambda: of_rank(node, program, tmp_path, 0)["snapshots"] > before + 1, "a snapshot without communicators"
    )
    os.kill(of_rank(node, program, tmp_path, 0)["server_pid"], signal.SIGKILL)
    (tmp_path / "killed").touch()
    assert lines_of(program) == ["0: went on", "1: went on"]


@pytest.mark.parametrize("lost", ["daemon", "server"])
def test_who_is_lost_while_ranks_meet(node: Node, launch: Launch, tmp_path: Path, lost: str) -> None:
    """Nothing was answered yet: the daemon's successor hears all offers again, a server's makes its own."""
    program = launch("faults", 3, "meets")
    harness.wait_until(lambda: all((tmp_path / f"began.{each}").exists() for each in range(3)), "all have begun")
    time.sleep(1)
    if lost == "daemon":
        node.kill()
        node.start()
        harness.found_again(node)
    else:
        os.kill(of_rank(node, program, tmp_path, 0)["server_pid"], signal.SIGKILL)
        harness.wait_until(lambda: of_rank(node, program, tmp_path, 0)["recoveries"] == 1, "it is recovered")
    (tmp_path / "come").touch()
    assert lines_of(program, timeout=60) == [f"{rank}: went on" for rank in range(3)]
