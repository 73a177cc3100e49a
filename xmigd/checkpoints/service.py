"""Checkpoints as operations: made, verified, exported and imported, removed. How one is restored is in restoring.py.

How one is written down is in making.py. A failure anywhere leaves the process where it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError
from sqlalchemy.orm import Session

from xmigd import log
from xmigd.checkpoints import archive, live, repository
from xmigd.checkpoints.apart import root_in
from xmigd.checkpoints.content import Chunks, Writing
from xmigd.checkpoints.criu import Criu
from xmigd.checkpoints.keys import private_key
from xmigd.checkpoints.last import MakingLast
from xmigd.checkpoints.making import Making, check_obstacles, check_owners, of_the_store
from xmigd.checkpoints.manifest import Manifest, contents
from xmigd.checkpoints.mirror import SecondPlace
from xmigd.checkpoints.mirroring import Mirroring
from xmigd.checkpoints.movable import processes_of
from xmigd.checkpoints.outward import ends, outward
from xmigd.checkpoints.part import InDoubt, MakingPart, Part
from xmigd.checkpoints.pids import end, kill, tree
from xmigd.checkpoints.room import Room, program_bytes
from xmigd.checkpoints.schemas import CheckpointInfo
from xmigd.checkpoints.settling import Settling
from xmigd.checkpoints.several import root_of, whole_root
from xmigd.checkpoints.working import Working
from xmigd.database.reader import Reader
from xmigd.database.writer import Writer
from xmigd.devices.names import as_one
from xmigd.errors import Conflict, NotFound
from xmigd.failpoints import Write
from xmigd.ids import new_id
from xmigd.ipc import pidfd as pidfds
from xmigd.migrations.service import Moves
from xmigd.native import Layout
from xmigd.operations.operation import Operation
from xmigd.operations.repository import OperationRow
from xmigd.operations.service import Operations, Outcome, interrupted
from xmigd.security.callers import Caller
from xmigd.store.objects import Damaged, private_folder, write_durably
from xmigd.supervisor.process import Process
from xmigd.supervisor.supervisor import Supervisor
from xmigd.users import user_name

logger = log.get("checkpoints")

CREATE, VERIFY, EXPORT, IMPORT = "checkpoint", "verification", "export", "import"  # operations
FOUND_WITHIN = 60.0  # seconds after a start in which a process of the last daemon is found again

Work = Callable[[Operation], Awaitable[dict[str, Any]]]


class Across(Protocol):
    """Checkpoints of jobs with ranks on several nodes (sets.py)."""

    async def create(self, process: Process, *, stop: bool, requestor: str, by_policy: bool) -> OperationRow: ...

    async def check_creation(self, process: Process) -> None:
        """Raises Conflict, Unavailable: it cannot be made now."""

    async def resolve_create(self, operation: Operation) -> bool:
        """Do the programs of this node end at what it has made before the daemon was restarted? Raises InDoubt: they
        have ended."""
        ...

    def others_of(self, nodes: Sequence[str]) -> list[str]:
        """Those whose parts are removed with that of this node. Raises Conflict: another node removes it."""
        ...

    def removed(self, nodes: Sequence[str]) -> None:
        """These are to remove their parts of something."""

    async def discard(self, part: str, nodes: Sequence[str]) -> None:
        """Of one about which another node decides that is gone for good. Raises Conflict: it is not, or something
        waits for it; Unavailable."""

    async def verify(self, checkpoint: str, nodes: Sequence[str]) -> None:
        """The parts of the others. Raises Conflict: one is damaged; Unavailable: one did not answer."""


class Checkpoints:
    def __init__(
        self, *, supervisor: Supervisor, moves: Moves, operations: Operations, writer: Writer, reader: Reader,
        layout: Layout, folder: Path, node: str, criu: Criu, room: Room,
        chunks: Chunks, mirroring: Mirroring | None, settling: Settling,
    ) -> None:  # fmt: skip
        """`folder`: where they are kept, their content in `chunks`."""
        self.working = Working(folder)
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
        self.chunks = chunks
        self._mirroring = mirroring
        self._settling = settling
        self.across: Across
        self._exported = folder / "exported"  # the only folder that files are written to and read from for others
        operations.register(CREATE, self._resolve_create)

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
        self, process: Process, *, stop: bool, requestor: str, by_policy: bool = False, last: bool = False,
        keep_bits: int | None = None,
    ) -> OperationRow:  # fmt: skip
        """`last`: of one that is being lost, whose server stands at its last snapshot. `keep_bits`: of the mantissas of
        the optimizer state that its programs have named; None: it is exact. Raises Conflict, Unavailable: it cannot be
        made."""
        if process.job.nodes is not None and not last:
            if keep_bits is not None:
                raise Conflict("a checkpoint of a job that has ranks on several nodes is exact", code="several_nodes",
                               hint="make one without keep_bits")  # fmt: skip
            return await self.across.create(process, stop=stop, requestor=requestor, by_policy=by_policy)
        making = await self.prepared(process, stop=stop, last=last, keep_bits=keep_bits or 0)
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
        if process.job.nodes is not None:
            await self.across.check_creation(process)
        else:
            await self.prepared(process, stop=True)

    async def prepared(
        self, process: Process, *, stop: bool, last: bool = False, part: Part | None = None, keep_bits: int = 0
    ) -> Making:
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
        making.keep_bits = keep_bits
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

    async def verify(self, caller: Caller, checkpoint: str, *, requestor: str) -> OperationRow:
        """Read all of it, and compare it with its hashes. Raises NotFound, Damaged."""
        info = await asyncio.to_thread(self.find, caller, checkpoint)
        manifest = await asyncio.to_thread(self.manifest, info.id)

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
        manifest = await asyncio.to_thread(self.manifest, checkpoint)
        for name, size in archive.pieces_of(manifest).items():
            await asyncio.to_thread(self.chunks.on_disk, name, size)

    async def export(self, caller: Caller, checkpoint: str, key_file: str | None, *, requestor: str) -> OperationRow:
        """Into one file of the folder `exported`, for another node. Raises NotFound, Damaged, Conflict, Invalid."""
        key = await asyncio.to_thread(private_key, key_file)
        info = await asyncio.to_thread(self.find, caller, checkpoint)
        manifest = await asyncio.to_thread(self.manifest, info.id)
        path = self._exported / f"{info.id}.xmig"

        async def work(operation: Operation) -> dict[str, Any]:
            operation.progress("writing", total_bytes=info.content_bytes)
            report = operation.reporter()

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
                report = operation.reporter()
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

    async def discard(self, caller: Caller, part: str) -> None:
        """A part that is in doubt, and whose leader is gone for good. Raises NotFound, Conflict, Unavailable."""
        found = await asyncio.to_thread(lambda: self.page(checkpoint=part, whole=False))
        if not found:
            raise NotFound(
                f"there is no part in doubt of a checkpoint {part[:64]!r}", hint="xmigctl checkpoint list --in-doubt"
            )
        await self.across.discard(part, found[0].nodes)
        logger.warning(
            "a part in doubt is discarded", checkpoint=part[:12], nodes=",".join(found[0].nodes), requestor=caller.name
        )

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
                owner, durable = process.row.uid, making.stop or making.last
                writing = stack.enter_context(self.chunks.writing(owner=owner, durable=durable))
            dump_bytes = program_bytes(making.root)
            place = self.chunks.memory.place_for(dump_bytes, beside=making.room_for_copies())
            making.dump_bytes = 0 if place is None else dump_bytes
            images = stack.enter_context(self.working.images(operation, place))
            operation.check_cancelled(process.moving.place)
            try:
                programs = await making.write_down(operation, writing, images, operation.reporter)
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
            except InDoubt:
                if making.stop:
                    await self._end_launcher(operation)
                raise
            except Exception:
                self._path(id).unlink(missing_ok=True)
                await making.go_on()
                raise
            if making.stop:
                await self._end(making.processes, making.pids)
        lossy = None if making.lossy is None else making.lossy.model_dump(mode="json")
        return result | making.took | {"copied_bytes": making.copied_bytes, "lossy": lossy}

    @staticmethod
    async def _end_launcher(operation: Operation) -> None:
        """Its programs have ended; what has started them still stands, and would for ever."""
        root, start = operation.request["root"], operation.request["root_start"]
        if pidfds.same_process(root, start):
            await end(tree(root))

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
            "lossy": None if manifest.lossy is None else manifest.lossy.model_dump(mode="json"),
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

    # --- after a restart ----------------------------------------------------------------------------------------------

    async def _resolve_create(self, operation: Operation) -> Outcome:
        """The process goes on if it was paused for it. What was stored is removed if it did not become one."""
        await self.working.settle(operation)
        checkpoint = operation.request.get("checkpoint", "")
        ends = False
        if operation.request.get("nodes"):
            try:
                ends = await self.across.resolve_create(operation)
            except InDoubt as error:
                await self._end_launcher(operation)
                return Outcome(state="failed", error=error)
        elif not await asyncio.to_thread(self.page, checkpoint=checkpoint):
            await asyncio.to_thread(self.forget, checkpoint)
        awake = operation.request.get("awake", [])
        found = [await self.found_again(operation, name) for name in operation.request.get("processes", [])]
        processes = [one for one in found if one is not None]
        root, start = operation.request.get("root", 0), operation.request.get("root_start", 0)
        pids = tree(root) if pidfds.same_process(root, start) else []
        if ends:
            await self._end(processes, pids)
            return Outcome(state="succeeded", result={"checkpoint": checkpoint})
        if not processes:
            return interrupted(operation.row)
        live.let_go_on(pids)
        for process in processes:
            if process.row.id in awake:
                process.let_go_on()
        asleep = [one for one in processes if one.state == "suspended" and one.row.id in awake]
        if asleep:
            requestor = operation.row.requestor
            await self._operations.carried_out(self._moves.resume(asleep, [], requestor=requestor, paused=True))
        return interrupted(operation.row, processes[0].moving.place)

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
            here = await asyncio.to_thread(self.manifest, checkpoint)
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

    def _path(self, checkpoint: str) -> Path:
        return self._folder / f"{checkpoint}.json"

    def manifest(self, checkpoint: str) -> Manifest:
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

    async def _write(self, name: Write, work: Callable[[Session], Any]) -> None:
        """Raises Unavailable."""
        await self._writer.write(name, work)
