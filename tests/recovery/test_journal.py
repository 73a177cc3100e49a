"""What does not fit the journal."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import harness
from tests.forked import Node
from tests.recovery.conftest import PROGRAMS

JOURNAL = 4  # MiB, the smallest there is


@pytest.fixture
def small_journal(native_dir: Path) -> Iterator[Node]:
    with (
        tempfile.TemporaryDirectory(prefix="xmig-") as folder,
        Node(Path(folder), native_dir=native_dir, device_memory=1 << 30, journal_mib=JOURNAL) as node,
    ):
        yield node


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("never_synchronises", 60_000),  # some 8 MiB of records in one step, without a wait
        ("large_copies", 3 * JOURNAL),
    ],
)
def test_more_than_the_journal_holds(small_journal: Node, kernels: Path, name: str, argument: int) -> None:
    path = PROGRAMS / f"{name}.py"
    expected = harness.run(small_journal, path, argument, kernels=kernels)
    program = harness.start(small_journal, path, argument, kernels=kernels)
    for sequence in (5, 13, 25, 500, 5_000, 40_000, 59_000):
        program.inject("kill", sequence=sequence)
    harness.go(program)
    assert harness.output(program) == expected
    program.until("ended")
    recoveries = program.recoveries()
    assert len(recoveries) >= 2
    assert all(r["exact"] for r in recoveries if r["outcome"] == "resumed")
