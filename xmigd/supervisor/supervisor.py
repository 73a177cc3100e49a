"""All programs of this node, their servers, and the two sockets through which strangers come."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from xmigd import log
from xmigd.connections.listener import Listener
from xmigd.devices.choice import choose_device, least_used, resolve_device
from xmigd.devices.names import as_one, devices_of
from xmigd.devices.visible import numbered, visible
from xmigd.errors import Conflict, Forbidden, Invalid, NotFound, ProtocolError, Unavailable, XmigError
from xmigd.ids import new_id
from xmigd.ipc import messages as m
from xmigd.ipc import pidfd as pidfds
from xmigd.ipc.channel import Peer, Received, peer_pidfd
from xmigd.ipc.fds import Fd, close_all
from xmigd.ipc.handshake import ClientHello, pack_welcome, parse_hello, parse_notice
from xmigd.jobs.membership import check_membership, new_job
from xmigd.logs.log import JobLog
from xmigd.memory.fd_store import FdStore
from xmigd.memory.handles import Handle, JobMemory
from xmigd.memory.host_pool import HostPool, in_host_memory
from xmigd.memory.quota import QuotaPage, Quotas, Slots
from xmigd.mps.service import Mps
from xmigd.native import SERVER, Layout
from xmigd.peers.contract import Links
from xmigd.process import events as e
from xmigd.process import migration_events as v
from xmigd.process.events import INTERRUPTED
from xmigd.process.limits import Limits, MoveLimits
from xmigd.process.recovery import (
    CUDA_ERROR_DEVICE_UNAVAILABLE,
    CUDA_ERROR_OUT_OF_MEMORY,
    CUDA_ERROR_SYSTEM_NOT_READY,
)
from xmigd.ranks.history import History
from xmigd.records import JobRow, LiveProcess, Priority, ProcessRow, Records, ReplicaPolicy
from xmigd.servers.server import Server, ServerProgram
from xmigd.settings import MIB, Settings
from xmigd.store.snapshot_store import SnapshotStore
from xmigd.subscribers import Subscribers
from xmigd.supervisor.adoption import Adopter, Expectations
from xmigd.supervisor.ahead import Ahead, Wanted
from xmigd.supervisor.far_chunks import FarRank, Fetch, Found
from xmigd.supervisor.group import Ranks
from xmigd.supervisor.guard import Guard
from xmigd.supervisor.interrupted import interrupted
from xmigd.supervisor.joining import Join
from xmigd.supervisor.member import Member
from xmigd.supervisor.node_messages import To
from xmigd.supervisor.process import Process
from xmigd.supervisor.runners import Runners
from xmigd.supervisor.scopes import Scopes
from xmigd.supervisor.standby_memory import StandbyMemory
from xmigd.supervisor.state import now
from xmigd.supervisor.unique import UniqueCopies
from xmigd.supervisor.unprotected import Watch

logger = log.get("supervisor")

MAX_DEVICES = 8  # of one program: journal::kMaxDevices
BETWEEN_LINES = 0.5  # seconds until a line that a program reported is in its job's log
STOP_PATIENCE = 10.0  # seconds that a recovery under way may take when the daemon stops
FindJob = Callable[[str], JobRow | None]


class Supervisor:
    def __init__(
        self,
        settings: Settings,
        layout: Layout,
        program: ServerProgram,
        records: Records,
        find_job: FindJob,
        live: list[LiveProcess],
        fd_store: FdStore,
        links: Links,
        mps: Mps,
        *,
        snapshot_store: SnapshotStore | None,
        tells_ends: bool,
        unprotected: Iterable[tuple[ProcessRow, JobRow]],
        cordoned: Mapping[str, str],
        learn: Callable[[Process], None],
        uuid_of: Callable[[str], str | None],
    ) -> None:
        """`learn` is called before a program has its journal. `uuid_of`: a device's, as far as it is known."""
        self._settings = settings
        self._layout = layout
        self._program = program
        self._records = records
        self._find_job = find_job
        self._mps = mps
        self._snapshot_store = snapshot_store
        self.job_log = JobLog(records, layout)
        self._loop = asyncio.get_running_loop()
        self._limits = Limits(
            max_attempts=settings.max_attempts,
            start_timeout=settings.start_timeout,
            phase_timeout=settings.recovery_timeout,
            stable_after=settings.stable_after,
            stop_grace=settings.stop_grace,
            standby=settings.standby,
            preload=settings.preload,
            last_checkpoint=settings.checkpoint_last,
        )
        self.being_lost: Subscribers[Process] = Subscribers()
        self.joins: Subscribers[Join] = Subscribers()
        self.nodes_left: Subscribers[str] = Subscribers()  # there are no processes here any more of jobs with these
        self.fetch_chunks: Fetch | None = None  # of ranks of other nodes; None: these are not reached yet
        self._stall_bound, self._snapshot_cost = settings.stall_bound, settings.snapshot_cost
        self._hang_timeout = settings.hang_timeout
        self.processes: dict[str, Process] = {}
        self.aheads: set[Ahead] = set()  # servers whose processes are to come from other nodes
        self.history = History()  # what ranks do, and have done
        self.unique = UniqueCopies(
            settings.node, self.processes, most_bytes=settings.replica_copies_mib * MIB,
            rate=settings.neighbour_copies_rate * MIB,
        )  # fmt: skip
        self._standby_memory = StandbyMemory(settings.standby_communicators_mib * MIB, self.processes)
        self._local_ranks = Ranks(
            self.processes, self.job_log, self.history, self._standby_memory,
            lambda members: self.unique.settled([one for one in members if isinstance(one, Process)]),
            settings.recovery_timeout, now(), settings.replica_check,
            self._end_for_corruption, settings.replica_policy,
        )  # fmt: skip
        self._expected_of = Counter(each.job.id for each in live)
        self.cordoned = dict(cordoned)  # devices that get no new process, and why
        self._jobs: dict[str, JobRow] = {process.job.id: process.job for process in live}
        self.scopes = Scopes(
            local=self._local_ranks, links=links, address=settings.peer_host, processes=self.processes, jobs=self._jobs,
            make_ranks=self._make_ranks, unique=self.unique, standby_memory=self._standby_memory,
            join_here=lambda join: self.joins(join), patience=settings.recovery_timeout,
        )  # fmt: skip
        self._learn = learn
        self._uuid_of = uuid_of
        self._starting: dict[str, socket.socket] = {}  # programs that wait in their handshake
        self._injections = itertools.count(_first_injection())
        # The servers of processes that were moving when the last daemon ended: one of them is one too many.
        self._movers = {
            each.row.id: (each.server_pid, each.migration.target_pid) for each in live if each.migration is not None
        }
        self.host_pool = HostPool(settings.host_pool_mib << 20, layout.room_bytes, self._suspended_bytes)
        self.runners = Runners(records.job_ended, tells=tells_ends)
        self._fd_store = fd_store
        fd_store.forget_others({process.row.id for process in live})
        self._quotas = Quotas(self._awaits_quota)
        self._left_quotas = self._take_quotas(live)  # until it is known who uses them
        rival_gone: Subscribers[str] = Subscribers()
        self._expectations = Expectations(
            live,
            settings.adoption_grace,
            holder=self._holder,
            rescue=self._rescue,
            lost=self._lost_meanwhile,
            rival_gone=rival_gone,
            settled=self._settled,
        )
        self._adopter = Adopter(
            serving=lambda process: process in self.processes,
            known=self._expected_row,
            make=self._make_adopted,
            rival=self._expectations.rival,
            left_over=lambda process, pid: pid in self._movers.get(process, ()),
            done=self._adopted,
            failed=lambda process, why: self._expectations.settle(process, alive=False, why=why),
        )
        rival_gone.add(self._adopter.rival_gone)
        self._control = Listener(settings.control_socket, self._adopter.first)
        self._clients = Listener(settings.client_socket, self._client_came, refuse)
        self.guard = Guard(
            watch=Watch(frozenset({str(program.native_dir), str(program.native_dir / "shim")})), records=records,
            job_log=self.job_log, processes=self.processes, known=unprotected, stop_job=self.stop_job,
            grace=settings.stop_grace,
        )  # fmt: skip
        for process in live:
            self.guard.add(process.job)
        self._collecting = self._loop.call_later(BETWEEN_LINES, self._collect_lines)

    # --- what the API asks ------------------------------------------------------------------------------------------

    def make_job(
        self, *, name: str, command: str, uid: int, device: str | None, visible: str | None = None,
        hang_timeout: float | None = None, replica_policy: ReplicaPolicy | None = None, strict: bool = False,
        runner: tuple[int, int] | None = None, nodes: Sequence[str] = (), external_id: str | None = None,
        priority: Priority = "normal", reserved_bytes: int | None = None, memory_quota: int | None = None,
        sm_share: int | None = None, walltime_s: float | None = None,
    ) -> tuple[JobRow, str]:  # fmt: skip
        """A job for `xmigctl run`, and its token. It exists once the caller has written it down and registered it.
        `visible`: $CUDA_VISIBLE_DEVICES, for a job without `device`."""
        if device is not None and visible is not None:
            raise Invalid("a job has either `device` or `visible_devices`")
        if device is not None:
            resolve_device(device, self._settings.device_names)
        elif visible is not None:
            device = self._visible(visible, None)
        if sm_share is not None and not (self._mps.devices if device is None else {device} <= self._mps.devices):
            which = "no device of this node is" if device is None else f"{device} is not a device that is"
            raise Invalid(f"sm_share: {which} shared through MPS", code="no_mps",
                          hint="leave the share out, or name the device in XMIG_MPS_DEVICES")  # fmt: skip
        joined = ",".join(nodes) or None
        if joined is not None:
            self.scopes.check(joined)
        return new_job(
            name=name, command=command, uid=uid, device=device, registered=True, hang_timeout=hang_timeout,
            replica_policy=replica_policy, strict=strict, runner=runner, nodes=joined, external_id=external_id,
            priority=priority, reserved_bytes=reserved_bytes, memory_quota=memory_quota, sm_share=sm_share,
            walltime_s=walltime_s,
        )  # fmt: skip

    def set_recovery(self, *, max_attempts: int, stall_bound: float, snapshot_cost: float, hang_timeout: float) -> None:
        """What an operator wants. A process that runs keeps its bound, cost and timeout: its server has them."""
        self._limits = replace(self._limits, max_attempts=max_attempts)
        self._stall_bound, self._snapshot_cost = stall_bound, snapshot_cost
        self._hang_timeout = hang_timeout
        for process in self.processes.values():
            process.machine.limits = replace(process.machine.limits, max_attempts=max_attempts)

    def restore(
        self, job: JobRow, row: ProcessRow, client: Fd, memory: JobMemory, handles: dict[int, Handle], generation: int,
        ahead: Ahead | None = None,
    ) -> Process:  # fmt: skip
        """A program that was made again from a checkpoint, in a job of its own. It is suspended, and has all that it
        had: `handles` are its shadow and its images, `generation` counts the servers that it has had. `ahead`: the one
        that has worked ahead of it."""
        if job.id not in self._jobs:
            self._records.job_made(job)
            self.register_job(job)
            # With the process from which the others descend the job ends.
            self.runners.watch(job.id, job.runner_pid or row.pid, job.runner_start or row.start_time)
        self._records.process_started(row)
        process = self._make(row, job, client, memory)
        self.processes[row.id] = process
        process.restored(handles, generation, ahead)
        return process

    def work_ahead(self, wanted: Wanted, no_room: Callable[[str], None]) -> Ahead:
        """Start a server for a process that is to come here. `no_room` is called if its device has none for it. It is
        the caller's to close."""
        address = self._settings.peer_host if wanted.several_nodes else ""
        program = replace(self._program, devices=0, address=address)
        ahead = Ahead(wanted, program, self._mps, no_room=no_room, over=self.aheads.discard)
        self.aheads.add(ahead)
        return ahead

    def register_job(self, job: JobRow) -> None:
        self._jobs[job.id] = job
        self.guard.add(job)

    def processes_of(self, job: str) -> list[Process]:
        return [process for process in self.processes.values() if process.job.id == job]

    def has_ranks(self, nodes: str) -> bool:
        """Of jobs with these nodes."""
        return any(process.job.nodes == nodes for process in self.processes.values())

    def shares_job(self, peer: str) -> bool:
        """Has a job ranks here and on that node? Every thread may ask."""
        return any(peer in (process.job.nodes or "").split(",") for process in list(self.processes.values()))

    def stop_job(self, job: str, why: str) -> int:
        """SIGTERM to its programs, SIGKILL after the grace. Returns how many there are."""
        self._jobs.pop(job, None)
        processes = self.processes_of(job)
        for process in processes:
            process.stop(why)
        return len(processes)

    def _end_for_corruption(self, job: JobRow, why: str) -> None:
        """Its ranks hold different memory, and that is its policy."""
        self.job_log.line(job, f"the job is ended, as its replica policy says: {why}", source="xmigd", level="error")
        self._records.job_stopped(job.id)
        self.stop_job(job.id, "its ranks hold different memory")

    def inject(
        self, job: str, *, point: e.InjectPoint, kind: e.InjectKind, sequence: int, error: int, process: str | None,
        address: int | None = None,
    ) -> list[tuple[Process, int]]:  # fmt: skip
        """Arm a fault in the job's processes, or in one of them. Returns each with the injection's number."""
        if kind == "flip" and point != "record":
            raise Invalid("a bit is flipped at a record", hint="leave `point` out")
        targets = [p for p in self.processes_of(job) if process is None or p.row.id == process]
        targets = [p for p in targets if p.state in ("running", "recovering")]
        if not targets:
            raise NotFound("the job has no running process", hint="xmigctl ps lists what runs")
        armed = []
        for target in targets:
            injection = e.Injection(next(self._injections), point, kind, sequence, error)
            if kind == "flip":
                injection = replace(injection, address=self._to_flip(target) if address is None else address)
            logger.warning("fault armed", job=job[:12], process=target.row.id[:12], point=point, kind=kind)
            target.tell(e.InjectRequested(t=now(), injection=injection))
            armed.append((target, injection.id))
        return armed

    def _to_flip(self, process: Process) -> int:
        """Memory that is compared with that of other ranks."""
        watched = self._local_ranks.watched(process.row.id)
        if not watched:
            raise Conflict(
                "no memory of the process is compared with that of other ranks", hint="name an `address`, or wait"
            )
        return watched[0]

    def lose_device(self, device: str, why: str) -> int:
        """It is gone with its memory. Processes that were on it go on elsewhere, as far as their content is there.
        Returns how many that are."""
        self.cordoned[device] = why
        logger.error("a device is lost", device=device, why=why)
        affected = [one for one in self.processes.values() if device in devices_of(one.row.device)]
        for process in list(self.processes.values()):
            instead = self._instead(process, device)
            if not process.move_claims(device, instead):
                instead = device
            process.device_lost(device, instead, f"{device} was lost with its memory: {why}")
        return len(affected)

    def _instead(self, process: Process, device: str) -> str:
        """The same one if there is no other: it may come back."""
        kind, own = device.partition(":")[0], devices_of(process.row.device)
        claimed = process.claimed(own.index(device)) if device in own else 0
        free = [
            name for name in self._settings.device_names
            if name.partition(":")[0] == kind and name not in own and name not in self.cordoned
            and process.lacks_quota(name, claimed) is None
        ]  # fmt: skip
        in_use = [name for one in self.processes.values() for name in devices_of(one.row.device)]
        return least_used(free, in_use) if free else device

    def _make_ranks(
        self, members: dict[str, Member], may_begin: Callable[[], bool],
        hear_all: Callable[[Callable[[], None]], None], copy_unique: Callable[[Sequence[Member]], None],
    ) -> Ranks:  # fmt: skip
        """Of jobs of several nodes. Rounds are numbered by the time of day: the nodes have no other in common. Nothing
        is compared: what other nodes' devices hold is not in reach."""
        return Ranks(
            members, self.job_log, self.history, self._standby_memory, copy_unique, self._settings.recovery_timeout,
            time.time_ns(), 0, self._end_for_corruption, self._settings.replica_policy, may_begin, hear_all, leads=True,
        )  # fmt: skip

    async def _fetch_chunks(self, rank: FarRank, nodes: str, chunks: Sequence[m.ChunkHash]) -> Found:
        if self.fetch_chunks is None:
            raise Unavailable("the daemon is starting")
        return await self.fetch_chunks(rank, nodes, chunks)

    def together(self, process: Process) -> list[Process]:
        """Those that are suspended or resumed as one, itself among them: its group."""
        return self.scopes.together(process)

    def pause_together(self, process: Process) -> None:
        """At the next round of its group, once all of its ranks are to."""
        self.scopes.pause(process)

    def let_go_on(self, process: Process) -> None:
        """If it is paused, or is to be, alone or with its group: not any more."""
        if not self.scopes.not_to_pause(process):
            process.let_go_on()
        elif process.paused:
            process.not_paused()

    def suspend_together(self, processes: Sequence[Process], to: To) -> None:
        """They are about to be, as one, with ranks of other nodes. Raises Conflict, Unavailable: these cannot be."""
        self.scopes.suspend(processes, to)

    def resume_together(self, processes: Sequence[Process], *, joins: bool = False) -> bool:
        """They wait for each other from now on, before any of them executes anything. `joins`: and for others, which
        another node has begun with. False: they were not ranks. Raises Conflict, Unavailable: others cannot be
        resumed."""
        return self.scopes.resume(processes, joins=joins)

    @property
    def expected(self) -> list[str]:
        """Processes of an earlier daemon whose servers have not announced themselves yet."""
        return [live.row.id for live in self._expectations.rows]

    def collect_lines(self, job: str | None = None) -> None:
        """What programs have reported until now goes into their jobs' logs."""
        for process in list(self.processes.values()):
            if job is None or process.job.id == job:
                process.collect_lines()

    def _collect_lines(self) -> None:
        self._collecting = self._loop.call_later(BETWEEN_LINES, self._collect_lines)
        self.collect_lines()

    async def stop(self) -> None:
        """Leave: no more programs are let in, recoveries under way are finished, servers stay with their programs."""
        self._clients.close()
        self.runners.close()
        self._collecting.cancel()
        for process in [p for p in self.processes.values() if p.state == "starting"]:
            process.tell(e.ClientExited(t=now(), reason="xmigd is stopping"))
        recovering = [p for p in self.processes.values() if p.state == "recovering"]
        if recovering:
            logger.info("waiting for recoveries before leaving", count=len(recovering))
            deadline = self._loop.time() + STOP_PATIENCE
            while any(p.state == "recovering" for p in recovering) and self._loop.time() < deadline:
                await asyncio.sleep(0.01)
        self._control.close()
        self._adopter.close()
        self._expectations.close()
        self.scopes.close()
        self.unique.close()
        for ahead in list(self.aheads):
            ahead.close()
        for process in list(self.processes.values()):
            await process.spawned()
            process.leave()
        logger.info("left", processes=len(self.processes), why="servers go on and wait for the next daemon")
        self.processes.clear()

    # --- programs ---------------------------------------------------------------------------------------------------

    def _client_came(self, sock: socket.socket, peer: Peer, received: Received) -> None:
        close_all(received.fds)
        if (notice := parse_notice(received.data)) is not None:
            self._note_came(sock, peer, *notice)
            return
        hello = None
        try:
            hello = parse_hello(received.data)
            if hello.reattach:
                self._reattach(sock, peer, hello)
            else:
                self._start(sock, peer, hello)
        except XmigError as error:
            status = CUDA_ERROR_SYSTEM_NOT_READY
            logger.warning("program refused", pid=peer.pid, uid=peer.uid, why=str(error))
            if isinstance(error, ProtocolError):
                status = 803  # CUDA_ERROR_SYSTEM_DRIVER_MISMATCH
            elif error.code == "no_such_device":
                status = 100  # CUDA_ERROR_NO_DEVICE
            self._note_refusal(peer, hello, str(error))
            answer(sock, status, message=str(error))
        except OSError as error:
            logger.error("program refused", pid=peer.pid, uid=peer.uid, why=error.strerror)
            self._note_refusal(peer, hello, _shortage(error))
            answer(sock, CUDA_ERROR_OUT_OF_MEMORY, message=_shortage(error))

    def _note_came(self, sock: socket.socket, peer: Peer, job: str, text: str) -> None:
        """A line of a process that shares no journal with us."""
        sock.close()
        try:
            row = self._named_job(job, peer)
        except XmigError as error:
            logger.debug("a line of no job", pid=peer.pid, uid=peer.uid, why=str(error))
            return
        if row is not None:
            self.job_log.line(row, text, source="program")

    def _note_refusal(self, peer: Peer, hello: ClientHello | None, why: str) -> None:
        with contextlib.suppress(XmigError):
            job = None if hello is None or hello.reattach else self._named_job(hello.job, peer)
            if job is not None:
                self.job_log.line(job, f"xmigd refused this process: {why}", source="xmigd", level="error")

    def _start(self, sock: socket.socket, peer: Peer, hello: ClientHello) -> None:
        if os.geteuid() not in (0, peer.uid):
            raise Forbidden(
                f"this xmigd runs as user {os.geteuid()} and serves only that user", hint="run xmigd as root for all"
            )
        job = self._job_for(peer, hello)
        in_use = [process.row.device for process in self.processes.values()]
        wanted = job.device if hello.visible is None else self._visible(hello.visible, job.device)
        names = self._settings.device_names
        if wanted is None and job.sm_share is not None:
            names = [name for name in names if name in self._mps.devices] or names
        device = choose_device(wanted, names, in_use, self.cordoned)
        client = peer_pidfd(sock, peer.pid)
        memory = JobMemory.create(self._layout, self._settings.journal_mib * MIB)
        self._replaced_by_exec(peer.pid)
        row = ProcessRow(
            id=new_id(), job=job.id, pid=peer.pid, start_time=pidfds.start_time(peer.pid), uid=peer.uid, gid=peer.gid,
            command=hello.command or job.command, device=device,
        )  # fmt: skip
        process = self._make(row, job, client, memory)
        try:
            process.has_slots(process.take_slots(devices_of(device)))
        except (OSError, XmigError):
            process.leave()
            raise
        if not job.registered:
            self._records.job_made(job)
        self._records.process_started(row)
        self.processes[row.id] = process
        self._starting[row.id] = sock
        process.tell(e.ClientArrived(t=now()))

    def _job_for(self, peer: Peer, hello: ClientHello) -> JobRow:
        if not hello.job:
            name = os.path.basename(hello.command.split(" ", 1)[0]) or f"pid {peer.pid}"
            job, _ = new_job(name=name, command=hello.command, uid=peer.uid, device=None, registered=False)
            return job
        named = self._named_job(hello.job, peer)
        assert named is not None
        return named

    def _named_job(self, given: str, peer: Peer) -> JobRow | None:
        """Of $XMIG_JOB; None: it was not set. Raises XmigError: the process may not join that job."""
        if not given:
            return None
        name, _, token = given.partition(":")
        return check_membership(self._jobs.get(name) or self._find_job(name), name, token, peer.uid)

    def _visible(self, text: str | Literal[True], job_device: str | None) -> str:
        """The devices that $CUDA_VISIBLE_DEVICES names; True: all that it could name. Raises XmigError: none."""
        choice = numbered(job_device, self._settings.device_names)
        found = list(choice.values())[:MAX_DEVICES] if text is True else visible(text, choice, self._uuid_of)
        if not found:
            listed = ", ".join(f"{number} ({name})" for number, name in choice.items())
            whose = "this node has" if job_device is None else "the job has"
            raise XmigError(
                f"CUDA_VISIBLE_DEVICES={text} names no device", code="no_such_device", hint=f"{whose} {listed}"
            )
        return as_one(found)

    def _replaced_by_exec(self, pid: int) -> None:
        """A pid that shakes hands again has started another program (exec): the earlier one's memory is gone."""
        for process in [p for p in self.processes.values() if p.row.pid == pid and p.state != "ended"]:
            process.tell(e.ClientExited(t=now(), reason="the program has started another one in its place (exec)"))

    def _make(
        self, row: ProcessRow, job: JobRow, client: Fd, memory: JobMemory, faults: int = 0, recoveries: int = 0
    ) -> Process:
        settings = self._settings  # as they are now: a reload changes them
        limits = replace(
            self._limits, hang_timeout=self._hang_timeout if job.hang_timeout is None else job.hang_timeout,
            start_timeout=settings.start_timeout, phase_timeout=settings.recovery_timeout,
            stable_after=settings.stable_after, stop_grace=settings.stop_grace, standby=settings.standby,
            move=MoveLimits(
                start_timeout=settings.start_timeout, phase_timeout=settings.recovery_timeout,
                handover_timeout=min(settings.recovery_timeout, MoveLimits().handover_timeout),
            ),
        )  # fmt: skip
        process = Process(
            row=row, job=job, pidfd=client, memory=memory, program=self._program_of(job), limits=limits,
            stall_bound=self._stall_bound, snapshot_cost=self._snapshot_cost, layout=self._layout,
            records=self._records, job_log=self.job_log, admit=self._admit, refuse=self._refuse,
            finished=self._finished, being_lost=self.being_lost,
            suspend_dir=self._settings.database.parent / "suspended", host_pool=self.host_pool,
            snapshot_committed=self._committed, rank_reported=self.scopes.reported,
            group_concerns=self.scopes.changed, fetch_chunks=self._fetch_chunks, fd_store=self._fd_store,
            quotas=self._quotas, mps=self._mps, faults=faults,
            recoveries=recoveries,
        )  # fmt: skip
        process.neighbour_copy = self.unique.neighbour_of(job)
        return process

    def _program_of(self, job: JobRow) -> ServerProgram:
        """Servers of a job of several nodes are to be reached from the others."""
        return self._program if job.nodes is None else replace(self._program, address=self._settings.peer_host)

    def _suspended_bytes(self) -> int | None:
        """Host memory that suspended processes have; None while that changes, or is not known: what their holders hold
        they have yet to tell this daemon."""
        if any(live.state == "suspended" for live in self._expectations.rows):
            return None
        moves = [process.machine.move for process in self.processes.values()]
        if any(move is not None and move.kind == "suspend" for move in moves):
            return None
        return sum(in_host_memory(process.handles.values()) for process in self.processes.values())

    def _admit(self, process: Process) -> None:
        sock = self._starting.pop(process.row.id, None)
        if sock is not None and process.memory is not None:
            self._learn(process)
            answer(sock, 0, job=process.row.id, fds=process.memory.shared)

    def _refuse(self, process: Process, error: int, message: str) -> None:
        sock = self._starting.pop(process.row.id, None)
        if sock is not None:
            answer(sock, error, job=process.row.id, message=message)

    def _committed(self, process: Process, snapshot: m.Snapshot) -> None:
        if snapshot.round:
            self.scopes.committed(process, snapshot.round)
        elif process.grouped:
            self.scopes.took_alone(process)
        if self._snapshot_store is not None and process.memory is not None:
            memory = process.memory
            fds = (memory.journal, memory.snapshot0, memory.snapshot1)
            self._snapshot_store.snapshot(process.row.id, process.job.id, snapshot, fds, process.handles)

    def _finished(self, process: Process) -> None:
        self.processes.pop(process.row.id, None)
        self.unique.finished(process)
        if (nodes := process.job.nodes) is not None and not self.has_ranks(nodes):
            self.unique.forget(nodes)
            self.nodes_left(nodes)
        self.scopes.finished(process)
        if self._snapshot_store is not None:
            self._snapshot_store.ended(process.row.id)
        sock = self._starting.pop(process.row.id, None)
        if sock is not None:
            answer(sock, CUDA_ERROR_SYSTEM_NOT_READY, message="xmigd is stopping; try again when it is back")

    # --- programs and servers of an earlier daemon ------------------------------------------------------------------

    def _reattach(self, sock: socket.socket, peer: Peer, hello: ClientHello) -> None:
        """A program whose server and daemon had both gone asks whether there is anything left for it."""
        name = hello.job.partition(":")[0]
        for process in self.processes.values():
            if process.row.pid == peer.pid and name in (process.row.id, process.job.id, process.row.origin):
                lost = process.state in ("losing", "lost")
                why = process.machine.doom[1] if process.machine.doom is not None else ""
                self._answer_reattach(sock, process.row.id, not lost, why)
                return
        expected = self._expectations.find(hello.job, peer.pid)
        if expected is None:
            why = self._expectations.why_gone(hello.job, peer.pid) or "this xmigd does not know the process"
            self._answer_reattach(sock, name, False, why)
            return
        self._expectations.wait(expected, lambda alive, why: self._answer_reattach(sock, expected, alive, why))

    @staticmethod
    def _answer_reattach(sock: socket.socket, process: str, alive: bool, why: str) -> None:
        if alive:
            answer(sock, 0, job=process)
        else:
            answer(
                sock, CUDA_ERROR_DEVICE_UNAVAILABLE, job=process,
                message=f"the process's device memory is lost: {why}; start the program again",
            )  # fmt: skip

    def _expected_row(self, process: str) -> ProcessRow | None:
        live = self._expectations.take(process)
        return None if live is None else live.row

    def _make_adopted(self, announce: m.Announce, peer: Peer, client: Fd, memory: JobMemory) -> Process:
        """Raises ProtocolError."""
        live = self._expectations.take(announce.job)
        if live is not None:
            # A snapshot_store has no device; a server knows its own better than a record that may be behind.
            row = live.row if announce.keeps is not None else replace(live.row, device=announce.device)
            quota = self._announced_quota(live.job.id, announce, memory)
            process = self._make(row, live.job, client, memory, live.faults, live.recoveries)
            process.quota = quota
            return process
        uid = pidfds.owner(announce.client_pid)
        job, _ = new_job(name=f"pid {announce.client_pid}", command="", uid=peer.uid, device=None, registered=False)
        row = ProcessRow(
            id=announce.job, job=job.id, pid=announce.client_pid, start_time=pidfds.start_time(announce.client_pid),
            uid=uid if uid is not None else peer.uid, gid=peer.gid, command="", device=announce.device,
        )  # fmt: skip
        logger.warning("adopting a process that the database does not know", process=announce.job[:12])
        self._records.job_made(job)
        self._records.process_started(row)
        return self._make(row, job, client, memory)

    def _announced_quota(self, job: str, announce: m.Announce, memory: JobMemory) -> QuotaPage | None:
        """The page of its job's memory quota. None: a suspended process, or a server of an earlier version, has none.
        Raises ProtocolError."""
        if memory.quota is None:
            return None
        page = self._quotas.adopt(job, memory.quota)
        if not page.has(announce.job, announce.quota_slots, len(devices_of(announce.device))):
            raise ProtocolError("it announces a part of its job's memory quota that is not its process's")
        return page

    def _take_quotas(self, live: Iterable[LiveProcess]) -> list[QuotaPage]:
        """What the descriptor store has of them: before anybody asks for one."""
        found = []
        for process in live:
            fd = self._fd_store.quota_of(process.row.id)
            try:
                found += [] if fd is None else [self._quotas.adopt(process.job.id, fd)]
            except ProtocolError as error:
                logger.error("a memory quota is not taken over", process=process.row.id[:12], why=str(error))
        return found

    def _awaits_quota(self, job: str) -> bool:
        return any(live.row.job == job and live.state != "suspended" for live in self._expectations.rows)

    def _settle_quotas(self) -> None:
        """Everybody who is left has been heard of: what others had of a quota is given back."""
        self._left_quotas.clear()
        used: dict[QuotaPage, set[int]] = {}
        for process in self.processes.values():
            if process.quota is not None:
                servers = (server.quota_slots for server in process.servers.values())
                used.setdefault(process.quota, set()).update(process.quota_slots, *servers)
        for page, slots in used.items():
            page.free_others(slots)

    def _adopted(self, process: Process, server: Server, announce: m.Announce) -> None:
        live = self._expectations.take(process.row.id)
        if process.state == "ended":  # its program exited in the middle of the announcement
            self._expectations.settle(process.row.id, alive=True, why="")
            server.kill()
            return
        logger.info("server adopted", process=process.row.id[:12], server_pid=server.pid, handles=len(process.handles))
        self.processes[process.row.id] = process
        if live is not None and live.migration is not None:
            self._records.migration(resolved(live.migration, server.pid, announce))
        if announce.keeps is not None:
            process.holder_adopted(server, announce.generation, announce.keeps)
            self.scopes.made_again([process])
        else:
            detour = live is not None and live.migration is not None and live.migration.path == "host"
            unfinished = None if live is None else interrupted(live, server.pid)
            process.adopted(server, announce, detour=detour, interrupted=unfinished)
        # Last: what the descriptor store passed is closed with it, and has just been compared with what the server has.
        self._expectations.settle(process.row.id, alive=True, why="")

    def _holder(self, live: LiveProcess) -> int:
        """The server that has the process by the journal that was kept; 0: none, or not known. The database may not
        name it: the daemon died before it was recorded."""
        row = live.row
        server = self._fd_store.server_of(row.id) or 0
        if live.state == "suspended" or live.migration is not None:
            return 0
        known = pidfds.owner(server) == row.uid and pidfds.program(server) == SERVER
        return server if known and self._fd_store.is_open_in(row.id, server) else 0

    def _rescue(self, live: LiveProcess, why: str) -> str:
        """Recover a process whose server is gone from what the descriptor store kept. Returns why not."""
        row = live.row
        if self._fd_store.server_of(row.id) is None:
            return "nobody kept its memory"
        if live.state == "suspended" or live.migration is not None:
            return "it was suspended or moving then"
        if server := self._holder(live):
            return f"a server that is not known (pid {server}) has it"
        if not pidfds.same_process(row.pid, row.start_time):
            return "its program has ended"
        left = self._fd_store.left(row.id)
        if isinstance(left, str):
            return left
        try:
            client = Fd(os.pidfd_open(row.pid))
        except OSError as error:
            return f"its program cannot be watched: {error.strerror}"
        process = self._make(row, live.job, client, left.memory, live.faults, live.recoveries)
        slots = self._left_slots(process)
        if slots is None:  # without one it could have more than its part
            close_all(handle.fd for handle in left.handles.values())
            process.leave()
            return "what it has of its job's memory quota is not known any more"
        self.processes[row.id] = process
        if self._expected_of[row.job] > 1 or any(process.rounds()) or live.job.nodes is not None:
            self.scopes.orphaned(process)
        process.orphaned(left.handles, slots, why, interrupted(live, None))
        return ""

    def _left_slots(self, process: Process) -> Slots | None:
        """Of a process without a server. None: nothing says any more what it has of its job's memory quota."""
        if process.job.memory_quota is None:
            return ()
        process.quota = self._quotas.of(process.job.id)
        if process.quota is None or process.memory is None or process.memory.quota is None:
            return None
        return process.quota.slots_of(process.row.id, devices_of(process.row.device))

    def _settled(self) -> None:
        self._settle_quotas()
        self._fd_store.settled()
        self.scopes.settled()

    def _lost_meanwhile(self, live: LiveProcess, why: str) -> None:
        row = live.row
        if live.migration is not None:
            self._records.migration(over(live.migration, "failed", "lost", "interrupted", why))
        alive = pidfds.same_process(row.pid, row.start_time)
        if (unfinished := interrupted(live, None)) is not None:
            unfinished.outcome = "lost" if alive else "abandoned"
            unfinished.story.append(f"{INTERRUPTED}: {why}")
            self._records.recovery(row.id, unfinished)
        if alive:
            logger.error("process lost", process=row.id[:12], pid=row.pid, why=why)
            self._records.process_state(row.id, "lost", why)
            text = f"the process is lost: {why}"
            self.job_log.line(live.job, text, source="xmigd", level="error", process=row.id)
        else:
            self._records.process_state(row.id, "ended", "program and server ended while no daemon was there")


def resolved(record: v.MigrationRecord, server_pid: int, announce: m.Announce) -> v.MigrationRecord:
    """How a move ended that an earlier daemon had begun: by who has the process now."""
    if announce.keeps is not None:
        if record.kind == "suspend":
            return over(record, "done", announce.keeps)
        return over(record, "failed", announce.keeps, "interrupted", "xmigd ended in the middle of it")
    if server_pid == record.target_pid and record.kind != "suspend":
        record.device = announce.device
        return over(record, "done", "device")
    return over(record, "failed", "device", "interrupted", "xmigd ended in the middle of it")


def over(
    record: v.MigrationRecord, state: v.Outcome, location: v.Location, code: str | None = None, why: str | None = None
) -> v.MigrationRecord:
    record.state, record.location, record.code, record.error = state, location, code, why
    record.phase, record.ended = "over", now()
    return record


def answer(sock: socket.socket, status: int, *, job: str = "", message: str = "", fds: tuple[Fd, ...] = ()) -> None:
    """The daemon's one message of a handshake; then the connection is over."""
    packed = pack_welcome(status, fds=len(fds), job=job, message=message)
    with contextlib.suppress(OSError), sock:
        socket.send_fds(sock, [packed], [fd.fileno() for fd in fds], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def refuse(sock: socket.socket, why: XmigError) -> None:
    """The answer to a program that has no place to shake hands in. The socket stays the caller's."""
    with contextlib.suppress(OSError):
        sock.send(
            pack_welcome(CUDA_ERROR_SYSTEM_NOT_READY, message=str(why)), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
        )
        sock.shutdown(socket.SHUT_WR)


def _shortage(error: OSError) -> str:
    return f"xmigd cannot take the process: {error.strerror}; free descriptors or memory, or raise LimitNOFILE"


def _first_injection() -> int:
    """Numbers that an adopted server's armed injections, made by an earlier daemon, do not have."""
    return now() // 1_000
