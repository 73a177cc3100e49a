"""Rotation: best-effort jobs that do not fit into a device together take turns on it, and wait in host memory.

Only jobs take part that are best-effort and have a memory quota: what they need is known, and nobody waits for them. A
job has its device for `slice` seconds at least. Then, while another waits that was suspended for it or for others, the
one that has had it longest goes, and the one that has waited longest comes. A job that asks for room at its start is
given it in the same way; one of a higher class does not wait for the slice.

Each suspension and resumption is an operation, which has its times, and an event.

Invariants:
  A job is suspended here only where that makes room for another one that fits then.
  A job that its user, a scheduler or a preemption has suspended is not resumed here, and one that was resumed by
  somebody else waits no longer. A suspension or a preemption of one that waits here keeps it suspended, also while it
  is about to come.
  Who has waited longest, and could come if all slices were over, is not overtaken: nobody else comes to that device.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping

from xmigd import log
from xmigd.devices.inventory import held_bytes
from xmigd.errors import XmigError
from xmigd.events.bus import Bus
from xmigd.jobs.admission import Admission
from xmigd.migrations.service import OPERATION, PREEMPTION, Moves
from xmigd.operations.service import Operations
from xmigd.records import PRIORITIES, JobRow
from xmigd.supervisor.process import Process
from xmigd.supervisor.supervisor import Supervisor

logger = log.get("sharing")

LOOK_EVERY = 0.5  # seconds
REQUESTOR = "rotation"  # of its operations
LOOKED_AT = 200  # operations, after a start
LEAVES_OR_COMES = (OPERATION["suspend"], OPERATION["resume"], PREEMPTION)  # operations of a job


class Rotation:
    """Lives in the event loop's thread."""

    def __init__(
        self, *, supervisor: Supervisor, moves: Moves, operations: Operations, admission: Admission, bus: Bus,
        slice: float,
    ) -> None:  # fmt: skip
        """`slice`: seconds that a job has its device at least; 0: there is no rotation."""
        self._supervisor = supervisor
        self._moves = moves
        self._operations = operations
        self._admission = admission
        self._bus = bus
        self._slice = slice
        self._runs_since: dict[str, float] = {}  # jobs of the rotation, CLOCK_MONOTONIC
        self._waits_since: dict[str, float] = {}  # those that were suspended here
        self._swapping = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        moves.turns = self

    async def start(self) -> None:
        if self._slice:
            await self._remember()
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def waits(self, job: str) -> float | None:
        """Seconds since its suspension for another one began; None: it does not wait, or still runs."""
        since, process = self._waits_since.get(job), self._process(job)
        if since is None or process is None or process.state != "suspended":
            return None
        return time.monotonic() - since

    def leave(self, job: str) -> None:
        """Somebody wants it to be suspended: it waits no longer, and gets no turn until it is resumed."""
        self._waits_since.pop(job, None)

    async def make_room(self, job: JobRow, device: str, admit: Callable[[], Awaitable[str]]) -> str:
        """On this device, for a job that reserves memory and does not fit. What `admit` says; nobody who waits takes
        the room before. Raises what `admit` does."""
        if not self._slice or "," in device:
            return await admit()
        async with self._swapping:
            self._look(time.monotonic())
            try:
                await self._free(device, job.reserved_bytes or 0, job)
            except XmigError as error:
                logger.warning("no room could be made", job=job.id[:12], why=error.message)
            return await admit()

    # --- turns --------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            try:
                async with self._swapping:
                    await self._turn()
            except XmigError as error:
                logger.warning("a swap has failed", why=error.message)
            except Exception:
                logger.exception("jobs cannot take turns")
            await asyncio.sleep(LOOK_EVERY)

    async def _turn(self) -> None:
        """One that waits comes, if it can."""
        self._look(time.monotonic())
        kept = set(self._supervisor.cordoned)  # devices that nobody comes to now
        for name in sorted(self._waits_since, key=lambda each: self._waits_since[each]):
            process = self._process(name)
            if process is None or process.state != "suspended" or process.row.device in kept:
                continue
            if not await asyncio.to_thread(self._is_ours, name):
                self._waits_since.pop(name, None)  # or it has left meanwhile
                continue
            device, quota = process.row.device, process.job.memory_quota or 0
            if await self._free(device, quota, process.job) and name in self._waits_since:
                # Nothing has waited since: nobody else has been given this room.
                with self._admission.coming(name, device, quota):
                    await self._swap("resume", name, device)
                return
            if await self._going(device, quota, process.job, soon=True) is not None:
                kept.add(device)

    def _is_ours(self, job: str) -> bool:
        """Was it suspended here, and has nobody requested anything else since? None is left of those long ago."""
        found = (self._operations.find(job=job, kind=kind, state="succeeded", limit=1) for kind in LEAVES_OR_COMES)
        last = max((row for rows in found for row in rows), key=lambda row: row.ended_at or 0.0, default=None)
        return last is None or (last.kind, last.requestor) == (OPERATION["suspend"], REQUESTOR)

    async def _free(self, device: str, bytes: int, for_whom: JobRow) -> bool:
        """Suspend as few as are necessary. False: that would not make room, and nothing was done."""
        going = await self._going(device, bytes, for_whom)
        if going is None:
            return False
        for name in going:
            await self._swap("suspend", name, device)
        return (await self._admission.room()).get(device, 0) >= bytes

    async def _going(self, device: str, bytes: int, for_whom: JobRow, *, soon: bool = False) -> list[str] | None:
        """Who would go for that; None: it would not make room. `soon`: also those whose slice is not over."""
        room = (await self._admission.room()).get(device, 0)
        going: list[str] = []
        for name in self._candidates(device, for_whom, soon=soon):
            if room >= bytes:
                break
            process = self._process(name)
            assert process is not None
            # What is reserved for it is free, too, when it has gone.
            room += max(process.job.reserved_bytes or 0, held_bytes([process]).get(device, 0))
            going.append(name)
        return going if room >= bytes else None

    def _candidates(self, device: str, for_whom: JobRow, *, soon: bool) -> list[str]:
        """Those that may go, the one that has run longest first."""
        at, found = time.monotonic(), []
        above = soon or PRIORITIES.index(for_whom.priority) < PRIORITIES.index("best-effort")
        for name, since in sorted(self._runs_since.items(), key=lambda each: each[1]):
            process = self._process(name)
            ready = process is not None and process.row.device == device and process.state == "running"
            if ready and name != for_whom.id and (above or at - since >= self._slice):
                found.append(name)
        return found

    def _look(self, at: float) -> None:
        """Which jobs take part now."""
        now: dict[str, Process] = {}
        for process in list(self._supervisor.processes.values()):
            job = process.job
            # Several processes are suspended as one only if they communicate; others keep their device.
            alone = len(self._supervisor.processes_of(job.id)) == 1 and "," not in process.row.device
            alone = alone and job.nodes is None  # nor those that communicate with other nodes
            if job.priority == "best-effort" and job.memory_quota is not None and alone:
                now[job.id] = process
        running = {name for name, process in now.items() if process.state != "suspended"}
        self._runs_since = {name: self._runs_since.get(name, at) for name in running}
        self._waits_since = {name: since for name, since in self._waits_since.items() if name in now.keys() - running}

    def _process(self, job: str) -> Process | None:
        found = self._supervisor.processes_of(job)
        return found[0] if len(found) == 1 else None

    async def _swap(self, how: str, job: str, device: str) -> None:
        """Raises XmigError: it has not succeeded."""
        processes = self._supervisor.processes_of(job)
        if not processes:
            return
        try:
            if how == "suspend":
                self._waits_since[job] = time.monotonic()  # before it is suspended: from then on it may `leave`
                begun = await self._moves.suspend_job(processes, "host", requestor=REQUESTOR)
            else:
                begun = await self._moves.resume_job(
                    processes, [device], requestor=REQUESTOR, wanted=lambda: job in self._waits_since
                )
        except XmigError:
            self._swapped(how, job, ok=False)
            raise
        row = await self._operations.ended(begun)
        ok = row.state == "succeeded"
        self._swapped(how, job, ok=ok)
        data = {"how": how, "device": device, "operation": row.id, "succeeded": ok}
        self._bus.publish("job.rotated", "job", job, job, data)
        logger.info("a job takes its turn", job=job[:12], how=how, device=device, succeeded=ok)
        if not ok:
            problem: Mapping[str, object] = row.error or {}
            raise XmigError(f"job {job[:12]} could not be brought to {how}: {problem.get('detail')}")

    def _swapped(self, how: str, job: str, *, ok: bool) -> None:
        """Where that has failed, the others have their turns before it is tried again."""
        at = time.monotonic()
        if (how == "suspend") != ok:
            self._waits_since.pop(job, None)
            self._runs_since[job] = at
            return
        self._runs_since.pop(job, None)
        if job in self._waits_since:  # somebody else may want it to be suspended since
            self._waits_since[job] = at

    async def _remember(self) -> None:
        """Jobs that the last daemon suspended for others wait still."""
        rows = await asyncio.to_thread(
            lambda: self._operations.find(kind=OPERATION["suspend"], state="succeeded", limit=LOOKED_AT)
        )
        seen: set[str] = set()
        for row in rows:  # the newest first
            if row.job_id is not None and row.job_id not in seen:
                seen.add(row.job_id)
                if row.requestor == REQUESTOR:
                    self._waits_since[row.job_id] = time.monotonic() - max(0.0, time.time() - row.created_at)
