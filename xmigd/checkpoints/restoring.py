"""Checkpoints are restored: programs are made again, in a job of their own. A failure anywhere leaves nothing of it.

What is made again stands still until all of it is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

from xmigd import log
from xmigd.checkpoints import live, opened, own_files
from xmigd.checkpoints.apart import check_mounts, outer_pid
from xmigd.checkpoints.criu import LOCK
from xmigd.checkpoints.making import of_the_store
from xmigd.checkpoints.manifest import Manifest, OpenFile, Program
from xmigd.checkpoints.parents import leave_parent
from xmigd.checkpoints.pids import end, stopped, tree
from xmigd.checkpoints.room import check_devices
from xmigd.checkpoints.service import Checkpoints
from xmigd.database.reader import Reader
from xmigd.devices.names import as_one, devices_of, in_turn
from xmigd.errors import Cancelled, Conflict, Forbidden, Invalid, NotFound, Unavailable, XmigError
from xmigd.events.bus import Bus
from xmigd.ids import new_id
from xmigd.ipc import pidfd as pidfds
from xmigd.ipc.channel import Peer
from xmigd.ipc.fds import Fd, close_all, free
from xmigd.jobs import repository as jobs
from xmigd.jobs.membership import new_job
from xmigd.memory.handles import Handle, JobMemory
from xmigd.memory.restored import mapped_memory
from xmigd.migrations.places import Places
from xmigd.migrations.service import OPERATION, Moves
from xmigd.networks.service import Held
from xmigd.operations.operation import Operation
from xmigd.operations.repository import OperationRow
from xmigd.operations.service import Operations, Outcome, interrupted
from xmigd.processes import repository as process_rows
from xmigd.published import Published, check_network, close, listen, pass_on
from xmigd.records import JobRow, Priority, ProcessRow
from xmigd.security.callers import Caller
from xmigd.store.objects import Damaged
from xmigd.subscribers import Subscribers
from xmigd.supervisor.ahead import Ahead, Wanted
from xmigd.supervisor.process import Process
from xmigd.supervisor.supervisor import Supervisor

logger = log.get("checkpoints")

RESTORE = "restoration"  # operation
KEPT_WITHIN = 60.0  # seconds in which the servers that hold suspended processes have everything

Keep = Callable[[Sequence[Process], int], Awaitable[None]]  # of a program that was made again: its pid, too


@dataclass(slots=True)
class FromAhead:
    """Of a restoration whose content is on the devices before its programs are there (supervisor/ahead.py): servers, of
    each program, and images that these have loaded, if there were rounds. Afterwards `took`: what lasted how long, in
    ms; `content_bytes`: of device memory, and what of it was copied to devices here, the restoration being under
    way."""

    servers: list[Ahead]
    images: list[live.Images]
    took: dict[str, float] = field(default_factory=dict)
    content_bytes: int = 0
    copied_bytes: int = 0

    def close(self) -> None:
        """Servers that were not taken end. It may be called again."""
        for server in self.servers:
            server.close()
        for images in self.images:
            free([fd for _, fd in images.values()])
            images.clear()

    def note(self, resumed: Mapping[str, Any], began: float, read: float, restored: float) -> None:
        """The result of their resumption, which is over now. Monotonic seconds."""
        self.content_bytes, self.copied_bytes = resumed["total_bytes"] or 0, resumed["processed_bytes"] or 0
        ends = {"read_ms": (began, read), "criu_ms": (began, restored), "server_ms": (restored, time.monotonic())}
        self.took = {name: round((end - start) * 1e3, 3) for name, (start, end) in ends.items()}


class Across(Protocol):
    """Those of jobs with ranks on several nodes (sets.py)."""

    async def restore(
        self, caller: Caller, checkpoint: str, devices: Sequence[str], instead: Mapping[str, str], *, requestor: str
    ) -> OperationRow: ...

    async def goes_on(self, operation: Operation, there: Callable[[], bool]) -> bool:
        """Does what it has restored before the daemon was restarted, and stands still? Once that is decided, or it is
        not `there` any more."""
        ...


class Restoring:
    def __init__(
        self, *, checkpoints: Checkpoints, supervisor: Supervisor, moves: Moves, operations: Operations, reader: Reader,
        devices: Sequence[str], places: Places, bus: Bus,
    ) -> None:  # fmt: skip
        """`devices`: of this node."""
        self.restored: Subscribers[tuple[str, str]] = Subscribers()  # the job of the checkpoint, and the new one
        self._checkpoints = checkpoints
        self._working = checkpoints.working
        self._criu = checkpoints.criu
        self._chunks = checkpoints.chunks
        self._supervisor = supervisor
        self._moves = moves
        self._operations = operations
        self._reader = reader
        self._devices = devices
        self._places = places
        self._bus = bus
        self.across: Across
        self._written: set[str] = set()  # by programs that are being restored
        operations.register(RESTORE, self._resolve)

    # --- what is requested --------------------------------------------------------------------------------------------

    async def restore(
        self, caller: Caller, checkpoint: str, devices: Sequence[str], *, own_files: bool = False,
        publish: Sequence[str] = (), nodes: Mapping[str, str] | None = None, requestor: str,
    ) -> OperationRow:  # fmt: skip
        """In a job of its own. `own_files`: what it writes to is copied. `publish`: ports of its network. `nodes`: by
        the names of nodes that have parts of it, others that get these. Raises NotFound, Damaged, Invalid, Conflict,
        Unavailable: it cannot be restored."""
        found = await asyncio.to_thread(partial(self._checkpoints.page, checkpoint=checkpoint, owner=caller.owner))
        if nodes or (found and found[0].nodes):
            if own_files or publish:
                raise Invalid("a job of several nodes is restored with its own files, and without ports")
            return await self.across.restore(caller, checkpoint, devices, nodes or {}, requestor=requestor)
        info = await asyncio.to_thread(self._checkpoints.find, caller, checkpoint)
        manifest = await asyncio.to_thread(self._checkpoints.manifest, info.id)
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
            request={"checkpoint": info.id, "own_files": own_files},
        )  # fmt: skip

    async def check_restoration(
        self, manifest: Manifest, devices: Sequence[str], before: str, *, own_files: bool = False
    ) -> list[list[str]]:
        """The devices of each program. Raises NotFound, Invalid, Conflict, Unavailable: it cannot be restored here."""
        await self._criu.check()
        places = chosen_devices(manifest.programs, list(devices), before)
        for program, chosen in zip(manifest.programs, places, strict=True):
            self.check_place(program, chosen, needs_pid=not manifest.namespaces)
        check_devices(manifest.programs, places, await self._places.known())
        files = manifest.programs[0].files
        await asyncio.to_thread(live.check_files, files, copied=own_files)
        await asyncio.to_thread(check_mounts, manifest.mounts)
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

    # --- the work -----------------------------------------------------------------------------------------------------

    def check_place(self, program: Program, devices: Sequence[str], *, needs_pid: bool) -> None:
        """Raises NotFound, Conflict."""
        if program.layout != self._checkpoints.layout.layout_version:
            raise Conflict(
                f"it was made by another version of xMIG: memory of layout {program.layout}, and this one has "
                f"{self._checkpoints.layout.layout_version}", code="other_version",
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
        nodes: str | None = None, before: Keep | None = None, ahead: FromAhead | None = None,
        network: Held | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Restore it. `keep` is called when everything is there and the program is still stopped; then it stays so. If
        that raises, nothing is left of it. `asleep`: its processes are suspended, and stay so. `nodes`: on which its
        job has ranks; `before` is called before they are resumed. `ahead`: what has come of it before. `network`: of
        the job, which is there. Raises Conflict, Damaged, Unavailable."""
        make = partial(
            self._make, operation, manifest, devices, requestor, published=published, copied=copied, keep=keep,
            asleep=asleep, nodes=nodes, before=before, ahead=ahead, network=network,
        )  # fmt: skip
        try:
            return await make()
        except Cancelled:
            raise
        except XmigError as error:
            # What servers are given of host memory, only they compare: to do it before would take longer than the rest.
            owners = [program.uid for program in manifest.programs]
            with of_the_store("host memory cannot be read"):
                on_disk = await asyncio.to_thread(self._chunks.without_damaged, manifest.id, owners)
            if not on_disk or nodes is not None:  # ranks of other nodes have been refused with it
                raise
            logger.warning("a checkpoint is restored from the disk", checkpoint=manifest.id[:12], why=error.message)
        return await make()

    async def _make(
        self, operation: Operation, manifest: Manifest, devices: Sequence[str], requestor: str, *,
        published: Sequence[Published], copied: bool, keep: Keep | None, asleep: bool, nodes: str | None,
        before: Keep | None, ahead: FromAhead | None, network: Held | None,
    ) -> dict[str, Any]:  # fmt: skip
        assert operation.row.owner is not None
        copies: dict[str, str] = {}
        began, programs = time.monotonic(), manifest.programs
        beside = None if ahead is not None or asleep else await self._work_beside(manifest, devices)
        ahead = ahead or beside
        operation.progress("reading", total_bytes=sum(m.content.bytes for one in programs for m in one.memory))
        contents: list[tuple[dict[int, Handle], tuple[Fd, Fd]]] = []
        made: list[Process] = []
        enough = threading.Event()
        # Beside CRIU's work, and not longer than that makes sense.
        reading = asyncio.ensure_future(self._read(manifest, contents, operation.reporter(), enough, ahead))
        try:
            place = self._chunks.memory.place_for(sum(image.content.bytes for image in programs[0].images))
            with self._working.images(operation, place) as images:
                with of_the_store("its images cannot be written"):
                    await asyncio.to_thread(live.restore_images, self._chunks, manifest.id, programs[0], images)
                    await asyncio.to_thread(leave_parent, images, _root_of(manifest))
                if copied:
                    copies = await asyncio.to_thread(_copy, programs[0], operation, images)
                    await asyncio.to_thread(own_files.use, images, copies)
                names = await asyncio.to_thread(opened.check_names, images)
                restoring = asyncio.ensure_future(
                    self._criu.restore(
                        images,
                        leader=programs[0].leader,
                        namespaces=manifest.namespaces,
                        mounts=manifest.mounts,
                        network=None if network is None else network.carrier.namespace,
                    )
                )
                try:
                    await asyncio.wait([reading, restoring], return_when=asyncio.FIRST_COMPLETED)
                    if restoring.done():
                        restoring.result()  # it may have failed
                    await asyncio.shield(reading)
                    read = time.monotonic()
                    shared = sum(live.shared_bytes(handles) for handles, _ in contents)
                    operation.point_of_no_return("the program is being restored")
                    operation.progress("restoring")
                except asyncio.CancelledError:  # this daemon leaves, and CRIU goes on
                    restoring.cancel()
                    raise
                except BaseException:
                    with contextlib.suppress(Exception):
                        await end(tree(await restoring))
                    raise
                root = await restoring
                restored = time.monotonic()
                try:
                    if network is not None:
                        await network.watch(root)
                    owners = {file.path: file.owner for file in programs[0].files}
                    await asyncio.to_thread(opened.check_opened, tree(root), names, owners, programs[0].uid)
                    await asyncio.to_thread(pass_on, published, root)
                    uid = operation.row.owner
                    priority = await asyncio.to_thread(self.class_of, manifest.job, manifest.priority, uid)
                    job = self._job_of(manifest, root, devices, uid, priority, nodes)
                    for program, device in zip(programs, devices, strict=True):
                        content = contents[len(made)]
                        server = ahead.servers[len(made)] if ahead is not None and ahead.servers else None
                        pid = self._pid_of(manifest, program, root)
                        made.append(self._take(job, program, device, pid, *content, server))
                    if before is not None:
                        await before(made, root)
                    operation.progress("resuming", job=job.id, root=root)
                    if priority != manifest.priority:
                        self._note_class(job, manifest.priority)
                    if asleep:
                        await self._until_kept(made)
                    else:
                        resumed = await self._operations.carried_out(
                            self._moves.resume(made, [], requestor=requestor, joins=nodes is not None)
                        )
                        if ahead is not None:
                            ahead.note(resumed, began, read, restored)
                    if keep is not None:
                        await keep(made, root)
                except Exception:
                    await end(tree(root))  # whoever hears that it failed may restore it again, with these pids
                    raise
                if keep is None:
                    live.let_go_on(tree(root))
        except asyncio.CancelledError:
            reading.cancel()
            raise
        except Exception:
            await asyncio.to_thread(own_files.remove, copies)
            raise
        finally:
            enough.set()
            await asyncio.gather(reading, return_exceptions=True)
            for handles, snapshots in contents[len(made) :]:
                close_all([*snapshots, *(handle.fd for handle in handles.values())])
            if beside is not None:
                beside.close()
        self.restored((manifest.job, job.id))
        logger.info("a checkpoint is restored", checkpoint=manifest.id[:12], job=job.id[:12], pid=root)
        lossy = None if manifest.lossy is None else manifest.lossy.model_dump(mode="json")
        if lossy is not None:
            logger.warning("what is restored is not exact", job=job.id[:12], keep_bits=lossy["keep_bits"])
        return _as_restored(manifest.id, [one.row for one in made]) | {
            "root": root, "files": copies, "ms": (time.monotonic() - began) * 1e3, "criu_ms": (restored - began) * 1e3,
            "read_ms": (read - began) * 1e3, "shared_bytes": shared, "lossy": lossy,
        }  # fmt: skip

    async def _work_beside(self, manifest: Manifest, devices: Sequence[str]) -> FromAhead | None:
        """Servers that take what is read while CRIU is at work. None: those of the processes do that afterwards."""
        if any(len(devices_of(device)) != 1 for device in devices):  # which of them has what, their servers know
            return None
        try:
            sizes = [await asyncio.to_thread(live.memory_bytes, self._chunks, one) for one in manifest.programs]
        except (OSError, Damaged):  # whoever reads the rest says what is wrong
            return None
        return FromAhead(
            [
                self._supervisor.work_ahead(
                    Wanted(
                        job=manifest.job_name, device=device, user=Peer(0, program.uid, program.gid),
                        sm_share=manifest.sm_share or None, most_bytes=[size],
                        several_nodes=bool(manifest.nodes),
                    ),
                    no_room=lambda _: None,  # its log has it; the resumption finds out for itself
                )
                for program, device, size in zip(manifest.programs, devices, sizes, strict=True)
            ],
            [],
        )  # fmt: skip

    async def _read(
        self, manifest: Manifest, contents: list[tuple[dict[int, Handle], tuple[Fd, Fd]]],
        report: Callable[[int], None], enough: threading.Event, ahead: FromAhead | None,
    ) -> None:  # fmt: skip
        """The memory of all, appended as it is there. Raises Damaged, Unavailable, NotWanted."""
        with of_the_store("its memory cannot be made"):
            for number, program in enumerate(manifest.programs):
                images = None if ahead is None or not ahead.images else ahead.images[number]
                read = partial(live.restore_memory, self._chunks, manifest.id, program, report, enough, images)
                contents.append(await asyncio.to_thread(read))
                if ahead is not None and ahead.servers:  # what is not there yet comes beside CRIU's work
                    ahead.servers[number].give(*contents[-1])

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
        check_network(texts, manifest.namespaces)
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

    def class_of(self, job: str, claimed: Priority, uid: int) -> Priority:
        """That a job of this user has here that goes on from this one. A manifest may come from anywhere: nobody
        becomes critical by what is `claimed`. Reads the database."""
        with self._reader.session() as session:
            earlier = jobs.find(session, job)
            if earlier is not None and earlier.uid == uid:
                return cast(Priority, earlier.priority)
        return "normal" if claimed == "critical" else claimed

    def _note_class(self, job: JobRow, before: Priority) -> None:
        """It was of another class where it was written down."""
        data = {"priority": job.priority, "before": before, "why": "this node does not know the job's grant"}
        logger.warning("a restored job has another class", job=job.id[:12], **data)
        self._bus.publish("job.changed", "job", job.id, job.id, data)

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
            sm_share=manifest.sm_share or None,
        )  # fmt: skip
        return job

    def _take(
        self, job: JobRow, program: Program, device: str, pid: int, handles: dict[int, Handle],
        snapshots: tuple[Fd, Fd], ahead: Ahead | None,
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
        memory = JobMemory(*shared, *snapshots)
        return self._supervisor.restore(job, row, client, memory, handles, program.generation, ahead)

    # --- after a restart ----------------------------------------------------------------------------------------------

    async def _resolve(self, operation: Operation) -> Outcome:
        outcome = await self._resolve_program(operation)
        if outcome.state != "succeeded" and operation.request.get("own_files"):
            with contextlib.suppress(XmigError):  # nobody knows any more what they are called
                manifest = await asyncio.to_thread(self._checkpoints.manifest, operation.request["checkpoint"])
                copies = own_files.names_of(manifest.programs[0].files, _suffix(operation))
                await asyncio.to_thread(own_files.remove, copies)
        return outcome

    async def _resolve_program(self, operation: Operation) -> Outcome:
        """What was restored by half is ended: it stands still, and has done nothing since the checkpoint. What was
        resumed has gone on, and is not to be restored once more: that it is not written down here changes nothing."""
        left, stood_still = await self._working.left(operation), False
        with contextlib.suppress(OSError):  # it has ended since
            stood_still = left is not None and stopped(left)
        goes_on = False
        if left is not None and stood_still and operation.request.get("nodes"):
            goes_on = await self.across.goes_on(operation, partial(_lives, left, pidfds.start_time(left)))
        if left is not None and goes_on:
            live.let_go_on(tree(left))
            stood_still = False
            await asyncio.to_thread(self._working.forget, operation)
        else:
            await self._working.settle(operation)
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


def _lives(pid: int, start: int) -> bool:
    return pidfds.same_process(pid, start) and not pidfds.is_exiting(pid)


def _suffix(operation: Operation) -> str:
    """Of copies of files."""
    return operation.id[:12]


def _copy(program: Program, operation: Operation, images: Path) -> dict[str, str]:
    """Blocks. Raises Conflict."""
    with open(images / LOCK, "wb") as lock:
        return own_files.copy_files(program.files, _suffix(operation), uid=program.uid, gid=program.gid, lock=lock)


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
