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
import shutil
import signal
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from sqlalchemy.orm import Session

from xmigd import __version__, log
from xmigd.checkpoints import archive, live, repository
from xmigd.checkpoints.content import Chunks, Writing
from xmigd.checkpoints.criu import Criu, ended
from xmigd.checkpoints.manifest import Manifest, Program, contents
from xmigd.checkpoints.movable import leads, obstacles, processes_of
from xmigd.checkpoints.schemas import CheckpointInfo
from xmigd.database.reader import Reader
from xmigd.database.writer import Writer
from xmigd.devices.names import as_one, devices_of
from xmigd.errors import Conflict, Forbidden, Invalid, NotFound, Unavailable
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
EXPORT, IMPORT = "export", "import"
GONE_WITHIN = 5.0  # seconds in which a parent takes note of the end of a program
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
        self._exported = folder / "exported"  # the only folder that files are written to and read from for others
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
        await self._check_movable(process)
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
            request={"checkpoint": info.id},
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

    async def export(self, caller: Caller, checkpoint: str, *, requestor: str) -> OperationRow:
        """Into one file of the folder `exported`, for another node. Raises NotFound, Damaged, Conflict."""
        info = await asyncio.to_thread(self.find, caller, checkpoint)
        manifest = await asyncio.to_thread(self._manifest, info.id)
        path = self._exported / f"{info.id}.xmig"

        async def work(operation: Operation) -> dict[str, Any]:
            operation.progress("writing", total_bytes=info.content_bytes)
            report = self._reporter(operation)

            def write() -> int:
                private_folder(path.parent)
                return archive.write(manifest, self._chunks, path, progress=report)

            with _of_the_store("it cannot be exported"):
                size = await asyncio.to_thread(write)
            return {"checkpoint": info.id, "path": str(path), "bytes": size}

        return await self._operations.start(
            EXPORT, subject=("checkpoint", info.id), owner=info.uid, requestor=requestor, work=work, cancellable=False,
        )  # fmt: skip

    async def take(self, file: str, *, requestor: str) -> OperationRow:
        """Import a file of the folder `exported`. It belongs to the user that its program ran as. Raises NotFound."""
        path = self._exported / file
        if not await asyncio.to_thread(path.is_file):
            raise NotFound(f"there is no file {path}", hint="copy it there")

        async def work(operation: Operation) -> dict[str, Any]:
            operation.progress("reading")
            return await self._import(operation, path)

        return await self._operations.start(
            IMPORT, subject=("file", file), requestor=requestor, work=work, cancellable=False
        )

    async def _import(self, operation: Operation, path: Path) -> dict[str, Any]:
        with contextlib.ExitStack() as stack:
            with _of_the_store(f"{path} cannot be imported"):
                writing = stack.enter_context(self._chunks.writing())
                opened = stack.enter_context(await asyncio.to_thread(archive.Archive.open, path))
                manifest = opened.manifest
                if await asyncio.to_thread(self.page, checkpoint=manifest.id):
                    raise Conflict(f"checkpoint {manifest.id[:12]} is here already", code="exists")
                if not manifest.programs:
                    raise Damaged(f"{path} has no program")
                operation.progress("storing", total_bytes=opened.content_bytes)
                report = self._reporter(operation)
                await asyncio.to_thread(opened.import_into, writing, progress=report)
                await asyncio.to_thread(writing.sync)
            result = await self._keep(manifest, writing)
            program = manifest.programs[0]
            device = as_one([f"{seen.kind}:{place}" for place, seen in enumerate(program.devices)])
            await self._list(manifest, program.uid, program.command, device, result)
        return result

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
        pids: list[int] = []

        async def go_on() -> None:
            live.let_go_on(pids)
            if not asleep and process.state == "suspended":
                operation.progress("resuming")
                await self._carried_out(self._moves.resume([process], [], requestor=requestor))

        # A daemon that leaves interrupts this anywhere, and does nothing about it: the next one does.
        with contextlib.ExitStack() as stack:
            with _of_the_store("it cannot be stored"):
                writing = stack.enter_context(self._chunks.writing())
            if not asleep:
                operation.progress("suspending")
                suspended = await self._carried_out(self._moves.suspend([process], "host", requestor=requestor))
                began = time.monotonic() - (suspended.get("downtime_ms") or 0.0) / 1e3
            generation = process.generation
            try:
                operation.check_cancelled("host" if asleep else "source")
                program, pids = await self._write_down(operation, writing, process, stop=stop)
                self._check_still(process, generation)
                manifest = Manifest(
                    id=id, job=process.job.id, job_name=process.job.name, node=self._node, xmig_version=__version__,
                    created_at=time.time(), programs=(program,),
                )  # fmt: skip
                result = await self._keep(manifest, writing)
                if stop:
                    await self._list(manifest, process.job.uid, process.row.command, process.row.device, result)
            except Exception:
                self._path(id).unlink(missing_ok=True)
                await go_on()
                raise
            if stop:
                await end(pids)
                return result
            await go_on()
            if not asleep:
                result["standstill_ms"] = (time.monotonic() - began) * 1e3
            await self._list(manifest, process.job.uid, process.row.command, process.row.device, result)
        return result

    async def _write_down(
        self, operation: Operation, writing: Writing, process: Process, *, stop: bool
    ) -> tuple[Program, list[int]]:
        """Program and memory. Returns also what the program consists of, which stands still if it is to `stop`."""
        pid = process.row.pid
        with self._works_in(operation) as images:
            operation.progress("dumping")
            pids, leader = processes_of(pid), leads(pid)
            with _of_the_store("it cannot be held"):
                held = live.hold(process)
            try:
                await self._criu.dump(pid, images, leader=leader)
                pids = processes_of(pid)
                _check_owners(process, pids)  # now they stand still
                files = live.open_files(pids)
                if not stop:
                    live.let_go_on(pids)
                operation.progress("storing", total_bytes=held.bytes)
                report = self._reporter(operation)
                with _of_the_store("it cannot be stored"):
                    memory, snapshots = await asyncio.to_thread(live.store_memory, writing, held, report)
                    stored = await asyncio.to_thread(live.store_images, writing, images)
                    await asyncio.to_thread(writing.sync)
            except Exception:
                live.let_go_on(pids)
                raise
            finally:
                held.close()
        return live.describe(process, memory, snapshots, stored, files, self._layout, leader), pids

    @staticmethod
    def _check_still(process: Process, generation: int) -> None:
        """Was it suspended all the time? Somebody else may resume it. Raises Conflict."""
        if process.state != "suspended" or process.generation != generation or process.machine.move is not None:
            raise Conflict("the process was resumed while it was written down", code="resumed_meanwhile",
                           hint="ask for it again")  # fmt: skip

    async def _keep(self, manifest: Manifest, writing: Writing) -> dict[str, Any]:
        """Raises Unavailable: no room."""
        with _of_the_store("it cannot be stored"):
            document = manifest.model_dump_json().encode()
            await asyncio.to_thread(write_durably, self._path(manifest.id), document)
        return {
            "checkpoint": manifest.id,
            "content_bytes": sum(chunk.bytes for content in contents(manifest) for chunk in content.chunks),
            "stored_bytes": writing.stored_bytes, "standstill_ms": None,
        }  # fmt: skip

    async def _list(self, manifest: Manifest, uid: int, command: str, device: str, result: dict[str, Any]) -> None:
        """From now on it is one. Raises Unavailable."""
        document = manifest.model_dump_json().encode()
        values = {name: value for name, value in result.items() if name != "checkpoint"} | {
            "id": manifest.id, "job_id": manifest.job, "job_name": manifest.job_name, "uid": uid, "command": command,
            "device": device, "programs": len(manifest.programs),
            "manifest": hashlib.sha256(document).hexdigest(), "created_at": manifest.created_at,
        }  # fmt: skip
        await self._write("checkpoints.add", lambda session: repository.add(session, values))

    async def _check_movable(self, process: Process) -> None:
        """Raises Conflict: something stands in the way, also of what would only be missing afterwards."""
        pid = process.row.pid
        _check_owners(process, await asyncio.to_thread(processes_of, pid))
        found = await asyncio.to_thread(obstacles, pid, self._criu.as_dumped(pid))
        against = [one for one in found if one.stops != "depends"]
        if against:
            first = against[0]
            more = f"; and {len(against) - 1} more" if len(against) > 1 else ""
            raise Conflict(
                f"process {first.pid} cannot be restored with {first.what}: {first.why}{more}", code="not_movable",
                hint=first.hint or "xmigctl check-movable JOB lists what stands in the way",
            )  # fmt: skip

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
        assert operation.row.owner is not None
        began = time.monotonic()
        total = sum(memory.content.bytes for memory in program.memory)
        operation.progress("reading", total_bytes=total)
        report = self._reporter(operation)
        with _of_the_store("its memory cannot be made"):
            handles, snapshots = await asyncio.to_thread(live.restore_memory, self._chunks, program, report)
        given = False
        try:
            with self._works_in(operation) as images:
                with _of_the_store("its images cannot be written"):
                    await asyncio.to_thread(live.restore_images, self._chunks, program, images)
                operation.point_of_no_return("the program is being restored")
                operation.progress("restoring")
                pid = await self._criu.restore(images, leader=program.leader)
                try:
                    process = self._take(manifest, program, device, pid, handles, snapshots, operation.row.owner)
                    given = True
                    operation.progress("resuming")
                    await self._carried_out(self._moves.resume([process], [], requestor=requestor))
                except Exception:
                    kill(tree(pid))
                    raise
                live.let_go_on(tree(pid))
        finally:
            if not given:
                close_all([*snapshots, *(handle.fd for handle in handles.values())])
        logger.info("a checkpoint is restored", checkpoint=manifest.id[:12], process=process.row.id[:12], pid=pid)
        return _as_restored(manifest.id, process) | {"ms": (time.monotonic() - began) * 1e3}

    def _take(
        self, manifest: Manifest, program: Program, device: str, pid: int, handles: dict[int, Handle],
        snapshots: tuple[Fd, Fd], uid: int,
    ) -> Process:  # fmt: skip
        """The program that CRIU has made, with its memory, as a suspended process of this user's job. Raises NotFound,
        Forbidden."""
        client = Fd(os.pidfd_open(pid))
        try:
            if pidfds.owner(pid) != program.uid:
                raise Forbidden(f"process {pid} is not the program that was restored")
            shared = mapped_memory(pid, program.shared_bytes)
        except BaseException:
            client.close()
            raise
        started = pidfds.start_time(pid)
        job, _ = new_job(
            name=manifest.job_name, command=program.command, uid=uid, device=device, registered=True,
            runner=(pid, started),
        )  # fmt: skip
        row = ProcessRow(
            id=new_id(), job=job.id, pid=pid, start_time=started, uid=program.uid, gid=program.gid,
            command=program.command, device=device, origin=program.id,
        )  # fmt: skip
        return self._supervisor.restore(job, row, client, JobMemory(*shared, *snapshots), handles, program.generation)

    # --- after a restart ----------------------------------------------------------------------------------------------

    async def _resolve_create(self, operation: Operation) -> Outcome:
        """The process goes on if it was suspended for it. What was stored is removed if it did not become one."""
        await self._criu_has_ended(operation)
        name, checkpoint = operation.request.get("process", ""), operation.request.get("checkpoint", "")
        if not await asyncio.to_thread(self.page, checkpoint=checkpoint):
            await asyncio.to_thread(self._forget, checkpoint)
        process = await self._found_again(operation, name)
        if process is None:
            return interrupted(operation.row)
        live.let_go_on(tree(process.row.pid))
        if process.state == "suspended" and operation.request.get("resume"):
            await self._carried_out(self._moves.resume([process], [], requestor=operation.row.requestor))
        return interrupted(operation.row, process.moving.place)

    async def _resolve_restore(self, operation: Operation) -> Outcome:
        """What was restored by half is ended: it stands still, and has done nothing since the checkpoint."""
        pid = await self._criu_has_ended(operation)
        if pid is None:
            return interrupted(operation.row)
        for process in self._supervisor.processes.values():
            if process.row.pid == pid and process.row.origin is not None:
                result = _as_restored(operation.request.get("checkpoint", ""), process)
                return Outcome(state="succeeded", result=result | {"ms": None})
        return interrupted(operation.row)

    async def _criu_has_ended(self, operation: Operation) -> int | None:
        """The one that an earlier daemon started. Returns the pid of what it has restored, if that goes on already;
        otherwise it is ended."""
        folder = self._working(operation)
        pid = await asyncio.to_thread(ended, folder)
        if pid is not None:
            try:
                if stopped(pid):
                    await end(tree(pid))
                    pid = None
            except OSError:
                pid = None
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        return pid

    async def _found_again(self, operation: Operation, name: str) -> Process | None:
        """A process of the last daemon, once its servers have announced themselves, and what else was under way with it
        is resolved."""
        deadline = time.monotonic() + FOUND_WITHIN
        while time.monotonic() < deadline and (
            name in self._supervisor.expected
            or any(row.subject_id == name for row in self._operations.active() if row.id != operation.id)
        ):
            await asyncio.sleep(0.05)
        return self._supervisor.processes.get(name)

    # --- small parts --------------------------------------------------------------------------------------------------

    def _working(self, operation: Operation) -> Path:
        """Where CRIU works for it, and where the next daemon looks for what came of that."""
        return self._folder / f"criu-{operation.id}"

    @contextlib.contextmanager
    def _works_in(self, operation: Operation) -> Iterator[Path]:
        folder = self._working(operation)
        with _of_the_store("there is no folder for CRIU"):
            private_folder(folder)
        try:
            yield folder
        except asyncio.CancelledError:  # this daemon leaves, and CRIU goes on
            raise
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)

    def _path(self, checkpoint: str) -> Path:
        return self._folder / f"{checkpoint}.json"

    def _manifest(self, checkpoint: str) -> Manifest:
        """Raises NotFound, Damaged, Conflict."""
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
        try:
            return Manifest.model_validate_json(document)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise Conflict(
                f"checkpoint {checkpoint[:12]} was made by another version of xMIG: {place}: {first['msg']}",
                code="other_version",
            ) from None

    def _forget(self, checkpoint: str) -> None:
        """Its manifest, and what no other checkpoint has. What another one needs and cannot say, because its manifest
        is damaged, is kept: nothing is removed then. While one is made, nothing is, either: the next time, then."""
        self._path(checkpoint).unlink(missing_ok=True)
        try:
            self._chunks.remove_unneeded(self._needed)
        except (Conflict, Damaged) as error:
            logger.error("nothing is removed from the checkpoints' content", why=str(error))

    def _needed(self) -> set[str]:
        """All pieces that checkpoints have. Raises Damaged."""
        with self._reader.session() as session:
            left = repository.every(session)
        manifests = (self._read(id, expected) for id, expected in left)
        return {chunk.hash for one in manifests for content in contents(one) for chunk in content.chunks}

    async def _carried_out(self, starting: Awaitable[OperationRow]) -> dict[str, Any]:
        """What came of it. Raises Conflict: it was not carried out."""
        row = await self._operations.ended(await starting)
        if row.state != "succeeded":
            problem = row.error or {}
            raise Conflict(
                f"the {row.kind} has {row.state}: {problem.get('detail', 'nobody knows why')}",
                code=problem.get("code"), hint=problem.get("hint", ""),
                process_location=problem.get("process_location"),
            )  # fmt: skip
        return row.result or {}

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


def _as_restored(checkpoint: str, process: Process) -> dict[str, Any]:
    row = process.row
    return {"checkpoint": checkpoint, "job": process.job.id, "process": row.id, "pid": row.pid, "device": row.device}


@contextlib.contextmanager
def _of_the_store(what: str) -> Iterator[None]:
    """Raises Unavailable instead of OSError."""
    try:
        yield
    except OSError as error:
        raise Unavailable(
            f"{what}: {error.strerror}", code="store_failed", hint="make room, or free descriptors; then ask again"
        ) from None


def _check_owners(process: Process, pids: Iterable[int]) -> None:
    """What runs with another user's rights would run with them again, whenever its checkpoint is restored. Raises
    Forbidden."""
    for pid in pids:
        owner = pidfds.owner(pid)
        if owner is not None and owner != process.row.uid:
            raise Forbidden(
                f"process {pid} of the program runs as user {owner}, the program as user {process.row.uid}",
                hint="end it first",
            )


def tree(pid: int) -> list[int]:
    """The process and all that descend from it; none: it has ended."""
    with contextlib.suppress(NotFound):
        return processes_of(pid)
    return []


def kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


async def end(pids: Iterable[int]) -> None:
    """Kill them, and wait until whoever started them knows that: until then nobody else can have their pids."""
    pids = list(pids)
    kill(pids)
    deadline = time.monotonic() + GONE_WITHIN
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        await asyncio.sleep(0.005)


def stopped(pid: int) -> bool:
    """By SIGSTOP. Raises OSError: there is no such process."""
    return pid > 0 and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
