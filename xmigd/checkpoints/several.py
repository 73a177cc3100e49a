"""Which process a job's processes descend from: one dump of it has all of them, at one moment."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from xmigd.checkpoints import proc
from xmigd.checkpoints.apart import root_in
from xmigd.errors import Conflict
from xmigd.ipc import pidfd as pidfds
from xmigd.records import JobRow
from xmigd.supervisor.process import Process

WHOLE = "XMIG_CHECKPOINT_WHOLE=1"  # in the environment of a tree that is dumped from its first process on


def root_of(job: JobRow, processes: Sequence[Process]) -> int:
    """The nearest process of the job from which all of these descend, one of them or what started them. Raises
    Conflict."""
    paths = [_path(one.row.pid) for one in processes]
    for pid in paths[0]:
        if all(pid in path for path in paths) and (pid == processes[0].row.pid or _belongs(pid, job)):
            return root_in(pid)
    raise Conflict(
        "the job's processes do not descend from one process of the job", code="several_processes",
        hint="start them with one launcher under xmigctl run, such as torchrun",
    )  # fmt: skip


def whole_root(pid: int) -> int | None:
    """The first process of a tree that is to be dumped as one, a batch script for instance, if the process is in one.
    Whoever has started the tree has marked its environment."""
    marked = [each for each in _path(pid) if _has(each, WHOLE)]
    return marked[-1] if marked else None


def _path(pid: int) -> list[int]:
    """The process, its parent, and so on."""
    path: list[int] = []
    with contextlib.suppress(*proc.GONE):
        while pid > 1:
            path.append(pid)
            pid = proc.Stat(pid).parent
    return path


def _belongs(pid: int, job: JobRow) -> bool:
    """Was it started in this job? What has started the job is nobody's to dump. One that was restored has the
    environment of the job that it was, and ends with the process from which all descend."""
    if job.restored_from is not None:
        return pid == job.runner_pid and pidfds.start_time(pid) == job.runner_start
    return _has(pid, f"XMIG_JOB={job.id}:")


def _has(pid: int, variable: str) -> bool:
    """In its environment, as it was when its program began."""
    with contextlib.suppress(OSError):
        return variable.encode() in Path(f"/proc/{pid}/environ").read_bytes()
    return False
