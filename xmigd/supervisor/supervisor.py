"""All programs of this node, their servers, and the two sockets through which strangers come."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
from collections.abc import Callable
from dataclasses import replace

from xmigd import log
from xmigd.errors import Forbidden, NotFound, ProtocolError, XmigError
from xmigd.native import Layout
from xmigd.records import JobRow, LiveProcess, ProcessRow, Records
from xmigd.recovery import events as e
from xmigd.recovery.machine import (
    CUDA_ERROR_DEVICE_UNAVAILABLE,
    CUDA_ERROR_OUT_OF_MEMORY,
    CUDA_ERROR_SYSTEM_NOT_READY,
    Limits,
)
from xmigd.settings import MIB, Settings
from xmigd.supervisor import messages as m
from xmigd.supervisor import pidfd as pidfds
from xmigd.supervisor.adoption import Adopter, Expectations
from xmigd.supervisor.channel import Peer, Received, peer_pidfd
from xmigd.supervisor.fds import Fd, JobMemory, close_all
from xmigd.supervisor.handshake import ClientHello, pack_welcome, parse_hello
from xmigd.supervisor.jobs import check_membership, least_used, new_id, new_job, resolve_device
from xmigd.supervisor.listeners import Listener
from xmigd.supervisor.process import Process, now
from xmigd.supervisor.server import Server, ServerProgram

logger = log.get("supervisor")

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
    ) -> None:
        self._settings = settings
        self._layout = layout
        self._program = program
        self._records = records
        self._find_job = find_job
        self._loop = asyncio.get_running_loop()
        self._limits = Limits(
            max_attempts=settings.max_attempts,
            start_timeout=settings.start_timeout,
            phase_timeout=settings.recovery_timeout,
            stable_after=settings.stable_after,
            stop_grace=settings.stop_grace,
            standby=settings.standby,
        )
        self.processes: dict[str, Process] = {}
        self._jobs: dict[str, JobRow] = {process.job.id: process.job for process in live}
        self._starting: dict[str, socket.socket] = {}  # programs that wait in their handshake
        self._injections = itertools.count(_first_injection())
        self._expectations = Expectations(live, settings.adoption_grace, self._lost_meanwhile)
        self._adopter = Adopter(
            serving=lambda process: process in self.processes,
            owner=self._owner_of_expected,
            make=self._make_adopted,
            done=self._adopted,
            failed=lambda process, why: self._expectations.settle(process, alive=False, why=why),
        )
        self._control = Listener(settings.control_socket, self._adopter.first)
        self._clients = Listener(settings.client_socket, self._client_came)

    # --- what the API asks ------------------------------------------------------------------------------------------

    def make_job(
        self, *, name: str, command: str, uid: int, device: str | None, hang_timeout: float | None = None
    ) -> tuple[JobRow, str]:
        """A job for `xmigctl run`, and its token. It exists once the caller has written it down and registered it."""
        if device is not None:
            resolve_device(device, self._settings.device_names)
        return new_job(
            name=name, command=command, uid=uid, device=device, registered=True, hang_timeout=hang_timeout
        )

    def register_job(self, job: JobRow) -> None:
        self._jobs[job.id] = job

    def processes_of(self, job: str) -> list[Process]:
        return [process for process in self.processes.values() if process.job.id == job]

    def stop_job(self, job: str, why: str) -> int:
        """SIGTERM to its programs, SIGKILL after the grace. Returns how many there are."""
        self._jobs.pop(job, None)
        processes = self.processes_of(job)
        for process in processes:
            process.stop(why)
        return len(processes)

    def inject(
        self, job: str, *, point: e.InjectPoint, kind: e.InjectKind, sequence: int, error: int, process: str | None
    ) -> list[tuple[Process, int]]:
        """Arm a fault in the job's processes, or in one of them. Returns each with the injection's number."""
        targets = [p for p in self.processes_of(job) if process is None or p.row.id == process]
        targets = [p for p in targets if p.state in ("running", "recovering")]
        if not targets:
            raise NotFound("the job has no running process", hint="xmigctl ps lists what runs")
        armed = []
        for target in targets:
            injection = e.Injection(next(self._injections), point, kind, sequence, error)
            logger.warning("fault armed", job=job[:12], process=target.row.id[:12], point=point, kind=kind)
            target.tell(e.InjectRequested(t=now(), injection=injection))
            armed.append((target, injection.id))
        return armed

    def device_use(self) -> dict[str, int]:
        use = dict.fromkeys(self._settings.device_names, 0)
        for process in self.processes.values():
            kind, _, ordinals = process.row.device.partition(":")
            for ordinal in ordinals.split(","):
                name = f"{kind}:{ordinal}"
                use[name] = use.get(name, 0) + 1
        return use

    async def stop(self) -> None:
        """Leave: no more programs are let in, recoveries under way are finished, servers stay with their programs."""
        self._clients.close()
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
        for process in list(self.processes.values()):
            await process.spawned()
            process.leave()
        logger.info("left", processes=len(self.processes), why="servers go on and wait for the next daemon")
        self.processes.clear()

    # --- programs ---------------------------------------------------------------------------------------------------

    def _client_came(self, sock: socket.socket, peer: Peer, received: Received) -> None:
        close_all(received.fds)
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
            answer(sock, status, message=str(error))
        except OSError as error:
            logger.error("program refused", pid=peer.pid, uid=peer.uid, why=error.strerror)
            answer(sock, CUDA_ERROR_OUT_OF_MEMORY, message=_shortage(error))

    def _start(self, sock: socket.socket, peer: Peer, hello: ClientHello) -> None:
        if os.geteuid() not in (0, peer.uid):
            raise Forbidden(
                f"this xmigd runs as user {os.geteuid()} and serves only that user", hint="run xmigd as root for all"
            )
        job = self._job_for(peer, hello)
        device = (
            resolve_device(job.device, self._settings.device_names)
            if job.device is not None
            else least_used(self._settings.device_names, [process.row.device for process in self.processes.values()])
        )
        client = peer_pidfd(sock, peer.pid)
        memory = JobMemory.create(self._layout, self._settings.journal_mib * MIB)
        self._replaced_by_exec(peer.pid)
        row = ProcessRow(
            id=new_id(), job=job.id, pid=peer.pid, start_time=pidfds.start_time(peer.pid), uid=peer.uid, gid=peer.gid,
            command=hello.command or job.command, device=device,
        )  # fmt: skip
        if not job.registered:
            self._records.job_made(job)
        self._records.process_started(row)
        process = self._make(row, job, client, memory)
        self.processes[row.id] = process
        self._starting[row.id] = sock
        process.tell(e.ClientArrived(t=now()))

    def _job_for(self, peer: Peer, hello: ClientHello) -> JobRow:
        if not hello.job:
            name = os.path.basename(hello.command.split(" ", 1)[0]) or f"pid {peer.pid}"
            job, _ = new_job(name=name, command=hello.command, uid=peer.uid, device=None, registered=False)
            return job
        name, _, token = hello.job.partition(":")
        job_row = self._jobs.get(name) or self._find_job(name)
        return check_membership(job_row, name, token, peer.uid)

    def _replaced_by_exec(self, pid: int) -> None:
        """A pid that shakes hands again has started another program (exec): the earlier one's memory is gone."""
        for process in [p for p in self.processes.values() if p.row.pid == pid and p.state != "ended"]:
            process.tell(e.ClientExited(t=now(), reason="the program has started another one in its place (exec)"))

    def _make(
        self, row: ProcessRow, job: JobRow, client: Fd, memory: JobMemory, faults: int = 0, recoveries: int = 0
    ) -> Process:
        hang_timeout = self._settings.hang_timeout if job.hang_timeout is None else job.hang_timeout
        limits = replace(self._limits, hang_timeout=hang_timeout)
        return Process(
            row=row, job=job, pidfd=client, memory=memory, program=self._program, limits=limits,
            cut_budget=self._settings.cut_budget, records=self._records, admit=self._admit, refuse=self._refuse,
            finished=self._finished, faults=faults, recoveries=recoveries,
        )  # fmt: skip

    def _admit(self, process: Process) -> None:
        sock = self._starting.pop(process.row.id, None)
        if sock is not None and process.memory is not None:
            answer(sock, 0, job=process.row.id, fds=process.memory.shared)

    def _refuse(self, process: Process, error: int, message: str) -> None:
        sock = self._starting.pop(process.row.id, None)
        if sock is not None:
            answer(sock, error, job=process.row.id, message=message)

    def _finished(self, process: Process) -> None:
        self.processes.pop(process.row.id, None)
        sock = self._starting.pop(process.row.id, None)
        if sock is not None:
            answer(sock, CUDA_ERROR_SYSTEM_NOT_READY, message="xmigd is stopping; try again when it is back")

    # --- programs and servers of an earlier daemon ------------------------------------------------------------------

    def _reattach(self, sock: socket.socket, peer: Peer, hello: ClientHello) -> None:
        """A program whose server and daemon had both gone asks whether there is anything left for it."""
        name = hello.job.partition(":")[0]
        for process in self.processes.values():
            if process.row.pid == peer.pid and name in (process.row.id, process.job.id):
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

    def _owner_of_expected(self, process: str) -> int | None:
        live = self._expectations.take(process)
        return None if live is None else live.row.uid

    def _make_adopted(self, announce: m.Announce, peer: Peer, client: Fd, memory: JobMemory) -> Process:
        live = self._expectations.take(announce.job)
        if live is not None:
            return self._make(live.row, live.job, client, memory, live.faults, live.recoveries)
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

    def _adopted(self, process: Process, server: Server, generation: int) -> None:
        self._expectations.settle(process.row.id, alive=True, why="")
        if process.state == "ended":  # its program exited in the middle of the announcement
            server.kill()
            return
        logger.info("server adopted", process=process.row.id[:12], server_pid=server.pid, handles=len(process.handles))
        self.processes[process.row.id] = process
        process.adopted(server, generation)

    def _lost_meanwhile(self, live: LiveProcess, why: str) -> None:
        row = live.row
        if pidfds.same_process(row.pid, row.start_time):
            logger.error("process lost", process=row.id[:12], pid=row.pid, why=why)
            self._records.process_state(row.id, "lost", why)
        else:
            self._records.process_state(row.id, "ended", "program and server ended while no daemon was there")


def answer(sock: socket.socket, status: int, *, job: str = "", message: str = "", fds: tuple[Fd, ...] = ()) -> None:
    """The daemon's one message of a handshake; then the connection is over."""
    packed = pack_welcome(status, fds=len(fds), job=job, message=message)
    with contextlib.suppress(OSError), sock:
        socket.send_fds(sock, [packed], [fd.fileno() for fd in fds], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def _shortage(error: OSError) -> str:
    return f"xmigd cannot take the process: {error.strerror}; free descriptors or memory, or raise LimitNOFILE"


def _first_injection() -> int:
    """Numbers that an adopted server's armed injections, made by an earlier daemon, do not have."""
    return now() // 1_000
