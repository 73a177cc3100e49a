"""What the daemon does about processes of jobs that are not protected (xmigd.supervisor.unprotected finds them): they
are rows of the database, events and lines of the job's log; a strict job ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable

from xmigd import log
from xmigd.ids import new_id
from xmigd.ipc import pidfd as pidfds
from xmigd.ipc.fds import Fd
from xmigd.logs.log import JobLog
from xmigd.records import JobRow, ProcessRow, Records
from xmigd.supervisor.process import Process
from xmigd.supervisor.unprotected import EVERY, SHARE, Found, Identity, Root, Watch

logger = log.get("guard")


class Guard:
    def __init__(
        self,
        *,
        watch: Watch,
        records: Records,
        job_log: JobLog,
        processes: dict[str, Process],
        known: Iterable[tuple[ProcessRow, JobRow]],
        stop_job: Callable[[str, str], int],
        grace: float,
    ) -> None:
        self._watch = watch
        self._records = records
        self._job_log = job_log
        self._processes = processes
        self._stop_job = stop_job
        self._grace = grace
        self._jobs: dict[str, JobRow] = {}  # that may have processes which have not come to us
        self._rows: dict[Identity, ProcessRow] = {}  # unprotected, and never came
        for row, job in known:
            self._rows[row.pid, row.start_time] = row
            self._jobs[job.id] = job
        self._ended: set[str] = set()  # strict jobs that were

    def add(self, job: JobRow) -> None:
        """Its runner may be running."""
        if job.runner_pid is not None:
            self._jobs[job.id] = job

    async def run(self) -> None:
        """Until it is cancelled."""
        pause = EVERY
        while True:
            await asyncio.sleep(pause)
            roots, jobs = self._roots()
            if not roots and not self._rows:
                pause = EVERY
                continue
            own = [os.getpid(), *(server.pid for each in self._processes.values() for server in each.servers.values())]
            try:
                found, cost = await asyncio.to_thread(self._look, roots, own)
            except Exception as error:  # /proc has more kinds of surprises than can be named
                logger.warning("who is not protected cannot be determined", why=repr(error))
                pause = 60.0
                continue
            pause = max(EVERY, cost / SHARE)
            for each in found:
                if (job := jobs.get(each.job)) is not None:
                    self._seen(job, each)
            self._settle()

    def _look(self, roots: list[Root], own: list[int]) -> tuple[list[Found], float]:
        begun = time.thread_time()
        return self._watch.look(roots, own), time.thread_time() - begun

    def _roots(self) -> tuple[list[Root], dict[str, JobRow]]:
        known: dict[str, set[Identity]] = {}
        jobs: dict[str, JobRow] = {}
        for process in self._processes.values():
            if process.state != "ended":
                jobs[process.job.id] = process.job
                known.setdefault(process.job.id, set()).add((process.row.pid, process.row.start_time))
        for job in list(self._jobs.values()):
            pid, started = job.runner_pid or 0, job.runner_start or 0
            alive = pidfds.same_process(pid, started)
            if not alive and job.id not in jobs and not self._watch.members(job.id):
                del self._jobs[job.id]
                self._ended.discard(job.id)
                continue
            jobs.setdefault(job.id, job)
            known.setdefault(job.id, set()).add((pid, started))
        for row in self._rows.values():
            known.setdefault(row.job, set()).add((row.pid, row.start_time))
        return [Root(id, job.uid, frozenset(known[id])) for id, job in jobs.items()], jobs

    def _seen(self, job: JobRow, found: Found) -> None:
        identity = (found.pid, found.start_time)
        came = [p for p in self._processes.values() if (p.row.pid, p.row.start_time) == identity]
        if came:
            if came[0].unprotected:
                return
            came[0].unprotected = found.why
            self._records.process_unprotected(came[0].row, found.why)
        elif identity not in self._rows:
            row = self._rows[identity] = ProcessRow(
                id=new_id(), job=job.id, pid=found.pid, start_time=found.start_time, uid=found.uid, gid=found.gid,
                command=found.command, device="",
            )  # fmt: skip
            self._records.unprotected_process(row, found.why)
        elif not job.strict:
            return
        logger.warning("a process is not protected", job=job.id[:12], pid=found.pid, uid=found.uid, why=found.why)
        text = f"process {found.pid} ({found.command}) is not protected: {found.why}"
        self._job_log.line(job, text, source="xmigd", level="warning")
        if job.strict:
            self._end(job, found)

    def _end(self, job: JobRow, found: Found) -> None:
        """A strict job has a process that is not protected."""
        _send(found.pid, found.start_time, signal.SIGKILL)
        if job.id in self._ended:
            return
        self._ended.add(job.id)
        why = f"the job is strict, and process {found.pid} is not protected"
        self._job_log.line(job, f"the job is ended: {why}", source="xmigd", level="error")
        self._records.job_stopped(job.id)
        self._stop_job(job.id, why)
        self._signal_all(job, signal.SIGTERM)
        asyncio.get_running_loop().call_later(self._grace, self._signal_all, job, signal.SIGKILL)

    def _signal_all(self, job: JobRow, number: signal.Signals) -> None:
        """But not the one that waits for its end, and tells about it."""
        for pid, started in self._watch.members(job.id):
            if (pid, started) != (job.runner_pid, job.runner_start):
                _send(pid, started, number)

    def _settle(self) -> None:
        """Rows of processes that are gone, or have come to us after all."""
        came = {(p.row.pid, p.row.start_time) for p in self._processes.values()}
        for identity, row in list(self._rows.items()):
            if identity in came or not pidfds.same_process(*identity):
                del self._rows[identity]
                why = "it came to xMIG, too" if identity in came else "the program has ended"
                self._records.process_state(row.id, "ended", why)


def _send(pid: int, started: int, number: signal.Signals) -> None:
    """To that process and no other that has its number later."""
    with contextlib.suppress(OSError):
        pidfd = Fd(os.pidfd_open(pid))
        if pidfds.same_process(pid, started):
            pidfds.send_signal(pidfd, number)
