"""Jobs, as callers make, see and end them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from sqlalchemy import update
from sqlalchemy.orm import Session

from xmigd.checkpoints import apart, movable
from xmigd.checkpoints.outward import ends, outward
from xmigd.database import models
from xmigd.database.reader import Reader
from xmigd.database.writer import Writer
from xmigd.errors import Conflict, Forbidden, Invalid, NotFound
from xmigd.events.bus import Bus
from xmigd.ipc import pidfd as pidfds
from xmigd.ipc.exits import End
from xmigd.jobs import repository
from xmigd.jobs.admission import Admission
from xmigd.jobs.grants import Grants
from xmigd.jobs.orderings import Cursor, Orderings, parse
from xmigd.jobs.repository import Conditions
from xmigd.jobs.schemas import (
    MOST_LABELS,
    InjectRequest,
    JobChange,
    JobInfo,
    JobMovable,
    JobRequest,
    JobState,
    LogLineInfo,
    ObstacleInfo,
    ProgramMovable,
)
from xmigd.logs import repository as logs
from xmigd.networks.carrier import DEVICE
from xmigd.networks.service import Networks
from xmigd.prediction.features import Subject
from xmigd.prediction.repository import number_of_devices
from xmigd.recording.published import publish_job, publish_job_end
from xmigd.records import JobRow
from xmigd.security.callers import Caller
from xmigd.supervisor.process import Process
from xmigd.supervisor.supervisor import Supervisor
from xmigd.text import harmless

MOST_OBSTACLES = 1000  # in an answer, of one program
MakeRoom = Callable[[JobRow, str, Callable[[], Awaitable[str]]], Awaitable[str]]
Sort = Literal["created", "name", "memory", "state"]
STATES: tuple[str, ...] = get_args(JobState)


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A job, and what its programs need to belong to it."""

    job: JobRow
    created_at: float
    watched: bool
    preload: str
    library_path: str
    environment: dict[str, str]
    defaults: dict[str, str]
    network: str | None


class Jobs:
    def __init__(
        self, *, supervisor: Supervisor, writer: Writer, reader: Reader, bus: Bus, shims: list[Path],
        names_folder: Path, client_socket: Path, admission: Admission, networks: Networks,
        grants: Grants, predicted: Callable[[Subject], Awaitable[int | None]] | None = None,
        make_room: MakeRoom | None = None,
    ) -> None:  # fmt: skip
        """`predicted`: device memory to be reserved for a job that names none; None: nothing is. `make_room`: on a
        device, for a job that does not fit."""
        self._supervisor = supervisor
        self._writer = writer
        self._reader = reader
        self._bus = bus
        self._shims = shims
        self._names_folder = names_folder
        self._client_socket = client_socket
        self._admission = admission
        self._networks = networks
        self._grants = grants
        self._make_room = make_room
        self._predicted = predicted
        self._orderings = Orderings()

    async def make(
        self, wanted: JobRequest, *, uid: int, runner: tuple[int, int] | None, is_operator: bool
    ) -> Made:  # fmt: skip
        """`runner`: the process with which it ends. Raises Conflict: there is no room for what it reserves. Raises
        Forbidden: its user may not have its class. Raises Invalid."""
        self._grants.check(wanted.priority, uid, is_operator=is_operator)
        if wanted.memory_quota is not None and (wanted.reserve_bytes or 0) > wanted.memory_quota:
            raise Invalid("reserve_bytes: it is more than memory_quota, which is all that the job's programs get",
                          hint="reserve at most the quota")  # fmt: skip
        reserved = wanted.memory_quota if wanted.reserve_bytes is None else wanted.reserve_bytes
        name = wanted.name or harmless(wanted.command.split(" ", 1)[0].rpartition("/")[2], 255) or "job"
        job, token = self._supervisor.make_job(
            name=name, command=wanted.command, uid=uid, device=wanted.device, visible=wanted.visible_devices,
            hang_timeout=wanted.hang_timeout, replica_policy=wanted.replica_policy, strict=wanted.strict, runner=runner,
            nodes=wanted.nodes, external_id=wanted.external_id, priority=wanted.priority,
            reserved_bytes=reserved, memory_quota=wanted.memory_quota, sm_share=wanted.sm_share,
            walltime_s=wanted.walltime_s,
        )  # fmt: skip
        is_predicted = job.reserved_bytes is None and self._predicted is not None
        if self._predicted is not None and job.reserved_bytes is None:
            job = replace(job, reserved_bytes=await self._predicted(_subject(job, wanted.labels)))
        if job.reserved_bytes is not None:
            job = replace(job, device=await self._admit(job, is_predicted=is_predicted))
        created_at = time.time()
        try:
            variables, network = await self._network(job, runner) if wanted.network else ({}, None)
            await self._writer.write(
                "jobs.add", lambda session: repository.add(session, job, created_at, wanted.labels)
            )
        except BaseException:
            self._admission.forget(job.id)
            raise
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
                **variables,
            },
            defaults={} if network is None else {"GLOO_SOCKET_IFNAME": DEVICE, "TP_SOCKET_IFNAME": DEVICE},
            network=network,
        )  # fmt: skip

    async def _network(self, job: JobRow, runner: tuple[int, int] | None) -> tuple[dict[str, str], str]:
        """Variables for its programs, and the namespace. Raises Invalid, Forbidden, Conflict, Unavailable."""
        if runner is None:
            raise Invalid("the network of a job ends with its caller, who is not known",
                          hint="use the local socket, with `watch`")  # fmt: skip
        nodes = (job.nodes or "").split(",")
        addresses, namespace = await self._networks.begin(nodes, job.name, job.uid, runner=runner[0])
        variables = {
            "XMIG_JOB_ADDRESS": addresses.all[addresses.own], "XMIG_JOB_LEADER_ADDRESS": addresses.all[0],
            "XMIG_JOB_ADDRESSES": ",".join(addresses.all),
        }  # fmt: skip
        return variables, str(namespace)

    async def _admit(self, job: JobRow, *, is_predicted: bool) -> str:
        """Raises Conflict: there is no room, and none can be made."""
        try:
            return await self._admission.admit(job, is_predicted=is_predicted)
        except Conflict:
            if self._make_room is None or job.memory_quota is None:
                raise
            for device in self._admission.choices(job):
                with contextlib.suppress(Conflict):
                    admit = partial(self._admission.admit, replace(job, device=device))
                    return await self._make_room(job, device, admit)
            raise

    def page(
        self, conditions: Conditions, *, sort: Sort = "created", reverse: bool = False, before: str | None = None,
        cursor: str | None = None, limit: int = 100,
    ) -> tuple[list[dict[str, Any]], str | None]:  # fmt: skip
        """Jobs, and the cursor of the next page; None: this was the last. Raises Invalid, Gone."""
        at = None if cursor is None else parse(cursor, sort, reverse)
        if sort == "state" or sort == "memory":
            return self._remembered(conditions, sort, reverse, at, limit)
        after = None if at is None else (at.value, at.last)
        with self._reader.session() as session:
            rows = repository.page(
                session, conditions, sort=sort, reverse=reverse, after=after, before=before, limit=limit + 1
            )
        if len(rows) <= limit:
            return rows, None
        last = rows[limit - 1]
        value = last["created_at" if sort == "created" else "name"]
        return rows[:limit], Cursor(sort, reverse, value, last["id"]).text()

    def _remembered(
        self, conditions: Conditions, sort: Sort, reverse: bool, at: Cursor | None, limit: int
    ) -> tuple[list[dict[str, Any]], str | None]:
        held = self._held() if sort == "memory" else {}
        with self._reader.session() as session:
            if at is None:
                found = repository.keys(session, conditions)
                if sort == "memory":
                    found.sort(key=lambda each: -held.get(each[0], 0))
                else:
                    found.sort(key=lambda each: STATES.index(each[1]))
                ids: Sequence[str] = [id for id, _ in (reversed(found) if reverse else found)]
                begin, name = 0, None
            else:
                ids, begin, name = self._orderings.get(conditions.owner, at.last), at.value, at.last
            end = begin + limit
            rows = repository.details(session, ids[begin:end])
        if sort == "memory":
            rows = [row | {"memory_bytes": held.get(row["id"], 0)} for row in rows]
        if end >= len(ids):
            return rows, None
        return rows, Cursor(sort, reverse, end, name or self._orderings.keep(conditions.owner, ids)).text()

    def _held(self) -> dict[str, int]:
        """Device memory by job."""
        held: dict[str, int] = {}
        for process in list(self._supervisor.processes.values()):
            held[process.job.id] = held.get(process.job.id, 0) + _memory(process)
        return held

    async def change(
        self, job: str, change: JobChange, *, check: Callable[[int], None], caller: Caller
    ) -> JobInfo:  # fmt: skip
        """`check` refuses a version that is not the one to be changed. Raises NotFound, Invalid, what `check` does."""
        await self._check_owner(caller, job)
        values = {"external_id": change.external_id} if "external_id" in change.model_fields_set else {}

        def write(session: Session) -> None:
            row = repository.find(session, job)
            if row is None:
                raise NotFound(f"there is no job {job!r}", hint="xmigctl ps lists them")
            check(row.version)
            if not repository.change(session, row, change.labels, values, MOST_LABELS):
                raise Invalid(f"labels: a job has at most {MOST_LABELS}", hint="remove some (null)")

        await self._writer.write("jobs.change", write)
        info = await asyncio.to_thread(self.find, job, caller)
        data = {"labels": info.labels, "external_id": info.external_id, "by": caller.name}
        self._bus.publish("job.changed", "job", job, job, data)
        return info

    def find(self, job: str, caller: Caller) -> JobInfo:
        """Raises NotFound."""
        with self._reader.session() as session:
            found = repository.page(session, Conditions(job_id=job, owner=caller.owner))
        if not found:
            raise NotFound(f"there is no job {job!r}", hint="xmigctl ps lists them")
        info = JobInfo.model_validate(found[0])
        now = time.monotonic_ns()
        processes = self._supervisor.processes_of(job)
        info.memory_bytes = sum(map(_memory, processes))
        if info.state in ("running", "suspended") and processes:  # as its processes are shown: records come later
            info.suspended = sum(process.state == "suspended" for process in processes)
            info.state = "suspended" if info.suspended == len(processes) else "running"
        stalls = [process.stall() for process in processes]
        info.expected_stall_ms = max((each.expected(now) / 1e6 for each in stalls if each is not None), default=None)
        return info

    async def lines(self, job: str, caller: Caller, **which: Any) -> list[LogLineInfo]:
        """Of its log, with what its programs have reported until now. Raises NotFound."""
        self._supervisor.collect_lines(job)

        def read() -> list[LogLineInfo]:
            with self._reader.session() as session:
                if not repository.page(session, Conditions(job_id=job, owner=caller.owner)):
                    raise NotFound(f"there is no job {job!r}", hint="xmigctl ps --all lists them")
                return [LogLineInfo.model_validate(row) for row in logs.page(session, job, **which)]

        return await asyncio.to_thread(read)

    async def movable(self, job: str, caller: Caller) -> JobMovable:
        """What would stop its programs from being dumped, and restored elsewhere. Raises NotFound: there is no such
        job, or none of its programs runs. Raises Forbidden: something of it is another user's, or not readable."""
        await self._check_owner(caller, job)
        rows = [process.row for process in self._supervisor.processes_of(job)]
        live = {row.pid: row.id for row in rows if pidfds.same_process(row.pid, row.start_time)}
        several = any(process.job.nodes is not None for process in self._supervisor.processes_of(job))
        programs = await asyncio.to_thread(_movable, live, several)
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

        await self._writer.write("jobs.stop", write)
        return self._supervisor.stop_job(job, f"{caller.name} stopped the job")

    async def exited(self, job: str, caller: Caller, end: End) -> JobInfo:
        """Raises NotFound, Forbidden."""
        await self._check_owner(caller, job)
        at = time.time()
        await self._writer.write("jobs.end", lambda session: repository.end(session, job, end, at))
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


def _subject(job: JobRow, labels: Mapping[str, str]) -> Subject:
    """As it is known before it begins."""
    return Subject(
        user=str(job.uid), name=job.name, command=job.command, labels=tuple(sorted(labels.items())),
        devices=number_of_devices(job.device), started_at=time.time(), walltime=job.walltime_s,
    )  # fmt: skip


def _memory(process: Process) -> int:
    """Device memory of the program and of its snapshot."""
    return sum(handle.size for handle in list(process.handles.values()))


def _movable(live: dict[int, str], several: bool) -> list[ProgramMovable]:
    """Of these pids, whose processes have these ids. `several`: the job has processes on other nodes, too, and is
    written down with these."""
    live = {apart.root_in(pid): id for pid, id in live.items()}
    trees = {}
    for pid in live:
        with contextlib.suppress(NotFound):  # it has ended
            trees[pid] = movable.processes_of(pid)
    inner = {pid for root, pids in trees.items() for pid in pids if pid != root}
    programs = []
    for pid in trees.keys() - inner:
        with contextlib.suppress(NotFound):
            criu = movable.as_dumped(pid)
            if several:
                criu = replace(criu, elsewhere=ends(outward(pid)))
            found = [ObstacleInfo.model_validate(each) for each in movable.obstacles(pid, criu)]
            stops = {each.stops for each in found}
            programs.append(ProgramMovable(
                process_id=live[pid], pid=pid, pids=trees[pid], dumpable="here" not in stops,
                movable=stops <= {"depends"}, obstacles=found[:MOST_OBSTACLES],
            ))  # fmt: skip
    return sorted(programs, key=lambda each: each.pid)
