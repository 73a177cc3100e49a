"""What a lossy checkpoint says of itself (docs/decisions/0096): the numbers that are not as the programs had them, how
much they differ at most, and what their pieces take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from xmigd.checkpoints.content import Writing
from xmigd.checkpoints.manifest import Lossy, Memory, Rounded
from xmigd.errors import Conflict
from xmigd.ipc import messages as m
from xmigd.supervisor.copying import SnapshotCopy


def check_named(copies: Iterable[SnapshotCopy]) -> None:
    """Raises Conflict: there is nothing that may be rounded, so it would be exact although nobody wants that."""
    if not any(copy.rounded for copy in copies):
        raise Conflict(
            "no program of the job has named optimizer state: nothing of it may be rounded", code="nothing_named",
            hint="start it with xmigctl run --lossy-optimizer-state, and wait for its first step; or make an exact one",
        )  # fmt: skip


def described(keep_bits: int, copies: Sequence[tuple[SnapshotCopy, Sequence[Memory]]], writing: Writing) -> Lossy:
    """`copies`: with what is stored of each, which ends with its slabs. After `sync`. Raises OSError."""
    pieces: dict[str, int] = {}
    for copy, memory in copies:
        for (slab, _), stored in zip(copy.slabs, memory[len(memory) - len(copy.slabs) :], strict=True):
            if slab.rounded:
                pieces |= {chunk.hash: chunk.bytes for chunk in stored.content.chunks}
    return Lossy(
        keep_bits=keep_bits, rounded=_by_type(one for copy, _ in copies for one in copy.rounded),
        piece_bytes=sum(pieces.values()), stored_bytes=writing.bytes_on_disk(pieces),
    )  # fmt: skip


def _by_type(numbers: Iterable[m.RoundedNumbers]) -> tuple[Rounded, ...]:
    by_type: dict[str, list[m.RoundedNumbers]] = {}
    for one in numbers:
        by_type.setdefault(one.type, []).append(one)
    return tuple(
        Rounded(
            type=all[0].type, ranges=sum(one.ranges for one in all), bytes=sum(one.bytes for one in all),
            changed=sum(one.changed for one in all), largest_relative=max(one.largest_relative for one in all),
            largest_absolute=max(one.largest_absolute for one in all),
        )
        for _, all in sorted(by_type.items())
    )  # fmt: skip
