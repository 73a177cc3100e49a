"""Collectives of unmodified programs, undisturbed: right to the last bit."""

from __future__ import annotations

import pytest

from tests.collectives.conftest import Launch, lines_of


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_type_and_operator(launch: Launch, ranks: int) -> None:
    """In the order of the ranks, each step rounded to the type."""
    lines = lines_of(launch("sums", ranks))
    checks = [int(line.split()[1]) for line in lines]
    assert len(checks) == ranks
    assert min(checks) >= 1000


def test_one_process_with_two_devices(launch: Launch) -> None:
    assert lines_of(launch("devices", 1, device="cpu:0,1")) == ["0: done"]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_moves_groups_and_parts(launch: Launch, ranks: int) -> None:
    assert lines_of(launch("moves", ranks)) == [f"{rank}: done" for rank in range(ranks)]
