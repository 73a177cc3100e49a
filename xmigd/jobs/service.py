"""Jobs, as callers make, see and end them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import update
from sqlalchemy.orm import Session

from xmigd.checkpoints import movable
from xmigd.database import models
from xmigd.database.reader import Reader
from xmigd.database.writer import Writer
from xmigd.errors import Forbidden, NotFound
from xmigd.events.bus import Bus
from xmigd.ipc import pidfd as pidfds
from xmigd.ipc.exits import End
from xmigd.jobs import repository
from xmigd.jobs.schemas import (
    InjectRequest,
    JobInfo,
    JobMovable,
    JobRequest,
    LogLineInfo,
    ObstacleInfo,
    ProgramMovable,
)
from xmigd.logs import repository as logs
from xmigd.recording.published import publish_job, publish_job_end
from xmigd.records import JobRow
from xmigd.security.callers import Caller
from xmigd.supervisor.process import Process
from xmigd.supervisor.supervisor import Supervisor
from xmigd.text import harmless

MOST_OBSTACLES = 1000  # in an answer, of one program


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A job, and what its programs need to belong to it."""

    job: JobRow
    created_at: float
    watched: bool
    preload: str
    library_path: str
    environment: dict[str, str]


class Jobs:
    def __init__(
        self, *, supervisor: Supervisor, writer: Writer, reader: Reader, bus: Bus, shims: list[Path],
        names_folder: Path, client_socket: Path,
    ) -> None:  # fmt: skip
        self._supervisor = supervisor
        self._writer = writer
        self._reader = reader
        self._bus = bus
        self._shims = shims
        self._names_folder = names_folder
        self._client_socket = client_socket

    async def make(self, wanted: JobRequest, *, uid: int, runner: tuple[int, int] | None) -> Made:
        """`runner`: the process with which it ends."""
        name = wanted.name or harmless(wanted.command.split(" ", 1)[0].rpartition("/")[2], 255) or "job"
        job, token = self._supervisor.make_job(
            name=name, command=wanted.command, uid=uid, device=wanted.device, visible=wanted.visible_devices,
            hang_timeout=wanted.hang_timeout, replica_policy=wanted.replica_policy, strict=wanted.strict, runner=runner,
            nodes=wanted.nodes,
        )  # fmt: skip
        created_at = time.time()
        await asyncio.wrap_future(
            self._writer.submit("jobs.add", lambda session: repository.add(session, job, created_at))
        )
        self._supervisor.register_job(job)
        publish_job(self._bus, job)
        if runner is not None:
            self._supervisor.runners.watch(job.id, *runner)
        return Made(
            job=job, created_at=created_at, watched=runner is not None and self._supervisor.runners.tells,
            preload=":".join(map(str, self._shims)), library_path=str(self._names_folder),
            environment={
                "XMIG_JOB": f"{job.id}:{token}",
                "XMIG_SOCKET": str(self._client_socket),
                # Triton links what it compiles against libcuda.so.1; without a driver's it would not find one.
                "TRITON_LIBCUDA_PATH": str(self._shims[0].parent),
            },
        )  # fmt: skip

    def page(self, owner: int | None, *, live: bool, before: str | None, limit: int) -> list[dict[str, Any]]:
        with self._reader.session() as session:
            return repository.page(session, owner=owner, live=live, before=before, limit=limit)

    def find(self, job: str, caller: Caller) -> JobInfo:
        """Raises NotFound."""
        with self._reader.session() as session:
            found = repository.page(session, job_id=job, owner=caller.owner)
        if not found:
            raise NotFound(f"there is no job {job!r}", hint="xmigctl ps lists them")
        info = JobInfo.model_validate(found[0])
        now = time.monotonic_ns()
        stalls = [process.stall() for process in self._supervisor.processes_of(job)]
        info.expected_stall_ms = max((each.expected(now) / 1e6 for each in stalls if each is not None), default=None)
        return info

    async def lines(self, job: str, caller: Caller, **which: Any) -> list[LogLineInfo]:
        """Of its log, with what its programs have reported until now. Raises NotFound."""
        self._supervisor.collect_lines(job)

        def read() -> list[LogLineInfo]:
            with self._reader.session() as session:
                if not repository.page(session, job_id=job, owner=caller.owner):
                    raise NotFound(f"there is no job {job!r}", hint="xmigctl ps --all lists them")
                return [LogLineInfo.model_validate(row) for row in logs.page(session, job, **which)]

        return await asyncio.to_thread(read)

    async def movable(self, job: str, caller: Caller) -> JobMovable:
        """What would stop its programs from being dumped, and restored elsewhere. Raises NotFound: there is no such
        job, or none of its programs runs. Raises Forbidden: something of it is another user's, or not readable."""
        await self._check_owner(caller, job)
        rows = [process.row for process in self._supervisor.processes_of(job)]
        live = {row.pid: row.id for row in rows if pidfds.same_process(row.pid, row.start_time)}
        programs = await asyncio.to_thread(_movable, live)
        if not programs:
            raise NotFound(f"job {job[:64]!r} has no running process", hint="xmigctl ps lists them")
        for pid in (pid for program in programs for pid in program.pids):
            # What a program with another user's rights has open is not for its caller, as in /proc.
            if (owner := pidfds.owner(pid)) is not None and not caller.sees(owner):
                raise Forbidden(f"process {pid} of the job runs as another user", hint="ask an operator of this node")
        return JobMovable(
            job=job, programs=programs, dumpable=all(each.dumpable for each in programs),
            movable=all(each.movable for each in programs),
        )  # fmt: skip

    async def stop(self, job: str, caller: Caller) -> int:
        """Returns how many programs were signalled. Raises NotFound, Forbidden."""
        await self._check_owner(caller, job)

        def write(session: Session) -> None:
            session.execute(update(models.Job).where(models.Job.id == job).values(stopped=True))

        await asyncio.wrap_future(self._writer.submit("jobs.stop", write))
        return self._supervisor.stop_job(job, f"{caller.name} stopped the job")

    async def exited(self, job: str, caller: Caller, end: End) -> JobInfo:
        """Raises NotFound, Forbidden."""
        await self._check_owner(caller, job)
        at = time.time()
        await asyncio.wrap_future(
            self._writer.submit("jobs.end", lambda session: repository.end(session, job, end, at))
        )
        publish_job_end(self._bus, job, end)
        return await asyncio.to_thread(self.find, job, caller)

    async def inject(self, job: str, caller: Caller, wanted: InjectRequest) -> list[tuple[Process, int]]:
        """Raises NotFound, Forbidden."""
        await self._check_owner(caller, job)
        return self._supervisor.inject(
            job, point=wanted.point, kind=wanted.kind, sequence=wanted.sequence, error=wanted.error,
            process=wanted.process, address=wanted.address,
        )  # fmt: skip

    async def _check_owner(self, caller: Caller, job: str) -> None:
        def owner() -> int | None:
            with self._reader.session() as session:
                found = repository.find(session, job)
                return None if found is None else found.uid

        uid = await asyncio.to_thread(owner)
        if uid is None:
            raise NotFound(f"there is no job {job!r}", hint="xmigctl ps lists them")
        caller.check_sees(uid, "job", job, hint="xmigctl ps lists them")


def _movable(live: dict[int, str]) -> list[ProgramMovable]:
    """Of these pids, whose processes have these ids."""
    trees = {}
    for pid in live:
        with contextlib.suppress(NotFound):  # it has ended
            trees[pid] = movable.processes_of(pid)
    inner = {pid for root, pids in trees.items() for pid in pids if pid != root}
    programs = []
    for pid in trees.keys() - inner:
        with contextlib.suppress(NotFound):
            found = [ObstacleInfo.model_validate(each) for each in movable.obstacles(pid, movable.as_dumped(pid))]
            stops = {each.stops for each in found}
            programs.append(ProgramMovable(
                process_id=live[pid], pid=pid, pids=trees[pid], dumpable="here" not in stops,
                movable=stops <= {"depends"}, obstacles=found[:MOST_OBSTACLES],
            ))  # fmt: skip
    return sorted(programs, key=lambda each: each.pid)
