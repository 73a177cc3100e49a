"""The expected downtime of a plan: from what, and what of it is assumed."""

from __future__ import annotations

import pytest

from xmigd.migrations.estimate import ASSUMED, MoveSeen, SnapshotSeen, downtime

MIB = 1 << 20
SNAPSHOTS = [SnapshotSeen(10 * MIB, 2.0), SnapshotSeen(20 * MIB, 4.0), SnapshotSeen(900 * MIB, 90.0)]


def test_nothing_is_known_before_the_first_snapshot() -> None:
    assert downtime("cpu", [], [MoveSeen(10.0, MIB, 1e9)]) is None


def test_devices_of_which_nothing_is_known() -> None:
    assert downtime("null", SNAPSHOTS, []) is None


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_without_earlier_moves_it_is_assumed(kind: str) -> None:
    found = downtime(kind, SNAPSHOTS, [])
    assert found is not None
    rate, beside = ASSUMED[kind]
    assert found.ms == pytest.approx(4.0 + beside + 20 * MIB / rate * 1e3)
    assert "assumed" in found.basis


def test_earlier_moves_say_how_fast_and_what_it_costs_beside() -> None:
    """At 1 MiB per millisecond. What is left of a downtime is never less than nothing."""
    moves = [MoveSeen(ms, copied * MIB, MIB * 1e3) for ms, copied in ((15.0, 10), (25.0, 20), (1.0, 20))]
    found = downtime("cpu", SNAPSHOTS, moves)
    assert found is not None
    assert found.ms == pytest.approx(5.0 + 20.0)
    assert "20.0 MiB" in found.basis
    assert "3 earlier" in found.basis
