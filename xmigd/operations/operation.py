"""An operation while it is being done: what its work sees of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from xmigd.errors import Cancelled, Conflict, ProcessLocation
from xmigd.operations.repository import OperationRow

BETWEEN_SAVES = 0.5  # seconds between two saves of progress within a phase


class Operation:
    """Given to the work. Lives in the event loop's thread."""

    def __init__(self, row: OperationRow, changed: Callable[[Operation, bool], None]) -> None:
        self.row = row
        self.cancelled = asyncio.Event()
        self.ended = asyncio.Event()
        self._changed = changed  # (operation, is it a new phase)
        self._saved_at = 0.0
        self._trailing: asyncio.TimerHandle | None = None

    @property
    def id(self) -> str:
        return self.row.id

    @property
    def request(self) -> dict[str, Any]:
        """What was requested, as it is on the disk."""
        return self.row.request

    def progress(self, phase: str, **fields: Any) -> None:
        """Where the work is. Cheap: published and saved when the phase changes, otherwise at most twice a second. What
        is not known is None, never 0."""
        new_phase = phase != self.row.phase
        progress = fields if new_phase else {**(self.row.progress or {}), **fields}
        self.row = replace(self.row, phase=phase, progress=progress or None)
        wait = self._saved_at + BETWEEN_SAVES - time.monotonic()
        if new_phase or wait <= 0:
            self._save(new_phase)
        elif self._trailing is None:
            self._trailing = asyncio.get_running_loop().call_later(wait, self._save, False)

    def reporter(self) -> Callable[[int], None]:
        """For a thread, within this phase: how many bytes are done."""
        loop, phase = asyncio.get_running_loop(), self.row.phase

        def report(done: int) -> None:
            loop.call_soon_threadsafe(lambda: self.progress(phase, processed_bytes=done))

        return report

    def point_of_no_return(self, why: str) -> None:
        """From here on it cannot be cancelled. Raises Cancelled if somebody was informed already that it is."""
        self.check_cancelled()
        self.row = replace(self.row, may_cancel=False, may_cancel_why=why)
        self._save(True)

    def check_cancelled(self, process_location: ProcessLocation | None = None) -> None:
        """Raises Cancelled if somebody requested it. `process_location`: where the process stays."""
        if self.cancelled.is_set():
            raise Cancelled("it was cancelled", process_location=process_location)

    def cancel(self) -> None:
        """Ask the work to end. Raises Conflict past the point of no return."""
        if not self.row.active:
            raise Conflict(f"the operation has {self.row.state} already", code="operation_over", operation=self.id)
        if not self.row.may_cancel:
            raise Conflict(
                f"the operation cannot be cancelled any more: {self.row.may_cancel_why}", code="too_late_to_cancel",
                hint=f"wait for its end: GET /v1/operations/{self.id}/wait", phase=self.row.phase, operation=self.id,
            )  # fmt: skip
        self.cancelled.set()

    def settle(self, row: OperationRow) -> None:
        """It is over, as `row` says."""
        self.end_trailing()
        self.row = row
        self.ended.set()

    def end_trailing(self) -> None:
        """What was reported and is not saved yet is saved with what comes next."""
        if self._trailing is not None:
            self._trailing.cancel()
            self._trailing = None

    def _save(self, new_phase: bool) -> None:
        self.end_trailing()
        self._saved_at = time.monotonic()
        self._changed(self, new_phase)
