"""Checkpoints as operations: made, verified, restored, removed.

How one is written down is in making.py. A failure anywhere leaves the process where it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

from pydantic import ValidationError
from sqlalchemy.orm import Session

from xmigd import log
from xmigd.checkpoints import archive, live, opened, own_files, repository
from xmigd.checkpoints.apart import outer_pid, root_in
from xmigd.checkpoints.content import Chunks, Writing
from xmigd.checkpoints.criu import Criu, ended
from xmigd.checkpoints.keys import private_key
from xmigd.checkpoints.last import MakingLast
from xmigd.checkpoints.making import Making, check_obstacles, check_owners, of_the_store
from xmigd.checkpoints.manifest import Manifest, OpenFile, Program, contents
from xmigd.checkpoints.mirror import SecondPlace
from xmigd.checkpoints.mirroring import Mirroring
from xmigd.checkpoints.movable import processes_of
from xmigd.checkpoints.outward import ends, outward
from xmigd.checkpoints.parents import leave_parent
from xmigd.checkpoints.part import MakingPart, Part
from xmigd.checkpoints.room import Room, check_devices
from xmigd.checkpoints.schemas import CheckpointInfo
from xmigd.checkpoints.settling import Settling
from xmigd.checkpoints.several import root_of, whole_root
from xmigd.database.reader import Reader
from xmigd.database.writer import Writer
from xmigd.devices.names import as_one, devices_of, in_turn
from xmigd.errors import Conflict, Forbidden, Invalid, NotFound, Unavailable
from xmigd.failpoints import Write
from xmigd.ids import new_id
from xmigd.ipc import pidfd as pidfds
from xmigd.ipc.fds import Fd, close_all
from xmigd.jobs import repository as jobs
from xmigd.jobs.membership import new_job
from xmigd.memory.handles import Handle, JobMemory
from xmigd.memory.restored import mapped_memory
from xmigd.migrations.places import Places
from xmigd.migrations.service import OPERATION, Moves
from xmigd.native import Layout
from xmigd.operations.operation import Operation
from xmigd.operations.repository import OperationRow
from xmigd.operations.service import Operations, Outcome, interrupted
from xmigd.processes import repository as process_rows
from xmigd.published import Published, close, listen, pass_on
from xmigd.records import JobRow, Priority, ProcessRow
from xmigd.security.callers import Caller
from xmigd.store.objects import Damaged, private_folder, write_durably
from xmigd.subscribers import Subscribers
from xmigd.supervisor.process import Process
from xmigd.supervisor.supervisor import Supervisor
from xmigd.users import user_name

logger = log.get("checkpoints")

CREATE, RESTORE, VERIFY = "checkpoint", "restoration", "verification"  # operations
EXPORT, IMPORT = "export", "import"
GONE_WITHIN = 5.0  # seconds in which a parent takes note of the end of a program
KEPT_WITHIN = 60.0  # seconds in which the servers that hold suspended processes have everything
FOUND_WITHIN = 60.0  # seconds after a start in which a process of the last daemon is found again


Keep = Callable[[Sequence[Process], int], Awaitable[None]]  # of a program that was made again: its pid, too
Work = Callable[[Operation], Awaitable[dict[str, Any]]]


class Across(Protocol):
    """Checkpoints of jobs with ranks on several nodes (sets.py)."""

    async def create(self, process: Process, *, stop: bool, requestor: str, by_policy: bool) -> OperationRow: ...

    async def restore(
        self, caller: Caller, checkpoint: str, devices: Sequence[str], instead: Mapping[str, str], *, requestor: str
    ) -> OperationRow: ...

    async def resolve_create(self, operation: Operation) -> bool:
        """Do the programs of this node end at what it has made before the daemon was restarted?"""
        ...

    async def goes_on(self, operation: Operation) -> bool:
        """Does what it has restored before the daemon was restarted, and stands still? Once that is decided."""
        ...

    def others_of(self, nodes: Sequence[str]) -> list[str]:
        """Those whose parts are removed with that of this node. Raises Conflict: another node removes it."""
        ...

    def removed(self, nodes: Sequence[str]) -> None:
        """These are to remove their parts of something."""

    async def verify(self, checkpoint: str, nodes: Sequence[str]) -> None:
        """The parts of the others. Raises Conflict: one is damaged; Unavailable: one did not answer."""


class Checkpoints:
    def __init__(
        self, *, supervisor: Supervisor, moves: Moves, operations: Operations, writer: Writer, reader: Reader,
        layout: Layout, folder: Path, node: str, criu: Criu, devices: Sequence[str], room: Room,
        chunks: Chunks, mirroring: Mirroring | None, settling: Settling, places: Places,
    ) -> None:  # fmt: skip
        """`folder`: where they are kept, their content in `chunks`. `devices`: of this node."""
        self.restored: Subscribers[tuple[str, str]] = Subscribers()  # the job of the checkpoint, and the new one
        self._room = room
        self._supervisor = supervisor
        self._moves = moves
        self._operations = operations
        self._writer = writer
        self._reader = reader
        self.layout = layout
        self._folder = folder
        self._node = node
        self.criu = criu
        self._devices = devices
        self.chunks = chunks
        self._mirroring = mirroring
        self._settling = settling
        self._places = places
        self.across: Across
        self._written: set[str] = set()  # by programs that are being restored
        self._exported = folder / "exported"  # the only folder that files are written to and read from for others
        operations.register(CREATE, self._resolve_create)
        operations.register(RESTORE, self._resolve_restore)

    # --- what is requested --------------------------------------------------------------------------------------------

    def page(self, **conditions: Any) -> list[CheckpointInfo]:
        with self._reader.session() as session:
            rows = repository.page(session, **conditions)
        mirror = None if self._mirroring is None else self._mirroring.name
        more = []
        for row in rows:
            mirrored = mirror is not None and row["mirrored_in"] == mirror
            places = {"memory": self.chunks.memory.has(row["id"]), "disk": row["on_disk"], "mirror": mirrored}
            nodes = [] if row["nodes"] is None else row["nodes"].split(",")
            its = {"user": user_name(row["uid"]), "mirrored": mirrored, "nodes": nodes}
            more.append(its | {"places": [place for place, there in places.items() if there]})
        return [CheckpointInfo.model_validate(row | its) for row, its in zip(rows, more, strict=True)]

    def find(self, caller: Caller, checkpoint: str) -> CheckpointInfo:
        """Raises NotFound."""
        found = self.page(checkpoint=checkpoint, owner=caller.owner)
        if not found:
            raise NotFound(f"there is no checkpoint {checkpoint[:64]!r}", hint="xmigctl checkpoint list lists them")
        return found[0]

    async def create(
        self, process: Process, *, stop: bool, requestor: str, by_policy: bool = False, last: bool = False
    ) -> OperationRow:  # fmt: skip
        """`last`: of one that is being lost, whose server stands at its last snapshot. Raises Conflict,
        Unavailable: it cannot be made."""
        if process.job.nodes is not None and not last:
            return await self.across.create(process, stop=stop, requestor=requestor, by_policy=by_policy)
        making = await self.prepared(process, stop=stop, last=last)
        id = new_id()

        async def work(operation: Operation) -> dict[str, Any]:
            try:
                return await self.make(operation, id, making, process)
            except Exception:
                await asyncio.to_thread(self.forget, id)  # what it stored takes the room that others need
                raise

        return await self.begin(id, making, process, work, requestor=requestor, by_policy=by_policy)

    async def begin(
        self, id: str, making: Making, process: Process, work: Work, *, requestor: str, by_policy: bool = False,
        nodes: Sequence[str] = (),
    ) -> OperationRow:  # fmt: skip
        """Raises Conflict, Unavailable."""
        return await self._operations.start(
            CREATE, subject=("job", process.job.id), job_id=process.job.id, owner=process.job.uid,
            requestor=requestor, work=work,
            request={
                "checkpoint": id, "processes": [one.row.id for one in making.processes], "root": making.root,
                "awake": [one.row.id for one in making.awake], "by_policy": by_policy, "nodes": list(nodes),
                "stop": making.stop, "root_start": pidfds.start_time(making.root),
            },
        )  # fmt: skip

    async def check_creation(self, process: Process) -> None:
        """Raises Conflict, Unavailable: a checkpoint of its job cannot be made now. Changes nothing."""
        await self.prepared(process, stop=True, last=False)

    async def prepared(self, process: Process, *, stop: bool, last: bool = False, part: Part | None = None) -> Making:
        """`part`: of a job with ranks on several nodes. Raises Conflict, Unavailable: it cannot be made."""
        await self.criu.check()
        if process.job.nodes is not None and part is None:
            raise Conflict(
                "the job has ranks on several nodes: what is here is only a part of it", code="several_nodes"
            )
        if any(row.kind == CREATE and row.job_id == process.job.id for row in self._operations.active()):
            raise Conflict("a checkpoint of this job is being made already", code="operation_under_way",
                           hint="xmigctl op list shows it")  # fmt: skip
        if last:
            making: Making = MakingLast(
                [process], root_in(process.row.pid), criu=self.criu, layout=self.layout, stop=False,
                groups=self._supervisor,
            )  # fmt: skip
        else:
            making = self.making(process, stop=stop, part=part)
        making.check_room()
        await self.check_movable(process, making.root, apart=part is not None)
        earlier = await asyncio.to_thread(self.page, job=process.job.id)
        await asyncio.to_thread(self._room.check, making.processes, making.root, earlier)
        return making

    def making(self, process: Process, *, stop: bool, part: Part | None = None) -> Making:
        """Raises Conflict."""
        processes = self._supervisor.processes_of(process.job.id)
        processes.sort(key=lambda one: (one.row.start_time, one.row.pid))  # as others see them in turn
        if any(one.paused for one in processes):
            raise Conflict("the process is paused", code="paused")
        alone = root_in(process.row.pid) if len(processes) == 1 else None
        root = whole_root(process.row.pid) or alone or root_of(process.job, processes)
        kind = Making if part is None else MakingPart
        making = kind(processes, root, criu=self.criu, layout=self.layout, stop=stop, groups=self._supervisor)
        if part is not None and isinstance(making, MakingPart):
            making.part = part
        return making

    async def restore(
        self, caller: Caller, checkpoint: str, devices: Sequence[str], *, own_files: bool = False,
        publish: Sequence[str] = (), nodes: Mapping[str, str] | None = None, requestor: str,
    ) -> OperationRow:  # fmt: skip
        """In a job of its own. `own_files`: what it writes to is copied. `publish`: ports of its network. `nodes`: by
        the names of nodes that have parts of it, others that get these. Raises NotFound, Damaged, Invalid, Conflict,
        Unavailable: it cannot be restored."""
        found = await asyncio.to_thread(partial(self.page, checkpoint=checkpoint, owner=caller.owner))
        if nodes or (found and found[0].nodes):
            if own_files or publish:
                raise Invalid("a job of several nodes is restored with its own files, and without ports")
            return await self.across.restore(caller, checkpoint, devices, nodes or {}, requestor=requestor)
        info = await asyncio.to_thread(self.find, caller, checkpoint)
        manifest = await asyncio.to_thread(self._manifest, info.id)
        places = await self.check_restoration(manifest, devices, info.device, own_files=own_files)

        async def work(operation: Operation) -> dict[str, Any]:
            chosen = [as_one(each) for each in places]
            try:
                async with self.files_of(manifest, own=own_files):
                    return await self.make_again(
                        operation, manifest, chosen, requestor, published=published, copied=own_files
                    )
            finally:
                close(published)

        published = self._published(manifest, publish)

        return await self._operations.start(
            RESTORE, subject=("checkpoint", info.id), owner=info.uid, requestor=requestor, work=work,
            request={"checkpoint": info.id},
        )  # fmt: skip

    async def check_restoration(
        self, manifest: Manifest, devices: Sequence[str], before: str, *, own_files: bool = False
    ) -> list[list[str]]:
        """The devices of each program. Raises NotFound, Invalid, Conflict, Unavailable: it cannot be restored here."""
        await self.criu.check()
        places = chosen_devices(manifest.programs, list(devices), before)
        for program, chosen in zip(manifest.programs, places, strict=True):
            self.check_place(program, chosen, needs_pid=not manifest.namespaces)
        check_devices(manifest.programs, places, await self._places.known())
        files = manifest.programs[0].files
        await asyncio.to_thread(live.check_files, files, copied=own_files)
        if not own_files:
            await self._check_unused(files)
        return places

    async def _check_unused(self, files: Sequence[OpenFile]) -> None:
        """Raises Conflict."""
        running = [one.row.pid for one in self._supervisor.processes.values() if one.state != "ended"]
        await asyncio.to_thread(live.check_unused, files, running)

    @contextlib.asynccontextmanager
    async def files_of(self, manifest: Manifest, *, own: bool = False) -> AsyncIterator[None]:
        """While it is restored no other restoration has the files that it writes to, and once it is, its program is
        found with them. Raises Conflict."""
        files = () if own else manifest.programs[0].files
        written = {file.path for file in files if file.writable}
        if others := self._written & written:
            raise Conflict(
                f"a program that is being restored writes to {min(others)}, too", code="file_in_use",
                hint="let this one have copies: --own-files",
            )  # fmt: skip
        self._written |= written
        try:
            await self._check_unused(files)
            yield
        finally:
            self._written -= written

    async def verify(self, caller: Caller, checkpoint: str, *, requestor: str) -> OperationRow:
        """Read all of it, and compare it with its hashes. Raises NotFound, Damaged."""
        info = await asyncio.to_thread(self.find, caller, checkpoint)
        manifest = await asyncio.to_thread(self._manifest, info.id)

        async def work(operation: Operation) -> dict[str, Any]:
            operation.progress("reading", total_bytes=info.content_bytes)
            pieces = archive.pieces_of(manifest)
            for name, size in pieces.items():
                operation.check_cancelled()
                await asyncio.to_thread(self.chunks.on_disk if "disk" in info.places else self.chunks.get, name, size)
            if info.nodes:
                operation.progress("waiting")
                await self.across.verify(info.id, info.nodes)
            return {"checkpoint": info.id, "pieces": len(pieces), "bytes": sum(pieces.values())}

        return await self._operations.start(
            VERIFY, subject=("checkpoint", info.id), owner=info.uid, requestor=requestor, work=work
        )

    async def check(self, checkpoint: str) -> None:
        """The same at once, for the daemon itself. Raises Damaged."""
        manifest = await asyncio.to_thread(self._manifest, checkpoint)
        for name, size in archive.pieces_of(manifest).items():
            await asyncio.to_thread(self.chunks.on_disk, name, size)

    async def export(self, caller: Caller, checkpoint: str, key_file: str | None, *, requestor: str) -> OperationRow:
        """Into one file of the folder `exported`, for another node. Raises NotFound, Damaged, Conflict, Invalid."""
        key = await asyncio.to_thread(private_key, key_file)
        info = await asyncio.to_thread(self.find, caller, checkpoint)
        manifest = await asyncio.to_thread(self._manifest, info.id)
        path = self._exported / f"{info.id}.xmig"

        async def work(operation: Operation) -> dict[str, Any]:
            operation.progress("writing", total_bytes=info.content_bytes)
            report = self.reporter(operation)

            def write() -> int:
                private_folder(path.parent)
                return archive.write(manifest, self.chunks, path, key=key, progress=report)

            with of_the_store("it cannot be exported"):
                size = await asyncio.to_thread(write)
            return {"checkpoint": info.id, "path": str(path), "bytes": size, "encrypted": key is not None}

        return await self._operations.start(
            EXPORT, subject=("checkpoint", info.id), owner=info.uid, requestor=requestor, work=work, cancellable=False,
        )  # fmt: skip

    async def take(self, file: str, key_file: str | None, *, requestor: str) -> OperationRow:
        """Import a file of the folder `exported`. It belongs to the user that its program ran as. Raises NotFound,
        Invalid."""
        key = await asyncio.to_thread(private_key, key_file)
        path = self._exported / file
        if not await asyncio.to_thread(path.is_file):
            raise NotFound(f"there is no file {path}", hint="copy it there")

        async def work(operation: Operation) -> dict[str, Any]:
            operation.progress("reading")
            return await self._import(operation, path, key)

        return await self._operations.start(
            IMPORT, subject=("file", file), requestor=requestor, work=work, cancellable=False
        )

    async def _import(self, operation: Operation, path: Path, key: bytes | None) -> dict[str, Any]:
        with contextlib.ExitStack() as stack:
            with of_the_store(f"{path} cannot be imported"):
                writing = stack.enter_context(self.chunks.writing())
                opened = stack.enter_context(await asyncio.to_thread(partial(archive.Archive.open, path, key=key)))
                manifest = opened.manifest
                if await asyncio.to_thread(self.page, checkpoint=manifest.id):
                    raise Conflict(f"checkpoint {manifest.id[:12]} is here already", code="exists")
                if not manifest.programs:
                    raise Damaged(f"{path} has no program")
                operation.progress("storing", total_bytes=opened.content_bytes)
                report = self.reporter(operation)
                await asyncio.to_thread(opened.import_into, writing, progress=report)
                await asyncio.to_thread(writing.sync)
            return await self._take_in(manifest, writing)

    async def remove(self, caller: Caller, checkpoint: str) -> None:
        """Raises NotFound, Conflict: it is being restored."""
        info = await asyncio.to_thread(self.find, caller, checkpoint)
        for row in self._operations.active():
            if row.subject_id == info.id:
                raise Conflict(f"a {row.kind} of this checkpoint is under way", code="operation_under_way",
                               operation=row.id)  # fmt: skip
        others = self.across.others_of(info.nodes)
        await self.remove_here(info.id, others)
        self.across.removed(others)

    async def remove_here(self, checkpoint: str, elsewhere: Sequence[str] = ()) -> None:
        """`elsewhere`: nodes that are to remove their parts of it, too. Raises Unavailable."""
        mirrored = self._mirroring is not None
        await self._write(
            "checkpoints.remove",
            lambda session: repository.remove(session, checkpoint, mirrored=mirrored, elsewhere=elsewhere),
        )
        await asyncio.to_thread(self.forget, checkpoint)
        self._to_mirror()

    async def removed_elsewhere(self, checkpoint: str, node: str) -> None:
        """Raises Unavailable."""
        await self._write(
            "checkpoints.part_removed", lambda session: repository.removed_elsewhere(session, checkpoint, node)
        )

    # --- to make one --------------------------------------------------------------------------------------------------

    async def make(self, operation: Operation, id: str, making: Making, process: Process) -> dict[str, Any]:
        # A daemon that leaves interrupts this anywhere, and does nothing about it: the next one does.
        with contextlib.ExitStack() as stack:
            with of_the_store("it cannot be stored"):
                # One whose program ends here has to outlive the machine, too.
                writing = stack.enter_context(self.chunks.writing(in_memory=True, durable=making.stop or making.last))
            images = stack.enter_context(self.works_in(operation))
            operation.check_cancelled(process.moving.place)
            try:
                programs = await making.write_down(operation, writing, images, lambda: self.reporter(operation))
                manifest = making.manifest(id, self._node, programs)
                result = await self._keep(manifest, writing) | {
                    "standstill_ms": making.standstill_ms, "by_policy": operation.request.get("by_policy", False),
                }  # fmt: skip
                device = ",".join(one.row.device for one in making.processes)
                if making.stop:
                    operation.point_of_no_return("it is a checkpoint, and the program ends")
                whole = not manifest.nodes
                await self._list(manifest, process.job.uid, process.row.command, device, result, whole=whole)
                await making.kept(operation)
            except Exception:
                self._path(id).unlink(missing_ok=True)
                await making.go_on()
                raise
            if making.stop:
                await self._end(making.processes, making.pids)
        return result | making.took | {"copied_bytes": making.copied_bytes}

    @staticmethod
    async def _end(processes: Sequence[Process], pids: Sequence[int]) -> None:
        """Programs that stand still."""
        for one in processes:
            one.expect_end()
        kill(pids)
        for one in processes:
            one.let_go_on()
        await end(pids)

    async def _keep(self, manifest: Manifest, writing: Writing) -> dict[str, Any]:
        """Raises Unavailable: no room."""
        with of_the_store("it cannot be stored"):
            document = manifest.model_dump_json().encode()
            await asyncio.to_thread(write_durably, self._path(manifest.id), document)
            await asyncio.to_thread(writing.finish, manifest.id, archive.pieces_of(manifest))
        return {
            "checkpoint": manifest.id,
            "content_bytes": sum(chunk.bytes for content in contents(manifest) for chunk in content.chunks),
            "stored_bytes": writing.stored_bytes, "standstill_ms": None, "on_disk": writing.on_disk,
        }  # fmt: skip

    async def _list(
        self, manifest: Manifest, uid: int, command: str, device: str, result: dict[str, Any], *, whole: bool
    ) -> None:
        """From now on it is one, if it is `whole`. Raises Unavailable."""
        document = manifest.model_dump_json().encode()
        values = {name: value for name, value in result.items() if name != "checkpoint"} | {
            "id": manifest.id, "job_id": manifest.job, "job_name": manifest.job_name, "uid": uid, "command": command,
            "device": device, "programs": len(manifest.programs),
            "manifest": hashlib.sha256(document).hexdigest(), "created_at": manifest.created_at,
            "nodes": ",".join(manifest.nodes) or None, "whole": whole,
        }  # fmt: skip
        await self._write("checkpoints.add", lambda session: repository.add(session, values))
        self._settling.wake()
        self._to_mirror()

    async def check_movable(self, process: Process, pid: int, *, apart: bool = False) -> None:
        """Raises Conflict: something stands in the way, also of what would only be missing afterwards. `pid`: of what
        is dumped. `apart`: other nodes dump what it is connected with, which they have to say."""
        check_owners(process, await asyncio.to_thread(processes_of, pid))
        elsewhere = ends(await asyncio.to_thread(outward, pid)) if apart else frozenset[tuple[str, str]]()
        await asyncio.to_thread(check_obstacles, pid, self.criu, elsewhere)

    # --- to restore one -----------------------------------------------------------------------------------------------

    def check_place(self, program: Program, devices: Sequence[str], *, needs_pid: bool) -> None:
        """Raises NotFound, Conflict."""
        if program.layout != self.layout.layout_version:
            raise Conflict(
                f"it was made by another version of xMIG: memory of layout {program.layout}, and this one has "
                f"{self.layout.layout_version}", code="other_version",
            )  # fmt: skip
        for device, had in zip(devices, program.devices, strict=True):
            if device not in self._devices:
                raise NotFound(f"there is no device {device!r}", code="no_such_device", hint="xmigctl device list")
            if device.partition(":")[0] != had.kind:
                raise Conflict(f"the program was on {had.kind} devices, {device} is none", code="other_kind")
        if needs_pid and Path(f"/proc/{program.pid}").exists():
            raise Conflict(
                f"another process has the pid {program.pid}, which the program needs", code="pid_in_use",
                hint="end the process that has it; if it is the job itself: xmigctl stop",
            )  # fmt: skip

    async def make_again(
        self, operation: Operation, manifest: Manifest, devices: Sequence[str], requestor: str, *,
        published: Sequence[Published] = (), copied: bool = False, keep: Keep | None = None, asleep: bool = False,
        nodes: str | None = None, before: Keep | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Restore it. `keep` is called when everything is there and the program is still stopped; then it stays so. If
        that raises, nothing is left of it. `asleep`: its processes are suspended, and stay so. `nodes`: on which its
        job has ranks; `before` is called before they are resumed. Raises Conflict, Damaged, Unavailable."""
        assert operation.row.owner is not None
        copies: dict[str, str] = {}
        began, programs = time.monotonic(), manifest.programs
        operation.progress("reading", total_bytes=sum(m.content.bytes for one in programs for m in one.memory))
        report = self.reporter(operation)
        contents: list[tuple[dict[int, Handle], tuple[Fd, Fd]]] = []
        made: list[Process] = []
        try:
            with of_the_store("its memory cannot be made"):
                for program in programs:
                    contents.append(await asyncio.to_thread(live.restore_memory, self.chunks, program, report))
            with self.works_in(operation) as images:
                with of_the_store("its images cannot be written"):
                    await asyncio.to_thread(live.restore_images, self.chunks, programs[0], images)
                    await asyncio.to_thread(leave_parent, images, _root_of(manifest))
                if copied:
                    first = programs[0]
                    copies = await asyncio.to_thread(
                        partial(own_files.copy_files, first.files, operation.row.id[:12], uid=first.uid, gid=first.gid)
                    )
                    await asyncio.to_thread(own_files.use, images, copies)
                names = await asyncio.to_thread(opened.check_names, images)
                operation.point_of_no_return("the program is being restored")
                operation.progress("restoring")
                root = await self.criu.restore(images, leader=programs[0].leader, namespaces=manifest.namespaces)
                try:
                    owners = {file.path: file.owner for file in programs[0].files}
                    await asyncio.to_thread(opened.check_opened, tree(root), names, owners, programs[0].uid)
                    await asyncio.to_thread(pass_on, published, root)
                    priority = await asyncio.to_thread(self._class_of, manifest, operation.row.owner)
                    job = self._job_of(manifest, root, devices, operation.row.owner, priority, nodes)
                    for program, device in zip(programs, devices, strict=True):
                        content = contents[len(made)]
                        made.append(self._take(job, program, device, self._pid_of(manifest, program, root), *content))
                    if before is not None:
                        await before(made, root)
                    operation.progress("resuming", job=job.id, root=root)
                    if asleep:
                        await self._until_kept(made)
                    else:
                        await self._carried_out(self._moves.resume(made, [], requestor=requestor))
                    if keep is not None:
                        await keep(made, root)
                except Exception:
                    kill(tree(root))
                    raise
                if keep is None:
                    live.let_go_on(tree(root))
        except Exception:
            await asyncio.to_thread(own_files.remove, copies)
            raise
        finally:
            for handles, snapshots in contents[len(made) :]:
                close_all([*snapshots, *(handle.fd for handle in handles.values())])
        self.restored((manifest.job, job.id))
        logger.info("a checkpoint is restored", checkpoint=manifest.id[:12], job=job.id[:12], pid=root)
        return _as_restored(manifest.id, [one.row for one in made]) | {
            "root": root, "ms": (time.monotonic() - began) * 1e3, "files": copies,
        }  # fmt: skip

    @staticmethod
    async def _until_kept(made: Sequence[Process]) -> None:
        """By servers, which outlive this daemon. Raises Unavailable."""
        deadline = time.monotonic() + KEPT_WITHIN
        while not all(one.machine.kept for one in made):
            if time.monotonic() > deadline or any(one.state != "suspended" for one in made):
                raise Unavailable("no server has taken what the suspended processes have; the daemon's log says why")
            await asyncio.sleep(0.01)

    @staticmethod
    def _published(manifest: Manifest, texts: Sequence[str]) -> list[Published]:
        """Raises Invalid, Conflict."""
        if texts and "net" not in manifest.namespaces:
            raise Invalid("the program has no network of its own: its ports are the machine's")
        return listen(texts, uid=manifest.programs[0].uid)

    @staticmethod
    def _pid_of(manifest: Manifest, program: Program, root: int) -> int:
        """CRIU gives each process the pid that it had, or that it sees. Raises Conflict."""
        if manifest.namespaces:
            found = outer_pid(tree(root), program.inner_pid)
            if found is None:
                raise Conflict(f"process {program.inner_pid} is not among those that were restored", code="criu_failed")
            return found
        before = manifest.root or manifest.programs[0].pid
        if root != before or (program.pid != root and program.pid not in tree(root)):
            raise Conflict(f"process {program.pid} is not among those that were restored", code="criu_failed")
        return program.pid

    def _class_of(self, manifest: Manifest, uid: int) -> Priority:
        """A manifest may come from anywhere: nobody becomes critical by what it says."""
        with self._reader.session() as session:
            earlier = jobs.find(session, manifest.job)
            if earlier is not None and earlier.uid == uid:
                return cast(Priority, earlier.priority)
        return "normal" if manifest.priority == "critical" else manifest.priority

    @staticmethod
    def _job_of(
        manifest: Manifest, root: int, devices: Sequence[str], uid: int, priority: Priority, nodes: str | None
    ) -> JobRow:
        command = manifest.programs[0].command
        device = devices[0] if len(devices) == 1 else None
        runner = (root, pidfds.start_time(root))
        job, _ = new_job(
            name=manifest.job_name, command=command, uid=uid, device=device, registered=True, runner=runner,
            restored_from=manifest.job, priority=priority, memory_quota=manifest.memory_quota or None, nodes=nodes,
        )  # fmt: skip
        return job

    def _take(
        self, job: JobRow, program: Program, device: str, pid: int, handles: dict[int, Handle],
        snapshots: tuple[Fd, Fd],
    ) -> Process:  # fmt: skip
        """A process that CRIU has made, with its memory, as a suspended one of this job. Raises NotFound, Forbidden."""
        client = Fd(os.pidfd_open(pid))
        try:
            if pidfds.owner(pid) != program.uid:
                raise Forbidden(f"process {pid} is not the program that was restored")
            shared = mapped_memory(pid, program.shared_bytes)
        except BaseException:
            client.close()
            raise
        row = ProcessRow(
            id=new_id(), job=job.id, pid=pid, start_time=pidfds.start_time(pid), uid=program.uid, gid=program.gid,
            command=program.command, device=device, origin=program.id,
        )  # fmt: skip
        return self._supervisor.restore(job, row, client, JobMemory(*shared, *snapshots), handles, program.generation)

    # --- after a restart ----------------------------------------------------------------------------------------------

    async def _resolve_create(self, operation: Operation) -> Outcome:
        """The process goes on if it was paused for it. What was stored is removed if it did not become one."""
        await self.criu_has_ended(operation)
        checkpoint = operation.request.get("checkpoint", "")
        ends = False
        if operation.request.get("nodes"):
            ends = await self.across.resolve_create(operation)
        elif not await asyncio.to_thread(self.page, checkpoint=checkpoint):
            await asyncio.to_thread(self.forget, checkpoint)
        awake = operation.request.get("awake", [])
        found = [await self.found_again(operation, name) for name in operation.request.get("processes", [])]
        processes = [one for one in found if one is not None]
        if ends:
            root, start = operation.request["root"], operation.request["root_start"]
            await self._end(processes, tree(root) if pidfds.same_process(root, start) else [])
            return Outcome(state="succeeded", result={"checkpoint": checkpoint})
        if not processes:
            return interrupted(operation.row)
        live.let_go_on(tree(operation.request.get("root", 0)))
        for process in processes:
            if process.row.id in awake:
                process.let_go_on()
        asleep = [one for one in processes if one.state == "suspended" and one.row.id in awake]
        if asleep:
            requestor = operation.row.requestor
            await self._carried_out(self._moves.resume(asleep, [], requestor=requestor, paused=True))
        return interrupted(operation.row, processes[0].moving.place)

    async def _resolve_restore(self, operation: Operation) -> Outcome:
        """What was restored by half is ended: it stands still, and has done nothing since the checkpoint. What was
        resumed has gone on, and is not to be restored once more: that it is not written down here changes nothing."""
        left, stood_still = await asyncio.to_thread(ended, self._working(operation)), False
        with contextlib.suppress(OSError):  # it has ended since
            stood_still = left is not None and stopped(left)
        several = stood_still and bool(operation.request.get("nodes"))
        if left is not None and several and await self.across.goes_on(operation):
            live.let_go_on(tree(left))
            stood_still = False
            await asyncio.to_thread(self.forget_images, operation)
        else:
            await self.criu_has_ended(operation)
        progress = operation.row.progress or {}
        if "job" not in progress or stood_still:
            return interrupted(operation.row)
        made = await asyncio.to_thread(self._resumed, progress["job"])
        if not made:
            return interrupted(operation.row)
        result = _as_restored(operation.request.get("checkpoint", ""), made)
        return Outcome(state="succeeded", result=result | {"root": progress["root"], "ms": None})

    def _resumed(self, job: str) -> list[ProcessRow]:
        """The processes of a job that was restored, if they were resumed then, as they were made."""
        if not self._operations.find(job=job, kind=OPERATION["resume"], state="succeeded", limit=1):
            return []
        with self._reader.session() as session:
            return process_rows.of_job(session, job)

    async def criu_has_ended(self, operation: Operation) -> int | None:
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

    # --- one part of several ------------------------------------------------------------------------------------------

    async def is_whole(self, checkpoint: str) -> None:
        """All parts exist: from now on it is a checkpoint. Raises Unavailable."""
        await self._write("checkpoints.whole", lambda session: repository.is_whole(session, checkpoint))
        self._settling.wake()
        self._to_mirror()

    async def forget_part(self, checkpoint: str) -> None:
        """Of one that is not whole, and never will be. Raises Unavailable."""
        await self._write("checkpoints.part_removed", lambda session: repository.remove_part(session, checkpoint))
        if not await asyncio.to_thread(self.page, checkpoint=checkpoint):
            await asyncio.to_thread(self.forget, checkpoint)

    async def part(self, checkpoint: str, node: str) -> Manifest:
        """That the node has made: if it is not here, out of the mirror. Raises NotFound, Damaged, Conflict,
        Unavailable."""
        if await asyncio.to_thread(self.page, checkpoint=checkpoint):
            here = await asyncio.to_thread(self._manifest, checkpoint)
            if here.node != node:
                raise Conflict(
                    f"this node has the part of {here.node} itself: it cannot have that of {node}, too", code="exists"
                )
            return here
        if self._mirroring is None:
            raise NotFound(
                f"the part of {node} is not on this node", code="no_such_part",
                hint="import an export of it, or set checkpoint_mirror",
            )  # fmt: skip
        return await self._from_mirror(self._mirroring.mirror.of(node), checkpoint, node)

    async def _from_mirror(self, place: SecondPlace, checkpoint: str, node: str) -> Manifest:
        document = await asyncio.to_thread(place.document, checkpoint)
        if document is None:
            raise NotFound(f"the part of {node} is neither on this node nor in {place.place}", code="no_such_part")
        try:
            manifest = Manifest.model_validate_json(document)
        except ValidationError:
            raise Damaged(f"the manifest of checkpoint {checkpoint[:12]} in {place.place} is damaged") from None
        if manifest.id != checkpoint or manifest.node != node or not manifest.programs:
            raise Damaged(f"the manifest in {place.place} is of another checkpoint")

        def copy(writing: Writing) -> None:
            for name, size in archive.pieces_of(manifest).items():
                if (piece := place.piece(name, size)) is None:
                    raise Damaged(f"piece {name[:12]} is not in {place.place}, or is damaged")
                writing.take(name, size, piece)

        if self._path(checkpoint).exists():
            raise Conflict(
                "this node has a part itself, and does not know whether all others exist", code="exists",
                hint="ask again once the node that leads is in reach",
            )  # fmt: skip
        with self.chunks.writing() as writing, of_the_store(f"the part of {node} cannot be copied from the mirror"):
            await asyncio.to_thread(copy, writing)
            await asyncio.to_thread(writing.sync)
            await self._take_in(manifest, writing)
        return manifest

    async def _take_in(self, manifest: Manifest, writing: Writing) -> dict[str, Any]:
        """What comes from elsewhere. It belongs to the user that its program ran as. Raises Unavailable."""
        result = await self._keep(manifest, writing)
        program = manifest.programs[0]
        device = as_one([f"{seen.kind}:{place}" for place, seen in enumerate(program.devices)])
        await self._list(manifest, program.uid, program.command, device, result, whole=True)
        return result

    async def found_again(self, operation: Operation | None, name: str) -> Process | None:
        """A process of the last daemon, once its servers have announced themselves, and what else was under way with it
        is resolved."""
        deadline = time.monotonic() + FOUND_WITHIN
        own = None if operation is None else operation.id
        while time.monotonic() < deadline and (
            name in self._supervisor.expected
            or any(row.subject_id == name for row in self._operations.active() if row.id != own)
        ):
            await asyncio.sleep(0.05)
        return self._supervisor.processes.get(name)

    # --- small parts --------------------------------------------------------------------------------------------------

    def forget_images(self, operation: Operation) -> None:
        """That CRIU needed for it. Blocks."""
        shutil.rmtree(self._working(operation), ignore_errors=True)

    def _working(self, operation: Operation) -> Path:
        """Where CRIU works for it, and where the next daemon looks for what came of that."""
        return self._folder / f"criu-{operation.id}"

    @contextlib.contextmanager
    def works_in(self, operation: Operation) -> Iterator[Path]:
        folder = self._working(operation)
        with of_the_store("there is no folder for CRIU"):
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

    def _to_mirror(self) -> None:
        if self._mirroring is not None:
            self._mirroring.wake()

    def _read(self, checkpoint: str, expected: str) -> Manifest:
        try:
            document = repository.document(self._folder, checkpoint, expected)
        except Damaged:
            mirrored = None if self._mirroring is None else self._mirroring.mirror.manifest(checkpoint, expected)
            if mirrored is None:
                raise
            document = mirrored
        try:
            return Manifest.model_validate_json(document)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise Conflict(
                f"checkpoint {checkpoint[:12]} was made by another version of xMIG: {place}: {first['msg']}",
                code="other_version",
            ) from None

    def forget(self, checkpoint: str) -> None:
        """Its manifest, and what no other checkpoint has. What another one needs and cannot say, because its manifest
        is damaged, is kept: nothing is removed then. While one is made, nothing is, either: the next time, then."""
        self._path(checkpoint).unlink(missing_ok=True)
        self.chunks.memory.remove(checkpoint)
        try:
            self.chunks.remove_unneeded(self._needed)
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
    def reporter(operation: Operation) -> Callable[[int], None]:
        """For a thread: how many bytes are done."""
        loop = asyncio.get_running_loop()
        phase = operation.row.phase

        def report(done: int) -> None:
            loop.call_soon_threadsafe(lambda: operation.progress(phase, processed_bytes=done))

        return report


def _as_restored(checkpoint: str, made: Sequence[ProcessRow]) -> dict[str, Any]:
    first = made[0]
    return {
        "checkpoint": checkpoint, "job": first.job, "process": first.id, "pid": first.pid, "device": first.device,
        "processes": [one.id for one in made],
    }  # fmt: skip


def _root_of(manifest: Manifest) -> int:
    """As CRIU's images name it: the first process of a pid namespace sees itself as 1."""
    return 1 if manifest.namespaces else manifest.root or manifest.programs[0].pid


def chosen_devices(programs: Sequence[Program], named: Sequence[str], before: str) -> list[list[str]]:
    """Of each program: those that it had, or as many of the named ones, in turn. Raises Invalid. `before`: where the
    program was, if the checkpoint does not say it of each."""
    if not named:
        return [devices_of(program.device or before) for program in programs]
    return in_turn([len(program.devices) for program in programs], named)


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
