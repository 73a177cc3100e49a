"""A standby has the memory of its process mapped before it is needed."""

from __future__ import annotations

import re
from pathlib import Path

from tests import harness
from tests.recovery.conftest import Starter
from tests.recovery.test_descriptors import wait_for_standby
from xmigd.demo.node import Node, Program

END = 0x204000000000  # of the first device (shim/journal/layout.h)
MAPPED = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-s ([0-9a-f]+) \S+ (\d+) +/memfd:xmig-device-memory-of-cpu:0")


def mapped(pid: int) -> set[tuple[str, ...]]:
    """Device memory that a process has mapped: from, to, where in the file, the file."""
    return set(MAPPED.findall(Path(f"/proc/{pid}/maps").read_text()))


def programs(memory: set[tuple[str, ...]]) -> int:
    """How many pieces of it are the program's, and not copies of snapshots."""
    return sum(int(start, 16) < END for start, *_ in memory)


def settled(node: Node, program: Program) -> set[tuple[str, ...]]:
    """What its server has mapped, once its standby has the same."""
    server = program.until("running")["server_pid"]
    harness.wait_until(lambda: len(harness.server_pids(node)) == 2, "a server that was killed is gone")
    (standby,) = set(harness.server_pids(node)) - {server}
    harness.wait_until(lambda: mapped(standby) == mapped(server), "the standby has mapped what the server has")
    return mapped(server)


def test_a_standby_maps_what_its_process_has(start: Starter, daemon: Node) -> None:
    program, native = start("breathing"), {}
    harness.go(program)
    for count in (2, 12, 1):
        native[count] = harness.steps(program, count)
    wait_for_standby(program)
    # What the program gives back goes with a snapshot; then nobody has it any more.
    harness.wait_until(lambda: programs(settled(daemon, program)) < 10, "memory that was given back is gone")

    assert harness.steps(program, 12) == native[12]
    assert programs(settled(daemon, program)) >= 12
    first = harness.kill_server(program)
    assert harness.steps(program, 12) == native[12]
    wait_for_standby(program, after=first or 0)
    settled(daemon, program)

    assert harness.steps(program, 1) == native[1]
    harness.wait_until(lambda: programs(settled(daemon, program)) < 10, "memory that was given back is gone")
    second = harness.kill_server(program)
    for count in (1, 12, 2):
        assert harness.steps(program, count) == native[count]
    assert second not in (None, first)
    program.until("running")  # it has its answers before the daemon has heard that the recovery is over
    assert [(r["outcome"], r["exact"], r["standby"]) for r in program.recoveries()] == [("resumed", True, "warm")] * 2
