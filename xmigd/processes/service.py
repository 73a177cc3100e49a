"""Processes, as callers see and control them: what the database knows, and what only the supervisor does."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any

from xmigd.database.reader import Reader
from xmigd.database.rows import columns
from xmigd.errors import NotFound
from xmigd.processes import repository
from xmigd.processes.schemas import ProcessInfo, SegmentInfo
from xmigd.security.callers import Caller
from xmigd.store import catalogue
from xmigd.supervisor.process import Process
from xmigd.supervisor.supervisor import Supervisor


class Processes:
    def __init__(self, supervisor: Supervisor, reader: Reader) -> None:
        self._supervisor = supervisor
        self._reader = reader

    def rows(self, **conditions: Any) -> list[dict[str, Any]]:
        """What the database knows."""
        with self._reader.session() as session:
            return repository.page(session, **conditions)

    def infos(self, rows: list[dict[str, Any]]) -> list[ProcessInfo]:
        return [self._info(row) for row in rows]

    async def find(self, process: str, caller: Caller) -> ProcessInfo:
        """Raises NotFound."""
        found = self.infos(await asyncio.to_thread(partial(self.rows, owner=caller.owner, process_id=process)))
        if not found:
            raise NotFound(f"there is no process {process!r}", hint="xmigctl ps lists them")
        return found[0]

    def controlled(self, caller: Caller, process: str) -> Process:
        """One that runs, and that the caller may act on. Raises NotFound."""
        found = self._supervisor.processes.get(process)
        if found is None or not caller.sees(found.job.uid):
            raise NotFound(f"there is no running process {process[:64]!r}", hint="xmigctl ps lists them")
        return found

    def of_job(self, caller: Caller, job: str) -> list[Process]:
        """Those of a job that run, all of which the caller may act on. Raises NotFound: there are none."""
        found = [one for one in self._supervisor.processes_of(job) if caller.sees(one.job.uid)]
        if not found:
            raise NotFound(f"job {job[:64]!r} has no running process", hint="xmigctl ps lists them")
        return found

    def segments(self, process: str, caller: Caller, limit: int) -> list[SegmentInfo]:
        """Raises NotFound."""
        with self._reader.session() as session:
            if not repository.page(session, process_id=process, owner=caller.owner):
                raise NotFound(f"there is no process {process!r}", hint="xmigctl ps lists them")
            kept = catalogue.of_process(session, process)
            rows = repository.segments(session, process, limit)
            return [SegmentInfo.model_validate(columns(row) | kept.get(row.number, {})) for row in rows]

    async def check_seen(self, process: str, caller: Caller) -> None:
        """Raises NotFound, Forbidden."""
        live = self._supervisor.processes.get(process)
        if live is not None:
            caller.check_sees(live.job.uid, "process", process, hint="xmigctl ps --all lists them")
        elif not await asyncio.to_thread(self._is_known, process, caller.owner):
            raise NotFound(f"there is no process {process!r}", hint="xmigctl ps --all lists them")

    def _is_known(self, process: str, owner: int | None) -> bool:
        with self._reader.session() as session:
            return bool(repository.page(session, process_id=process, owner=owner))

    def _info(self, row: dict[str, Any]) -> ProcessInfo:
        """What the database knows, and what only the supervisor does."""
        info = ProcessInfo.model_validate(row)
        info.protected = not info.unprotected
        live = self._supervisor.processes.get(info.id)
        if live is None:
            return info
        info.state = live.state
        info.server_pid = live.server_pid
        info.generation = live.generation
        info.standby = live.standby_state
        info.standby_preloaded = live.standby_preloaded
        info.standby_communicators = live.standby_communicators
        info.communicator_bytes = live.communicator_bytes
        info.replica_copy_bytes = None if live.copies is None else live.copies.bytes
        info.survives_device_loss = live.survives_device_loss
        info.device_loss_why = live.device_loss_why
        if (copy := live.neighbour_copy) is not None:
            info.neighbour, info.neighbour_why = copy.node, copy.why
            info.neighbour_copy_bytes, info.neighbour_behind_bytes = copy.bytes, copy.behind_bytes
            info.neighbour_sent_bytes = copy.sent_bytes
        info.device, info.location, info.suspended = live.row.device, live.location, live.state == "suspended"
        info.held_bytes = sum(handle.size for handle in live.handles.values())
        info.shadow_bytes = live.shadow_bytes
        info.server_bytes = live.device_bytes
        if (stall := live.stall()) is not None:
            info.expected_stall_ms = stall.expected(time.monotonic_ns()) / 1e6
            info.stall_bound_ms, info.snapshots_ms = stall.bound / 1e6, stall.spent / 1e6
        if live.last_snapshot is not None:
            info.snapshots, info.live_bytes = live.last_snapshot.number, live.last_snapshot.live_bytes
        return info
