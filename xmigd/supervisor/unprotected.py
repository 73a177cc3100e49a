"""Processes of jobs that hold the genuine driver, beside the shim or instead of it: nothing of theirs outlives a fault.

The shim, and what is preloaded with it, answers to every name of the driver. A child that was started with an
environment of its own (`env -i`, sudo) has neither, and a program can do what it likes. So the daemon looks: which
processes belong to a job, and do they have the driver mapped, or the devices' files open.

Invariants:
  A process belongs to a job by descent from a process that is known to, by a process group or session that such a one
  began, by the job's control group, or by $XMIG_JOB together with the job's user: no stranger puts theirs into
  another's job. Once it belongs, it does until it ends, whoever its parent is by then. Looking costs at most a share
  of a core (SHARE): the more there is to look at, the less often.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

EVERY = 1.0  # seconds between two looks, at least
SHARE = 0.005  # of a core
COMMAND = 256  # characters of a command that are kept
Identity = tuple[int, int]  # pid, start time
What = Literal["driver", "device"]

# A mapping that is executed, of a file with one of the driver's names. What only reads it (a linker, a debugger) is not
# meant.
_MAPPED = re.compile(
    rb"^[0-9a-f]+-[0-9a-f]+ ..x. \S+ \S+ \d+ +(/[^\n]*/lib(?:cuda|nvidia-ml)\.so[.0-9]*)( \(deleted\))?$", re.MULTILINE
)
_DEVICE = re.compile(r"nvidia(\d+|ctl|-uvm)")


@dataclass(frozen=True, slots=True)
class Root:
    """A job, and who is known to belong to it."""

    job: str
    uid: int
    known: frozenset[Identity]

    @property
    def scope(self) -> str:
        return f"/xmig-job-{self.job[:12]}.scope"


@dataclass(frozen=True, slots=True)
class Found:
    job: str
    pid: int
    start_time: int
    uid: int
    gid: int
    command: str
    what: What
    path: str

    @property
    def why(self) -> str:
        if self.what == "driver":
            return (
                f"it has loaded the driver itself ({self.path}): nothing of it outlives a fault, and it cannot be moved"
            )
        return f"it has opened {self.path} itself: nothing of it outlives a fault, and it cannot be moved"


@dataclass(frozen=True, slots=True)
class _Stat:
    parent: int
    group: int
    session: int
    start_time: int


@dataclass(slots=True)
class Watch:
    """Looks. One look at a time."""

    ours: frozenset[str]  # folders whose libraries are the shims
    proc: Path = Path("/proc")
    dev: str = "/dev"
    _jobs: dict[Identity, str] = field(default_factory=dict)  # who belongs to a job
    _strangers: set[Identity] = field(default_factory=set)  # whose environment was read, and names none

    def look(self, roots: Iterable[Root], exclude: Iterable[int] = ()) -> list[Found]:
        """Who of these jobs holds the driver now. `exclude`: the daemon's own."""
        of = {root.job: root for root in roots}
        stats = self._stats()
        self._jobs = {
            each: job for each, job in self._jobs.items() if job in of and each[0] in stats and _is(each, stats)
        }
        self._strangers = {each for each in self._strangers if each[0] in stats and _is(each, stats)}
        for root in of.values():
            for each in root.known:
                if each[0] in stats and _is(each, stats):
                    self._jobs[each] = root.job
        kept_out = set(exclude)
        self._grow(of, stats, kept_out)
        found = []
        for (pid, start_time), job in self._jobs.items():
            held = None if pid in kept_out else self._held(pid)
            whole = None if held is None else self._found(job, pid, start_time, *held)
            if whole is not None:
                found.append(whole)
        return found

    def members(self, job: str) -> list[Identity]:
        """Who belonged to it at the last look."""
        return [each for each, its_job in self._jobs.items() if its_job == job]

    # --- who belongs to a job -----------------------------------------------------------------------------------------

    def _grow(self, of: dict[str, Root], stats: dict[int, _Stat], kept_out: set[int]) -> None:
        """From those who are known to all who follow."""
        jobs = {pid: job for (pid, _), job in self._jobs.items()}
        began = dict(jobs)  # of whoever is the first of a group or session; also those who have gone since
        for root in of.values():
            began |= {pid: root.job for pid, _ in root.known if pid not in stats}
        scoped = {pid: root.job for root in of.values() for pid in self._scope(root, jobs)}
        # A parent's number may be larger than its child's: several rounds, as many as generations at most.
        waiting = [pid for pid in stats if pid not in jobs and pid not in kept_out]
        while True:
            left = []
            for pid in waiting:
                stat = stats[pid]
                job = jobs.get(stat.parent) or scoped.get(pid)
                # An orphan's parent is of another session. Others in the group may be the rest of a shell's pipeline.
                if job is None and (stat.parent not in stats or stats[stat.parent].session != stat.session):
                    job = began.get(stat.group) or began.get(stat.session)
                if job is None:
                    left.append(pid)
                else:
                    jobs[pid] = began[pid] = job
                    self._jobs[pid, stat.start_time] = job
            if len(left) == len(waiting):
                break
            waiting = left
        by_environment = False
        for pid in waiting:
            identity = (pid, stats[pid].start_time)
            if identity in self._strangers:
                continue
            self._strangers.add(identity)
            job = self._named(pid)
            if job in of and self._owner(pid)[0] == of[job].uid:
                self._strangers.discard(identity)
                self._jobs[identity] = job
                by_environment = True
        if by_environment:
            self._grow(of, stats, kept_out)

    def _stats(self) -> dict[int, _Stat]:
        stats = {}
        for name in os.listdir(self.proc):
            if name.isdecimal() and (stat := self._stat(int(name))) is not None:
                stats[int(name)] = stat
        return stats

    def _stat(self, pid: int) -> _Stat | None:
        data = self._read(pid, "stat")
        if not data:
            return None
        fields = data[data.rindex(b")") + 2 :].split()
        return _Stat(int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19]))

    def _scope(self, root: Root, jobs: dict[int, str]) -> list[int]:
        """All of the job's control group, as far as one of it is known to be there."""
        for pid, job in jobs.items():
            if job != root.job:
                continue
            for line in self._read(pid, "cgroup").decode(errors="replace").splitlines():
                path = line.split(":", 2)[-1]
                if path.endswith(root.scope):
                    with contextlib.suppress(OSError, ValueError):
                        listed = Path("/sys/fs/cgroup" + path, "cgroup.procs").read_text()
                        return [int(each) for each in listed.split()]
            return []
        return []

    def _named(self, pid: int) -> str:
        """The job that its environment names, as it was started with."""
        for each in self._read(pid, "environ").split(b"\0"):
            if each.startswith(b"XMIG_JOB="):
                return each[9:].partition(b":")[0].decode(errors="replace")
        return ""

    # --- what it holds ------------------------------------------------------------------------------------------------

    def _held(self, pid: int) -> tuple[What, str] | None:
        """The driver, or a device's file. NVML alone (nvidia-smi) asks and computes nothing."""
        libraries = [
            path.decode(errors="replace")
            for path, _ in _MAPPED.findall(self._read(pid, "maps"))
            if b"/stubs/" not in path
        ]
        genuine = [path for path in libraries if os.path.dirname(path) not in self.ours]
        for path in genuine:
            if os.path.basename(path).startswith("libcuda"):
                return "driver", path
        if genuine:
            return None
        for path in self._open(pid):
            if os.path.dirname(path) == self.dev and _DEVICE.fullmatch(os.path.basename(path)):
                return "device", path
        return None

    def _open(self, pid: int) -> list[str]:
        links = []
        with contextlib.suppress(OSError):
            folder = f"{self.proc}/{pid}/fd"
            for name in os.listdir(folder):
                with contextlib.suppress(OSError):
                    links.append(os.readlink(f"{folder}/{name}"))
        return links

    def _found(self, job: str, pid: int, start_time: int, what: What, path: str) -> Found | None:
        """None: it has ended meanwhile."""
        words = self._read(pid, "cmdline").rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
        uid, gid = self._owner(pid)
        stat = self._stat(pid)
        if stat is None or stat.start_time != start_time:
            return None
        return Found(job, pid, start_time, uid, gid, words[:COMMAND], what, path)

    def _owner(self, pid: int) -> tuple[int, int]:
        try:
            status = os.stat(f"{self.proc}/{pid}")
        except OSError:
            return -1, -1
        return status.st_uid, status.st_gid

    def _read(self, pid: int, name: str) -> bytes:
        """Empty: it has ended, or it is not ours to see."""
        try:
            with open(f"{self.proc}/{pid}/{name}", "rb", buffering=0) as file:
                return file.readall() or b""
        except OSError:
            return b""


def _is(identity: Identity, stats: dict[int, _Stat]) -> bool:
    return stats[identity[0]].start_time == identity[1]
