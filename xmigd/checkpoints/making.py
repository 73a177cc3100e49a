"""How one checkpoint is written down: of the processes of a job, which run or are suspended.

Those that run stand still for a snapshot and for CRIU's dump of their programs; ranks of a group stand at the same
snapshot of all, behind the same collective. Their servers copy what the snapshots hold meanwhile, and go on with that,
if it takes longer, while the programs go on. Only then is anything compressed and written to the disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from xmigd import __version__
from xmigd.checkpoints import live
from xmigd.checkpoints.apart import mounts_of, namespaces_of
from xmigd.checkpoints.content import Writing
from xmigd.checkpoints.criu import Criu
from xmigd.checkpoints.lossy import check_named, described
from xmigd.checkpoints.manifest import Connection, Lossy, Manifest, Program
from xmigd.checkpoints.movable import leads, obstacles, processes_of
from xmigd.checkpoints.outward import ends
from xmigd.errors import Conflict, Forbidden, Unavailable
from xmigd.host_memory import RESERVE
from xmigd.ipc import pidfd as pidfds
from xmigd.migrations.plan import size
from xmigd.native import Layout
from xmigd.operations.operation import Operation
from xmigd.supervisor.copying import Known
from xmigd.supervisor.process import Process

Report = Callable[[int], None]  # bytes that are done


class Groups(Protocol):
    """What ties processes together (supervisor/supervisor.py)."""

    @property
    def processes(self) -> Mapping[str, Process]: ...

    def together(self, process: Process) -> list[Process]: ...

    def pause_together(self, process: Process) -> None: ...

    def let_go_on(self, process: Process) -> None: ...


class Making:
    """`root`: the process from which all of them descend, and that is dumped with all that do. `stop`: its programs do
    not go on."""

    last = False
    dump_bytes = 0  # that CRIU writes at most where the copies are made
    connections: tuple[Connection, ...] = ()  # with what others dump
    network: int = 0  # the inode of the job's, which is not dumped
    keep_bits = 0  # of the mantissas of named optimizer state; 0: it is exact
    lossy: Lossy | None = None

    def __init__(
        self, processes: Sequence[Process], root: int, *, criu: Criu, layout: Layout, stop: bool, groups: Groups
    ) -> None:
        self.processes = list(processes)
        self.root = root
        self.namespaces, self.mounts = namespaces_of(root), mounts_of(root)
        self.awake = [one for one in self.processes if one.state != "suspended"]
        self.pids: list[int] = []  # that the program consists of; they were stopped
        self.standstill_ms: float | None = None
        self.took: dict[str, float] = {}  # ms: to dump the program, to copy its content, to store all, and more
        self.copied_bytes = 0  # of device memory: what the last checkpoint has is not copied again
        self.stop = stop
        self._criu = criu
        self._layout = layout
        self._groups = groups
        self._began = 0.0  # when they stood still
        self._paused = False  # those that are awake are, or are to be

    def check_room(self, *, once_more: bool = False) -> None:
        """For the copy of their content; `once_more`: for what has changed since the last one, which is still there.
        Raises Conflict: or they cannot be paused."""
        for one in self.processes:
            if one.state == "suspended" and one.machine.where != "host":
                raise Conflict("its state is in files", code="suspended", hint="resume it first")
            if one.state == "suspended" and self.keep_bits:
                raise Conflict("a checkpoint of a suspended process is exact", code="suspended",
                               hint="resume it first, or make an exact one")  # fmt: skip
        for one in self.awake:
            if one.grouped and not set(self._groups.together(one)) <= set(self.awake):
                raise Conflict("a rank shares communicators with processes of other jobs", code="several_processes")
        if not self.awake:
            return
        needed = self.room_for_copies() if once_more else self.live_bytes()
        room = self.awake[0].host_pool.room()
        if room - RESERVE < needed:
            raise Conflict(
                f"the host has {size(room)} of memory available, the copy of the content needs {size(needed)}",
                code="pool_too_small", hint="suspend it, or make room",
            )  # fmt: skip

    def live_bytes(self) -> int:
        """Of those that are awake, on their devices."""
        return sum(one.last_snapshot.live_bytes for one in self.awake if one.last_snapshot is not None)

    def has_room_in_transit(self) -> bool:
        """May the copies stay in host memory while more of them are made, at worst all of it once more?"""
        return bool(self.awake) and self.awake[0].host_pool.room() - RESERVE >= 2 * self.live_bytes()

    def room_for_copies(self) -> int:
        """Bytes that they take at most in the folder of checkpoints."""
        return sum(one.copying.room(one.copying.known) for one in self.awake)

    async def write_down(
        self, operation: Operation, writing: Writing, images: Path, report: Callable[[], Report]
    ) -> tuple[Program, ...]:
        """Programs and memory. Afterwards the programs go on, unless they are to stop. `images`: a folder for CRIU.
        What CRIU has written, and the open files of all, are with the first. Raises Conflict, Unavailable."""
        held: list[live.Held] = []
        try:
            found = await self._stand_still(operation, writing, images, held, report)
            operation.progress("storing", total_bytes=sum(one.bytes for one in held))
            began, progressed = time.monotonic(), _Sum(report())
            programs, known = [], list[Known | None]()
            with of_the_store("it cannot be stored"):
                for number, (program, its) in enumerate(zip(found, held, strict=True)):

                    def storing(done: int, number: int = number) -> None:
                        operation.check_cancelled("source" if self.awake else "host")
                        progressed.add(number, done)

                    await asyncio.to_thread(its.look_up)
                    memory, snapshots = await asyncio.to_thread(live.store_memory, writing, its, program.uid, storing)
                    known.append(await asyncio.to_thread(its.known, memory, program.generation))
                    programs.append(program.model_copy(update={"memory": tuple(memory), "snapshots": snapshots}))
                stored = await asyncio.to_thread(live.store_images, writing, images)
                await asyncio.to_thread(writing.sync)
                if self.keep_bits:
                    stored_of = [one.memory for one in programs]
                    copies = [(its.copy, of) for its, of in zip(held, stored_of, strict=True) if its.copy is not None]
                    self.lossy = await asyncio.to_thread(described, self.keep_bits, copies, writing)
            if not all(writing.has(its.pieces.values()) for its in known if its is not None):
                raise Conflict("a piece that the last checkpoint has, too, was found to be damaged", code="damaged",
                               hint="ask for it again: the next one stores everything")  # fmt: skip
            self.took["store_ms"] = (time.monotonic() - began) * 1e3
            self._check_asleep(found)
            for one, its_known in zip(self.processes, known, strict=True):
                if its_known is not None:
                    one.copying.note(its_known)
        except Exception:
            for one in self.processes:
                one.copying.forget()  # whatever it was: the next one relies on nothing
            await self.go_on()
            raise
        finally:
            for its in held:
                its.close()
        return (programs[0].model_copy(update={"images": tuple(stored)}), *programs[1:])

    async def _stand_still(
        self, operation: Operation, writing: Writing, images: Path, held: list[live.Held],
        report: Callable[[], Report],
    ) -> list[Program]:  # fmt: skip
        """Until they are dumped. Then wait for the copies; `held` has what is to be stored."""
        if self.awake:
            operation.progress("pausing")
            await self._pause()
        generations = [one.generation for one in self.processes]
        with of_the_store("it cannot be held"):
            for one in self.processes:
                held.append(live.hold(one, suspended=one not in self.awake))
        copies, progressed, beside = [], _Sum(report()), self.dump_bytes
        try:
            for number, one in enumerate(self.awake):
                since = one.copying.known
                if since is not None and not writing.has(since.pieces.values()):
                    since = None
                copying = one.copying.begin(one.paused_snapshot, progressed.of(number), since=since, beside=beside,
                                            keep_bits=self.keep_bits)  # fmt: skip
                copies.append(copying)
                beside += one.copying.room(since)
            found = await self._dump(operation, images)
            self._check_awake(generations)
            self._check_asleep(found)
            if self.awake and not self.stop:
                await asyncio.gather(*(one.unpause() for one in self.awake))
                self._paused = False
                self.standstill_ms = (time.monotonic() - self._began) * 1e3
            if copies:
                operation.progress("copying")
            for one, copying in zip(self.awake, copies, strict=True):
                copy = await copying
                held[self.processes.index(one)].add(copy)
                self.took["copy_ms"] = max(self.took.get("copy_ms", 0.0), copy.ms)
                self.copied_bytes += copy.bytes
            if self.keep_bits:
                check_named(its.copy for its in held if its.copy is not None)
        finally:
            for copying in copies:
                copying.cancel()
        return found

    def manifest(self, id: str, node: str, programs: Sequence[Program]) -> Manifest:
        """Of what was written down, with what its job is to be when it is restored."""
        job = self.processes[0].job
        return Manifest(
            id=id, job=job.id, job_name=job.name, node=node, xmig_version=__version__, created_at=time.time(),
            root=self.root, namespaces=self.namespaces, mounts=self.mounts, programs=tuple(programs),
            priority=job.priority, memory_quota=job.memory_quota or 0, sm_share=job.sm_share or 0,
            lossy=self.lossy,
        )  # fmt: skip

    async def _pause(self) -> None:
        """All that are awake, each at a snapshot; ranks of a group at the same one. Raises Conflict, Unavailable."""
        before, self._paused = time.monotonic(), True
        pausing = [asyncio.create_task(self._pause_one(one)) for one in self.awake]
        try:
            await asyncio.wait(pausing, return_when=asyncio.FIRST_EXCEPTION)
            failures = [one.exception() for one in pausing if one.done()]
            for failure in failures:
                if failure is not None:
                    raise failure
        finally:
            for one in pausing:
                one.cancel()
        self._began = max(before, min(one.result() for one in pausing))
        self.took["pause_ms"] = (time.monotonic() - self._began) * 1e3
        if any(one.paused_snapshot == 0 for one in self.awake):
            raise Conflict("no snapshot of the process is possible now; its log says why", code="no_snapshot",
                           hint="ask again later")  # fmt: skip

    async def _pause_one(self, process: Process) -> float:
        """Since when it stands still. A rank runs on until all of its group can stop."""
        began, grouped = time.monotonic(), process.grouped
        await process.pause(
            at_snapshot=True, with_group=(lambda: self._groups.pause_together(process)) if grouped else None
        )
        last = process.last_snapshot
        if not grouped or last is None:
            return began
        return time.monotonic() - (last.waited_ms + last.ms) / 1e3

    async def _dump(self, operation: Operation, images: Path) -> list[Program]:
        """The programs, without their content."""
        operation.progress("dumping")
        self.pids, leader = processes_of(self.root), leads(self.root)
        began = time.monotonic()
        await self._criu.dump(self.root, images, leader=leader, mounts=self.mounts, network=self.network)
        self.took["dump_ms"] = (time.monotonic() - began) * 1e3
        self.pids = processes_of(self.root)
        # Now they stand still. It was all looked at before, but they went on until here.
        check_owners(self.processes[0], self.pids)
        self._check_complete()
        await asyncio.to_thread(check_obstacles, self.root, self._criu, ends(self.connections))
        files = live.open_files(self.pids)
        found = [
            live.describe(one, self._layout, leader=leader, files=files if number == 0 else ())
            for number, one in enumerate(self.processes)
        ]
        await self._all_dumped()
        if not self.stop:
            live.let_go_on(self.pids)
        return found

    async def _all_dumped(self) -> None:
        """Nothing of the program goes on before this returns."""

    async def kept(self, operation: Operation) -> None:
        """What was written down is on the disk. Nothing of the program ends before this returns."""

    def _check_complete(self) -> None:
        """Of a process that began in the meantime there is no content. Raises Conflict."""
        dumped = set(self.pids)
        for one in self._groups.processes.values():
            if one.row.pid in dumped and one not in self.processes and one.state not in ("ended", "lost"):
                raise Conflict(
                    f"process {one.row.pid} began to use devices while the job was written down", code="job_changed",
                    hint="ask for it again, once all of them run",
                )  # fmt: skip

    def _check_awake(self, generations: Sequence[int]) -> None:
        """Were they paused all the time? Raises Conflict."""
        for one, generation in zip(self.processes, generations, strict=True):
            if one in self.awake and (not one.paused or one.generation != generation):
                raise _resumed_meanwhile()

    def _check_asleep(self, found: Sequence[Program]) -> None:
        """Were the others suspended all the time? Somebody else may resume them. Raises Conflict."""
        for one, program in zip(self.processes, found, strict=True):
            moves = one.machine.move is not None
            if one not in self.awake and (one.state != "suspended" or one.generation != program.generation or moves):
                raise _resumed_meanwhile()

    async def go_on(self) -> None:
        """Where they stand. It may be called again."""
        live.let_go_on(self.pids)
        if self._paused:
            self._paused = False
            for one in self.awake:
                self._groups.let_go_on(one)


class _Sum:
    """Of what several have done."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._done: dict[int, int] = {}

    def add(self, number: int, done: int) -> None:
        self._done[number] = done
        self._report(sum(self._done.values()))

    def of(self, number: int) -> Report:
        return lambda done: self.add(number, done)


def _resumed_meanwhile() -> Conflict:
    return Conflict("the process was resumed while it was written down", code="resumed_meanwhile",
                    hint="ask for it again")  # fmt: skip


def check_owners(process: Process, pids: Iterable[int]) -> None:
    """What runs with another user's rights would run with them again, whenever its checkpoint is restored. Raises
    Forbidden."""
    for pid in pids:
        owner = pidfds.owner(pid)
        if owner is not None and owner != process.row.uid:
            raise Forbidden(
                f"process {pid} of the program runs as user {owner}, the program as user {process.row.uid}",
                hint="end it first",
            )


def check_obstacles(root: int, criu: Criu, elsewhere: frozenset[tuple[str, str]] = frozenset()) -> None:
    """`elsewhere`: connections whose other ends are dumped there. Blocks. Raises Conflict: something stands in the way,
    also of what would only be missing afterwards."""
    as_dumped = replace(criu.as_dumped(root), elsewhere=elsewhere)
    against = [one for one in obstacles(root, as_dumped) if one.stops != "depends"]
    if against:
        first = against[0]
        more = f"; and {len(against) - 1} more" if len(against) > 1 else ""
        raise Conflict(
            f"process {first.pid} cannot be restored with {first.what}: {first.why}{more}", code="not_movable",
            hint=first.hint or "xmigctl check-movable JOB lists what stands in the way",
        )  # fmt: skip


@contextlib.contextmanager
def of_the_store(what: str) -> Iterator[None]:
    """Raises Unavailable instead of OSError."""
    try:
        yield
    except OSError as error:
        raise Unavailable(
            f"{what}: {error.strerror}", code="store_failed", hint="make room, or free descriptors; then ask again"
        ) from None
