"""Checkpoints as operations: made, verified, restored, removed.

A checkpoint is made of a suspended process: the supervisor brings its state to host memory, CRIU writes the program
down, and all of it goes into the store. Then the process goes on. So it has one state at one moment, and a failure
anywhere leaves the process where it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sqlalchemy.orm import Session

from xmigd import __version__, log
from xmigd.checkpoints import live, repository
from xmigd.checkpoints.content import Chunks
from xmigd.checkpoints.criu import Criu
from xmigd.checkpoints.manifest import Content, Manifest, Program
from xmigd.checkpoints.movable import processes_of
from xmigd.checkpoints.schemas import CheckpointInfo
from xmigd.database.reader import Reader
from xmigd.database.writer import Writer
from xmigd.devices.names import as_one, devices_of
from xmigd.errors import Conflict, Forbidden, Invalid, NotFound, XmigError
from xmigd.failpoints import Write
from xmigd.ids import new_id
from xmigd.ipc import pidfd as pidfds
from xmigd.ipc.fds import Fd, close_all
from xmigd.jobs.membership import new_job
from xmigd.memory.handles import Handle, JobMemory
from xmigd.memory.restored import mapped_memory
from xmigd.migrations.service import Moves
from xmigd.native import Layout
from xmigd.operations.operation import Operation
from xmigd.operations.repository import OperationRow
from xmigd.operations.service import Operations, Outcome, interrupted
from xmigd.records import ProcessRow
from xmigd.security.callers import Caller
from xmigd.store.objects import Damaged, private_folder, write_durably
from xmigd.supervisor.process import Process
from xmigd.supervisor.supervisor import Supervisor
from xmigd.users import user_name

logger = log.get("checkpoints")

CREATE, RESTORE, VERIFY = "checkpoint", "restoration", "verification"  # operations
FOUND_WITHIN = 60.0  # seconds after a start in which a process of the last daemon is found again


class Checkpoints:
    def __init__(
        self, *, supervisor: Supervisor, moves: Moves, operations: Operations, writer: Writer, reader: Reader,
        layout: Layout, folder: Path, node: str, criu: Criu, devices: Sequence[str],
    ) -> None:  # fmt: skip
        """`folder`: where they are kept. `devices`: of this node."""
        self._supervisor = supervisor
        self._moves = moves
        self._operations = operations
        self._writer = writer
        self._reader = reader
        self._layout = layout
        self._folder = folder
        self._node = node
        self._criu = criu
        self._devices = devices
        self._chunks = Chunks(folder / "objects")
        operations.register(CREATE, self._resolve_create)
        operations.register(RESTORE, self._resolve_restore)

    # --- what is requested --------------------------------------------------------------------------------------------

    def page(self, **conditions: Any) -> list[CheckpointInfo]:
        with self._reader.session() as session:
            rows = repository.page(session, **conditions)
        return [CheckpointInfo.model_validate(row | {"user": user_name(row["uid"])}) for row in rows]

    def find(self, caller: Caller, checkpoint: str) -> CheckpointInfo:
        """Raises NotFound."""
        found = self.page(checkpoint=checkpoint, owner=caller.owner)
        if not found:
            raise NotFound(f"there is no checkpoint {checkpoint[:64]!r}", hint="xmigctl checkpoint list lists them")
        return found[0]

    async def create(self, process: Process, *, stop: bool, requestor: str) -> OperationRow:
        """Raises Conflict, Unavailable: it cannot be made."""
        await self._criu.check()
        if len(self._supervisor.processes_of(process.job.id)) != 1:
            raise Conflict("the job has several processes: that is not possible yet", code="several_processes")
        if process.grouped or process.job.nodes is not None:
            raise Conflict("the process is a rank of a group: that is not possible yet", code="several_processes")
        asleep = process.state == "suspended"
        if asleep and process.machine.where != "host":
            raise Conflict("its state is in files", code="suspended", hint="resume it first")
        id = new_id()

        async def work(operation: Operation) -> dict[str, Any]:
            return await self._create(operation, id, process, stop=stop, asleep=asleep, requestor=requestor)

        return await self._operations.start(
            CREATE, subject=("job", process.job.id), job_id=process.job.id, owner=process.job.uid,
            requestor=requestor, work=work,
            request={"checkpoint": id, "process": process.row.id, "resume": not asleep},
        )  # fmt: skip

    async def restore(self, caller: Caller, checkpoint: str, devices: Sequence[str], *, requestor: str) -> OperationRow:
        """In a job of its own. Raises NotFound, Damaged, Conflict, Unavailable: it cannot be restored."""
        info = await asyncio.to_thread(self.find, caller, checkpoint)
        await self._criu.check()
        manifest = await asyncio.to_thread(self._manifest, info.id)
        program = manifest.programs[0]
        chosen = list(devices) or devices_of(info.device)
        self._check_place(program, chosen)
        await asyncio.to_thread(live.check_files, program.files)

        async def work(operation: Operation) -> dict[str, Any]:
            return await self._restore(operation, manifest, program, as_one(chosen), requestor)

        return await self._operations.start(
            RESTORE, subject=("checkpoint", info.id), owner=info.uid, requestor=requestor, work=work,
            request={"checkpoint": info.id, "pid": program.pid, "shared_bytes": program.shared_bytes},
        )  # fmt: skip

    async def verify(self, caller: Caller, checkpoint: str, *, requestor: str) -> OperationRow:
        """Read all of it, and compare it with its hashes. Raises NotFound, Damaged."""
        info = await asyncio.to_thread(self.find, caller, checkpoint)
        manifest = await asyncio.to_thread(self._manifest, info.id)

        async def work(operation: Operation) -> dict[str, Any]:
            operation.progress("reading", total_bytes=info.content_bytes)
            pieces = {chunk.hash: chunk.bytes for content in contents(manifest) for chunk in content.chunks}
            for name, size in pieces.items():
                operation.check_cancelled()
                await asyncio.to_thread(self._chunks.get, name, size)
            return {"checkpoint": info.id, "pieces": len(pieces), "bytes": sum(pieces.values())}

        return await self._operations.start(
            VERIFY, subject=("checkpoint", info.id), owner=info.uid, requestor=requestor, work=work
        )

    async def remove(self, caller: Caller, checkpoint: str) -> None:
        """Raises NotFound, Conflict: it is being restored."""
        info = await asyncio.to_thread(self.find, caller, checkpoint)
        for row in self._operations.active():
            if row.subject_id == info.id:
                raise Conflict(f"a {row.kind} of this checkpoint is under way", code="operation_under_way",
                               operation=row.id)  # fmt: skip
        await self._write("checkpoints.remove", lambda session: repository.remove(session, info.id))
        await asyncio.to_thread(self._forget, info.id)

    # --- to make one --------------------------------------------------------------------------------------------------

    async def _create(
        self, operation: Operation, id: str, process: Process, *, stop: bool, asleep: bool, requestor: str
    ) -> dict[str, Any]:
        began = time.monotonic()
        if not asleep:
            operation.progress("suspending")
            await self._carried_out(self._moves.suspend([process], "host", requestor=requestor))
        ended = False
        try:
            operation.check_cancelled("host" if asleep else "source")
            manifest, stored, ended = await self._write_down(operation, id, process, stop=stop)
        finally:
            if not asleep and not ended:
                operation.progress("resuming")
                await self._carried_out(self._moves.resume([process], [], requestor=requestor))
        standstill = None if asleep or stop else (time.monotonic() - began) * 1e3
        size = sum(chunk.bytes for content in contents(manifest) for chunk in content.chunks)
        document = manifest.model_dump_json().encode()
        values = {
            "id": id, "job_id": manifest.job, "job_name": manifest.job_name, "uid": process.job.uid,
            "command": process.row.command, "device": process.row.device, "programs": 1, "content_bytes": size,
            "stored_bytes": stored, "manifest": hashlib.sha256(document).hexdigest(), "standstill_ms": standstill,
            "created_at": manifest.created_at,
        }  # fmt: skip
        operation.progress("writing")
        await asyncio.to_thread(write_durably, self._path(id), document)
        await self._write("checkpoints.add", lambda session: repository.add(session, values))
        logger.info("a checkpoint is made", checkpoint=id[:12], job=manifest.job_name, bytes=size, stored_bytes=stored)
        return {"checkpoint": id, "content_bytes": size, "stored_bytes": stored, "standstill_ms": standstill}

    async def _write_down(
        self, operation: Operation, id: str, process: Process, *, stop: bool
    ) -> tuple[Manifest, int, bool]:
        """Program and memory. Returns also the bytes that it took on disk, and whether the program was ended."""
        pid = process.row.pid
        private_folder(self._folder)
        with tempfile.TemporaryDirectory(prefix="dump-", dir=self._folder) as name:
            images = Path(name)
            operation.progress("dumping")
            leader = os.getsid(pid) == pid
            pids = processes_of(pid)
            goes_on = True
            held = live.hold(process)
            try:
                await self._criu.dump(pid, images, leader=leader)
                pids = processes_of(pid)
                files = live.open_files(pids)
                operation.progress("storing", total_bytes=held.bytes)
                before = self._chunks.bytes()
                report = self._reporter(operation)
                memory, snapshots = await asyncio.to_thread(live.store_memory, self._chunks, held, report)
                stored_images = await asyncio.to_thread(live.store_images, self._chunks, images)
                await asyncio.to_thread(self._chunks.sync)
                stored = max(0, self._chunks.bytes() - before)
                program = live.describe(process, memory, snapshots, stored_images, files, self._layout, leader)
                goes_on = not stop
            finally:
                held.close()
                if goes_on:
                    live.let_go_on(pids)
            if stop:
                kill(pids)
        manifest = Manifest(
            id=id, job=process.job.id, job_name=process.job.name, node=self._node, xmig_version=__version__,
            created_at=time.time(), programs=(program,),
        )  # fmt: skip
        return manifest, stored, stop

    # --- to restore one -----------------------------------------------------------------------------------------------

    def _check_place(self, program: Program, devices: Sequence[str]) -> None:
        """Raises Invalid, NotFound, Conflict."""
        if program.layout != self._layout.layout_version:
            raise Conflict(
                f"it was made by another version of xMIG: memory of layout {program.layout}, and this one has "
                f"{self._layout.layout_version}", code="other_version",
            )  # fmt: skip
        if len(devices) != len(program.devices):
            raise Invalid(f"the program had {len(program.devices)} devices, and {len(devices)} are named")
        for device, had in zip(devices, program.devices, strict=True):
            if device not in self._devices:
                raise NotFound(f"there is no device {device!r}", code="no_such_device", hint="xmigctl devices")
            if device.partition(":")[0] != had.kind:
                raise Conflict(f"the program was on {had.kind} devices, {device} is none", code="other_kind")
        if Path(f"/proc/{program.pid}").exists():
            raise Conflict(
                f"another process has the pid {program.pid}, which the program needs", code="pid_in_use",
                hint="end the process that has it; if it is the job itself: xmigctl stop",
            )  # fmt: skip

    async def _restore(
        self, operation: Operation, manifest: Manifest, program: Program, device: str, requestor: str
    ) -> dict[str, Any]:
        began = time.monotonic()
        total = sum(memory.content.bytes for memory in program.memory)
        operation.progress("reading", total_bytes=total)
        report = self._reporter(operation)
        handles, snapshots = await asyncio.to_thread(live.restore_memory, self._chunks, program, report)
        given = False
        try:
            with tempfile.TemporaryDirectory(prefix="restore-", dir=self._folder) as name:
                await asyncio.to_thread(live.restore_images, self._chunks, program, Path(name))
                operation.point_of_no_return("the program is being restored")
                operation.progress("restoring")
                pid = await self._criu.restore(Path(name), leader=program.leader)
            try:
                process = self._take(manifest, program, device, pid, handles, snapshots)
                given = True
                operation.progress("resuming")
                await self._carried_out(self._moves.resume([process], [], requestor=requestor))
            except BaseException:
                kill(processes_of(pid))
                raise
        finally:
            if not given:
                close_all([*snapshots, *(handle.fd for handle in handles.values())])
        live.let_go_on(processes_of(pid))
        logger.info("a checkpoint is restored", checkpoint=manifest.id[:12], process=process.row.id[:12], pid=pid)
        return {
            "checkpoint": manifest.id, "job": process.job.id, "process": process.row.id, "pid": pid,
            "device": process.row.device, "ms": (time.monotonic() - began) * 1e3,
        }  # fmt: skip

    def _take(
        self, manifest: Manifest, program: Program, device: str, pid: int, handles: dict[int, Handle],
        snapshots: tuple[Fd, Fd],
    ) -> Process:  # fmt: skip
        """The program that CRIU has made, with its memory, as a suspended process. Raises NotFound, Forbidden."""
        client = Fd(os.pidfd_open(pid))
        try:
            if pidfds.owner(pid) != program.uid:
                raise Forbidden(f"process {pid} is not the program that was restored")
            shared = mapped_memory(pid, program.shared_bytes)
        except BaseException:
            client.close()
            raise
        job, _ = new_job(
            name=manifest.job_name, command=program.command, uid=program.uid, device=device, registered=True
        )
        row = ProcessRow(
            id=new_id(), job=job.id, pid=pid, start_time=pidfds.start_time(pid), uid=program.uid, gid=program.gid,
            command=program.command, device=device, origin=program.id,
        )  # fmt: skip
        return self._supervisor.restore(job, row, client, JobMemory(*shared, *snapshots), handles, program.generation)

    # --- after a restart ----------------------------------------------------------------------------------------------

    async def _resolve_create(self, operation: Operation) -> Outcome:
        """The process goes on if it was suspended for it."""
        if not operation.request.get("resume"):
            return interrupted(operation.row)
        process = await self._found_again(operation.request.get("process", ""))
        if process is None:
            return interrupted(operation.row)
        live.let_go_on(processes_of(process.row.pid))
        if process.state == "suspended":
            await self._carried_out(self._moves.resume([process], [], requestor=operation.row.requestor))
        return interrupted(operation.row, "source")

    async def _resolve_restore(self, operation: Operation) -> Outcome:
        """What was restored by half is ended: it stands still, and has done nothing since the checkpoint."""
        pid = operation.request.get("pid", 0)
        with contextlib.suppress(XmigError, OSError):
            if stopped(pid):
                close_all(mapped_memory(pid, operation.request.get("shared_bytes", [])))
                kill(processes_of(pid))
        return interrupted(operation.row)

    async def _found_again(self, name: str) -> Process | None:
        """A process of the last daemon, once its servers have announced themselves."""
        deadline = time.monotonic() + FOUND_WITHIN
        while name in self._supervisor.expected and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        found = self._supervisor.processes.get(name)
        while found is not None and found.machine.move is not None and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        return found

    # --- small parts --------------------------------------------------------------------------------------------------

    def _path(self, checkpoint: str) -> Path:
        return self._folder / f"{checkpoint}.json"

    def _manifest(self, checkpoint: str) -> Manifest:
        """Raises NotFound, Damaged."""
        with self._reader.session() as session:
            rows = repository.page(session, checkpoint=checkpoint)
        if not rows:
            raise NotFound(f"there is no checkpoint {checkpoint[:64]!r}", hint="xmigctl checkpoint list lists them")
        return self._read(checkpoint, rows[0]["manifest"])

    def _read(self, checkpoint: str, expected: str) -> Manifest:
        try:
            document = self._path(checkpoint).read_bytes()
        except OSError as error:
            raise Damaged(f"the manifest of checkpoint {checkpoint[:12]} cannot be read: {error.strerror}") from None
        if hashlib.sha256(document).hexdigest() != expected:
            raise Damaged(f"the manifest of checkpoint {checkpoint[:12]} is not the one that was written")
        return Manifest.model_validate_json(document)

    def _forget(self, checkpoint: str) -> None:
        """Its manifest, and what no other checkpoint has. What another one needs and cannot say, because its manifest
        is damaged, is kept: nothing is removed then."""
        self._path(checkpoint).unlink(missing_ok=True)
        with self._reader.session() as session:
            left = repository.every(session)
        try:
            manifests = [self._read(id, expected) for id, expected in left]
        except Damaged as error:
            logger.error("nothing is removed from the checkpoints' content", why=str(error))
            return
        self._chunks.remove_unneeded(
            {chunk.hash for one in manifests for content in contents(one) for chunk in content.chunks}
        )

    async def _carried_out(self, starting: Awaitable[OperationRow]) -> None:
        """Raises Conflict: it was not."""
        row = await self._operations.ended(await starting)
        if row.state != "succeeded":
            problem = row.error or {}
            raise Conflict(
                f"the {row.kind} has {row.state}: {problem.get('detail', 'nobody knows why')}",
                code=problem.get("code"), hint=problem.get("hint", ""),
                process_location=problem.get("process_location"),
            )  # fmt: skip

    async def _write(self, name: Write, work: Callable[[Session], Any]) -> None:
        """Raises Unavailable."""
        await asyncio.wrap_future(self._writer.submit(name, work))

    @staticmethod
    def _reporter(operation: Operation) -> Callable[[int], None]:
        """For a thread: how many bytes are done."""
        loop = asyncio.get_running_loop()
        phase = operation.row.phase

        def report(done: int) -> None:
            loop.call_soon_threadsafe(lambda: operation.progress(phase, processed_bytes=done))

        return report


def contents(manifest: Manifest) -> Iterator[Content]:
    for program in manifest.programs:
        yield from (memory.content for memory in program.memory)
        yield from program.snapshots
        yield from (image.content for image in program.images)


def kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def stopped(pid: int) -> bool:
    """By SIGSTOP. Raises OSError: there is no such process."""
    return pid > 0 and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
