"""Processes of jobs that hold the genuine driver, beside the shim or instead of it: nothing of theirs outlives a fault.

The shim, and what is preloaded with it, answers to every name of the driver. A child that was started with an
environment of its own (`env -i`, sudo) has neither, and a program can do what it likes. So the daemon looks: which
processes belong to a job, and do they have the driver mapped, or the devices' files open.

Invariants:
  A process belongs to a job by descent from a process that is known to, by a process group or session that such a one
  began, by the job's control group, or by $XMIG_JOB together with the job's user: no stranger puts theirs into
  another's job. Once it belongs, it does until it ends, whoever its parent is by then. Looking costs at most a share
  of a core (SHARE): the more there is to look at, the less often.
  What cannot have changed since the last look is not read again: strangers whose number the kernel has not given away
  since, and whose parent is still there; the mappings of a process that had no page fault since (what it maps, it has
  to touch before it can use it). Nobody is made a member by what an earlier look has read, and each tenth look reads
  everything.
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
READ_ALL = 10  # every so many looks
PIECE = 1 << 16  # bytes read at once
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
    touched: tuple[bytes, ...]  # page faults and bytes mapped: without a change, it maps what it did


@dataclass(slots=True)
class Watch:
    """Looks. One look at a time."""

    ours: frozenset[str]  # folders whose libraries are the shims
    proc: Path = Path("/proc")
    dev: str = "/dev"
    _jobs: dict[Identity, str] = field(default_factory=dict)  # who belongs to a job
    _strangers: set[Identity] = field(default_factory=set)  # whose environment was read, and names none
    _looks: int = 0
    _reads_all: bool = True  # the last look did
    _newest: int | None = None  # the number that the kernel gave away last, before the last look
    _stats: dict[int, _Stat] = field(default_factory=dict)  # of the last look
    _fresh: set[int] = field(default_factory=set)  # of these, read by the last look
    _mapped: dict[Identity, tuple[tuple[bytes, ...], list[str]]] = field(default_factory=dict)  # drivers

    def look(self, roots: Iterable[Root], exclude: Iterable[int] = ()) -> list[Found]:
        """Who of these jobs holds the driver now. `exclude`: the daemon's own."""
        of = {root.job: root for root in roots}
        self._read_stats({pid for root in of.values() for pid, _ in root.known})
        stats = self._stats
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
        self._mapped = {each: known for each, known in self._mapped.items() if each in self._jobs}
        devices = self._are_there_devices()
        found = []
        for (pid, start_time), job in self._jobs.items():
            held = None if pid in kept_out else self._held(pid, devices=devices)
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
        first = {job: pid for pid, job in reversed(jobs.items())}
        scoped = {pid: job for job, one in first.items() for pid in self._scope(of[job], one)}
        # A parent's number may be larger than its child's: several rounds, as many as generations at most.
        waiting = [pid for pid in stats if pid not in jobs and pid not in kept_out]
        while True:
            left = []
            for pid in waiting:
                job = self._job_of(pid, jobs, began, scoped)
                if job is not None and pid not in self._fresh:
                    # What an earlier look has read may be of a process that had the same number.
                    job = self._job_of(pid, jobs, began, scoped) if self._read_stat(pid) else None
                if job is None:
                    left.append(pid)
                else:
                    jobs[pid] = began[pid] = job
                    self._jobs[pid, stats[pid].start_time] = job
            if len(left) == len(waiting):
                break
            waiting = left
        by_environment = False
        for pid in waiting:
            if pid not in stats or (pid, stats[pid].start_time) in self._strangers:
                continue
            if pid not in self._fresh and not self._read_stat(pid):
                continue
            identity = (pid, stats[pid].start_time)
            self._strangers.add(identity)
            job = self._named(pid)
            if job in of and self._owner(pid)[0] == of[job].uid:
                self._strangers.discard(identity)
                self._jobs[identity] = job
                by_environment = True
        if by_environment:
            self._grow(of, stats, kept_out)

    def _job_of(self, pid: int, jobs: dict[int, str], began: dict[int, str], scoped: dict[int, str]) -> str | None:
        stat = self._stats.get(pid)
        if stat is None:
            return None
        job = jobs.get(stat.parent) or scoped.get(pid)
        # An orphan's parent is of another session. Others in the group may be the rest of a shell's pipeline.
        parent = self._stats.get(stat.parent)
        if job is None and (parent is None or parent.session != stat.session):
            job = began.get(stat.group) or began.get(stat.session)
        return job

    # --- what there is ------------------------------------------------------------------------------------------------

    def _read_stats(self, known: set[int]) -> None:
        """Of everybody, as far as it can differ from what the last look has read."""
        before, last, newest = self._stats, self._newest, self._given_away()
        self._newest = newest
        self._reads_all = self._looks % READ_ALL == 0 or last is None or newest is None
        self._looks += 1
        ours = known.union(pid for pid, _ in self._jobs)
        self._stats, self._fresh = {}, set()
        for name in os.listdir(self.proc):
            if not name.isdecimal():
                continue
            pid = int(name)
            stat = before.get(pid)
            if self._reads_all or stat is None or pid in ours or _between(pid, last, newest):
                self._read_stat(pid)
            else:
                self._stats[pid] = stat
        for pid, stat in list(self._stats.items()):
            if pid not in self._fresh and not _same(self._stats.get(stat.parent), before.get(stat.parent)):
                self._read_stat(pid)  # it has another parent by now

    def _read_stat(self, pid: int) -> bool:
        stat = self._stat(pid)
        if stat is None:
            self._stats.pop(pid, None)
            return False
        self._stats[pid] = stat
        self._fresh.add(pid)
        return True

    def _stat(self, pid: int) -> _Stat | None:
        data = self._read(pid, "stat")
        if not data:
            return None
        fields = data[data.rindex(b")") + 2 :].split(None, 21)
        return _Stat(
            int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19]), (fields[7], fields[9], fields[20])
        )

    def _given_away(self) -> int | None:
        """The last number of a process or thread, of the namespace that `proc` is of. None: it is not known."""
        try:
            if os.readlink(f"{self.proc}/self") != str(os.getpid()):
                return None
            return int(_contents(f"{self.proc}/sys/kernel/ns_last_pid", short=True))
        except (OSError, ValueError):
            return None

    def _scope(self, root: Root, one: int) -> list[int]:
        """All of the job's control group, if `one` of the job is there."""
        for line in self._read(one, "cgroup").decode(errors="replace").splitlines():
            path = line.split(":", 2)[-1]
            if path.endswith(root.scope):
                with contextlib.suppress(OSError, ValueError):
                    listed = Path("/sys/fs/cgroup" + path, "cgroup.procs").read_text()
                    return [int(each) for each in listed.split()]
        return []

    def _named(self, pid: int) -> str:
        """The job that its environment names, as it was started with."""
        for each in self._read(pid, "environ").split(b"\0"):
            if each.startswith(b"XMIG_JOB="):
                return each[9:].partition(b":")[0].decode(errors="replace")
        return ""

    # --- what it holds ------------------------------------------------------------------------------------------------

    def _held(self, pid: int, *, devices: bool) -> tuple[What, str] | None:
        """The driver, or a device's file. NVML alone (nvidia-smi) asks and computes nothing."""
        genuine = self._drivers(pid)
        for path in genuine:
            if os.path.basename(path).startswith("libcuda"):
                return "driver", path
        if genuine:
            return None
        for path in self._open(pid) if devices else ():
            if os.path.dirname(path) == self.dev and _DEVICE.fullmatch(os.path.basename(path)):
                return "device", path
        return None

    def _drivers(self, pid: int) -> list[str]:
        """The driver's libraries that it has mapped, but for the shims."""
        stat = self._stats[pid]
        identity = (pid, stat.start_time)
        touched, genuine = self._mapped.get(identity, ((), []))
        if touched == stat.touched and not self._reads_all:
            return genuine
        libraries = [
            path.decode(errors="replace")
            for path, _ in _MAPPED.findall(self._read(pid, "maps"))
            if b"/stubs/" not in path
        ]
        genuine = [path for path in libraries if os.path.dirname(path) not in self.ours]
        self._mapped[identity] = (stat.touched, genuine)
        return genuine

    def _are_there_devices(self) -> bool:
        """Where there is no file of a device, nobody has one open."""
        with contextlib.suppress(OSError):
            return any(_DEVICE.fullmatch(name) for name in os.listdir(self.dev))
        return False

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
            return _contents(f"{self.proc}/{pid}/{name}", short=name == "stat")
        except OSError:
            return b""


def _contents(path: str, *, short: bool = False) -> bytes:
    """Python's own files ask the kernel three times more for each. `short`: the kernel gives it in one piece."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        pieces = [os.read(fd, PIECE)]
        while pieces[-1] and not short:
            pieces.append(os.read(fd, PIECE))
        return b"".join(pieces)
    finally:
        os.close(fd)


def _is(identity: Identity, stats: dict[int, _Stat]) -> bool:
    return stats[identity[0]].start_time == identity[1]


def _same(now: _Stat | None, before: _Stat | None) -> bool:
    """One process, or none both times."""
    if now is None or before is None:
        return now is before
    return now.start_time == before.start_time


def _between(pid: int, last: int | None, newest: int | None) -> bool:
    """Given away since: numbers are given in turn, and begin anew after the largest."""
    if last is None or newest is None:
        return True
    return last < pid <= newest if last <= newest else pid > last or pid <= newest
