"""How long a program stands still if it is moved: what its snapshots find changed, at the speed of earlier moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

# Where nothing was moved yet, by kind of device: bytes per second, and milliseconds beside copying and the snapshot.
# cuda: 394 GB/s is NVLink between two H200s; 80 ms are `mapped` and `restored` of docs/measurements/gpu.md (11 GB).
# cpu: docs/measurements/journal.md, a large copy.
ASSUMED = {"cuda": (394e9, 80.0), "cpu": (4.9e9, 0.0)}


@dataclass(frozen=True, slots=True)
class SnapshotSeen:
    copied_bytes: int
    ms: float


@dataclass(frozen=True, slots=True)
class MoveSeen:
    """One that came to its end, between devices of the same kind."""

    downtime_ms: float
    last_copied_bytes: int  # by its last round
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Estimate:
    ms: float
    basis: str


def downtime(kind: str, snapshots: Sequence[SnapshotSeen], moves: Sequence[MoveSeen]) -> Estimate | None:
    """None: it has taken no snapshot yet, or nothing is known of such devices."""
    if not snapshots or (not moves and kind not in ASSUMED):
        return None
    changed = median(snapshot.copied_bytes for snapshot in snapshots)
    what = f"{changed / (1 << 20):.1f} MiB that a snapshot finds changed (of {len(snapshots)})"
    if moves:
        rate = median(move.bytes_per_s for move in moves)
        beside = median(max(0.0, move.downtime_ms - _ms(move.last_copied_bytes, move.bytes_per_s)) for move in moves)
        return Estimate(
            beside + _ms(changed, rate),
            f"{what}; {rate / 1e9:.2f} GB/s and {beside:.1f} ms beside copying, of {len(moves)} earlier move(s)",
        )
    rate, beside = ASSUMED[kind]
    snapshot_ms = median(snapshot.ms for snapshot in snapshots)
    return Estimate(
        snapshot_ms + beside + _ms(changed, rate),
        f"{what}, in {snapshot_ms:.1f} ms; {rate / 1e9:.2f} GB/s and {beside:.1f} ms beside copying are assumed: "
        "nothing was moved yet",
    )


def _ms(count: float, rate: float) -> float:
    return count / rate * 1e3
