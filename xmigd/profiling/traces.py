"""Traces: for some seconds the servers of a job write down all that the device does, and a file is made of it.

The job is not restarted and notices nothing but what two events around each operation cost. A server that is lost
meanwhile has left what it had written; the one that takes over goes on in memory of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from xmigd import __version__, log
from xmigd.errors import Conflict, Gone, NotFound, Unavailable
from xmigd.ipc import messages as m
from xmigd.ipc.fds import sealed_memory
from xmigd.operations import repository
from xmigd.operations.operation import Operation
from xmigd.operations.repository import OperationRow
from xmigd.operations.service import Operations, Outcome, interrupted
from xmigd.profiling.pages import read_trace_head
from xmigd.profiling.schemas import TraceInfo
from xmigd.profiling.trace_file import TracedProcess, TracedServer, write_trace
from xmigd.security.callers import Caller
from xmigd.servers.server import Server
from xmigd.supervisor.process import Process

logger = log.get("traces")

KIND = "trace"
LOOK_EVERY = 0.03  # seconds: a standby that takes over has its page before it replays
END_PATIENCE = 5.0  # seconds, until servers have written the last operations


class Traces:
    def __init__(
        self,
        *,
        processes: Mapping[str, Process],
        operations: Operations,
        readers: Engine,
        folder: Path,
        node: str,
        kept: int,
        mib: int,
        rank_of: Callable[[str], int | None] = lambda _: None,
    ) -> None:
        """`mib`: for what one server writes; `kept`: files on this node."""
        self._processes = processes
        self._operations = operations
        self._readers = readers
        self._folder = folder
        self._node = node
        self._kept = kept
        self._bytes = mib << 20
        self._rank_of = rank_of
        operations.register(KIND, self._resolve)

    async def start(self, processes: Sequence[Process], seconds: float, *, requestor: str) -> OperationRow:
        """Of a job's processes. Raises Conflict: they are suspended, or a trace of the job is under way."""
        job = processes[0].job
        self._check(processes)

        async def work(operation: Operation) -> dict[str, Any]:
            return await _Trace(self, operation, job.id, job.name, seconds).run()

        try:
            return await self._operations.start(
                KIND, subject=("trace", job.id), job_id=job.id, requestor=requestor, owner=job.uid, work=work,
                request={"seconds": seconds},
            )  # fmt: skip
        except Conflict as error:
            if error.code != "operation_under_way":
                raise
            raise Conflict(
                f"a trace of job {job.name} is under way", code="trace_under_way", operation=error.operation,
                hint="wait for its end, or cancel it (xmigctl op cancel)",
            ) from None  # fmt: skip

    def _check(self, processes: Sequence[Process]) -> None:
        job = processes[0].job.name
        if all(one.state == "suspended" for one in processes):
            raise Conflict(
                f"job {job} is suspended: there is nothing to trace", code="suspended", hint=f"xmigctl resume {job}"
            )
        if not any(server.takes_profiling for one in processes for server in one.servers.values()):
            raise Conflict(
                f"the servers of job {job} are of an earlier version, which writes no traces", code="no_trace",
                hint="those that take over after a move or a recovery do: xmigctl migrate",
            )  # fmt: skip

    # --- files --------------------------------------------------------------------------------------------------------

    def path(self, trace: str) -> Path:
        return self._folder / f"{trace}.json"

    def prepare_folder(self) -> None:
        """Raises OSError."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def of_job(self, caller: Caller, job: str) -> list[TraceInfo]:
        """Those that can be fetched, newest first."""
        rows = self._operations.find(kind=KIND, job=job, owner=caller.owner, limit=1000)
        found = []
        for row in rows:
            with contextlib.suppress(OSError):
                size = self.path(row.id).stat().st_size
                found.append(TraceInfo(id=row.id, job_id=row.job_id, created_at=row.created_at, bytes=size))
        return found

    def find(self, caller: Caller, trace: str) -> Path:
        """Its file. Raises NotFound, Gone; Conflict: it is not finished."""
        missing = NotFound(f"there is no trace {trace[:64]!r}", hint="GET /v1/jobs/{job}/traces lists them")
        with Session(self._readers) as session:
            row = repository.get(session, trace)
        if row is None or row.kind != KIND or not caller.sees(row.owner):
            raise missing
        path = self.path(row.id)
        if path.is_file():
            return path
        if row.active:
            raise Conflict("the trace is not finished", code="trace_under_way", operation=row.id, hint="wait for it")
        if row.state != "succeeded":
            raise missing
        raise Gone(
            "the trace's file is not there any more", code="trace_gone",
            hint="only the last ones are kept (traces_kept): make another one",
        )  # fmt: skip

    def tidy(self) -> None:
        """Only the last files stay."""
        files = []
        for path in self._folder.glob("*.json"):
            with contextlib.suppress(OSError):
                files.append((path.stat().st_mtime_ns, path))
        for _, path in sorted(files)[: -self._kept]:
            path.unlink(missing_ok=True)
        for path in self._folder.glob("*.unfinished"):
            if time.time() - path.stat().st_mtime > 3600:
                path.unlink(missing_ok=True)

    # --- what a trace needs of this ---------------------------------------------------------------------------------

    def processes_of(self, job: str) -> list[Process]:
        return [one for one in self._processes.values() if one.job.id == job]

    def make_traced(self, process: Process) -> TracedProcess:
        row = process.row
        return TracedProcess(row.id, row.pid, row.device.split(","), self._rank_of(row.id))

    def give(self, server: Server) -> TracedServer:
        """Raises Unavailable."""
        try:
            page = sealed_memory("xmig-trace", self._bytes)
        except OSError as error:
            raise Unavailable(
                f"there is no memory for a trace: {error.strerror}",
                hint="free memory or descriptors, or lower trace_mib",
            ) from None
        server.send(m.pack("trace"), (page,))
        return TracedServer(server.number, page, time.monotonic_ns())

    @property
    def node(self) -> str:
        return self._node

    async def _resolve(self, operation: Operation) -> Outcome:
        """Servers end it themselves when their daemon is gone; what they had written is gone, too."""
        return interrupted(operation.row)


class _Trace:
    """One that is being made."""

    def __init__(self, traces: Traces, operation: Operation, job: str, job_name: str, seconds: float) -> None:
        self._traces = traces
        self._operation = operation
        self._job = job
        self._job_name = job_name
        self._seconds = seconds
        self._traced: dict[str, TracedProcess] = {}
        self._servers: list[tuple[Process, Server, TracedServer]] = []
        self._began_at = time.time()
        self._began = time.monotonic_ns()

    async def run(self) -> dict[str, Any]:
        try:
            await self._record()
        finally:
            self._end()
        self._operation.check_cancelled()
        self._operation.progress("collecting", **self._figures())
        await self._wait_for_the_last()
        self._operation.point_of_no_return("its file is being written")
        self._operation.progress("writing", **self._figures())
        return await asyncio.to_thread(self._write)

    async def _record(self) -> None:
        end = time.monotonic() + self._seconds
        while (left := end - time.monotonic()) > 0 and not self._operation.cancelled.is_set():
            living = self._traces.processes_of(self._job)
            if not living and self._traced:
                return  # it is over before its time
            for process in living:
                self._follow(process)
            self._see_losses()
            self._operation.progress("recording", left_s=round(left, 1), **self._figures())
            await asyncio.sleep(min(LOOK_EVERY, left))

    def _follow(self, process: Process) -> None:
        traced = self._traced.get(process.row.id)
        if traced is None:
            traced = self._traced[process.row.id] = self._traces.make_traced(process)
        for number, server in process.servers.items():
            if number == process.machine.holder or not server.takes_profiling or not server.pid:
                continue
            given = next((each for _, other, each in self._servers if other is server), None)
            if given is None:
                given = self._traces.give(server)
                traced.servers.append(given)
                self._servers.append((process, server, given))
            if number == process.machine.active:
                given.had_program = True

    def _see_losses(self) -> None:
        now = time.monotonic_ns()
        for process, server, given in self._servers:
            if given.lost_at is None and given.had_program and process.servers.get(server.number) is not server:
                given.lost_at = now

    def _figures(self) -> dict[str, Any]:
        heads = [read_trace_head(given.page) for _, _, given in self._servers]
        return {
            "written_bytes": sum(head.written for head in heads if head is not None),
            "dropped": sum(head.dropped for head in heads if head is not None),
            "processes": len(self._traced), "servers": sum(given.had_program for _, _, given in self._servers),
        }  # fmt: skip

    def _end(self) -> None:
        for process, server, _ in self._servers:
            if process.servers.get(server.number) is server:
                server.send(m.pack("end_trace"))

    async def _wait_for_the_last(self) -> None:
        end = time.monotonic() + END_PATIENCE
        while time.monotonic() < end and not all(self._has_ended(*one) for one in self._servers):
            await asyncio.sleep(LOOK_EVERY)
        self._see_losses()

    def _has_ended(self, process: Process, server: Server, given: TracedServer) -> bool:
        """Or will write nothing more in any case: it is gone, or has never had the program."""
        if process.servers.get(server.number) is not server or server.number != process.machine.active:
            return True
        head = read_trace_head(given.page)
        return head is not None and head.ended

    def _write(self) -> dict[str, Any]:
        unfinished = sum(not self._has_ended(*one) for one in self._servers)
        lost = sum(given.lost_at is not None for _, _, given in self._servers)
        about = {
            "job": self._job, "job_name": self._job_name, "node": self._traces.node, "began_at": self._began_at,
            "seconds": self._seconds, "servers_lost": lost, "servers_without_an_end": unfinished,
            "made_by": f"xMIG {__version__}",
        }  # fmt: skip
        for traced in self._traced.values():
            traced.servers = [given for given in traced.servers if given.had_program]
        path = self._traces.path(self._operation.id)
        try:
            self._traces.prepare_folder()
            written = write_trace(
                path, list(self._traced.values()), began=self._began, job_name=self._job_name, about=about
            )
        except OSError as error:
            raise Unavailable(
                f"{path} cannot be written: {error.strerror}", hint="make room there; the job was not disturbed"
            ) from None
        self._traces.tidy()
        return {
            "trace": self._operation.id, "bytes": written.bytes, "events": written.events, "dropped": written.dropped,
            "kinds": written.kinds, "processes": len(self._traced), "servers_lost": lost,
            "servers_without_an_end": unfinished, "seconds": self._seconds,
        }  # fmt: skip
