"""Ranks whose servers are lost go on together, and nothing of it is seen in what they compute."""

from __future__ import annotations

from tests.collectives.conftest import Launch, lines_of


def test_undisturbed(launch: Launch) -> None:
    assert lines_of(launch("steps", 4, 120)) == [f"{rank}: done" for rank in range(4)]
