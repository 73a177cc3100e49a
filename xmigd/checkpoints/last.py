"""The last checkpoint: of a process that no recovery brings further, before it is lost.

A server has restored the last snapshot and stands before its replay; the program waits for it. What the snapshot holds
is copied, and the program is dumped as it waits. A job that is restored from that repeats the same replay, on another
device if that was the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from xmigd.checkpoints import live
from xmigd.checkpoints.content import Writing
from xmigd.checkpoints.making import Making, Report, of_the_store
from xmigd.checkpoints.manifest import Program
from xmigd.operations.operation import Operation


class MakingLast(Making):
    """Its server stands at its last snapshot, and goes on never."""

    last = True

    async def _stand_still(
        self, operation: Operation, writing: Writing, images: Path, held: list[live.Held], report: Callable[[], Report]
    ) -> list[Program]:
        (process,) = self.processes
        with of_the_store("it cannot be held"):
            held.append(live.hold(process, suspended=False))
        copying = process.copying.begin(process.held_snapshot, report(), beside=self.dump_bytes)
        try:
            found = await self._dump(operation, images)
            operation.progress("copying")
            copy = await copying
            held[0].add(copy)
            self.took["copy_ms"] = copy.ms
            self.copied_bytes = copy.bytes
        finally:
            copying.cancel()
        return found
