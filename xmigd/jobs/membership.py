"""Who owns a job, and the token that lets a process in."""

from __future__ import annotations

import hashlib
import hmac
import secrets

from xmigd.errors import Forbidden, XmigError
from xmigd.ids import new_id
from xmigd.records import JobRow, Priority, ReplicaPolicy


def hash_token(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def new_job(
    *,
    name: str,
    command: str,
    uid: int,
    device: str | None,
    registered: bool,
    hang_timeout: float | None = None,
    replica_policy: ReplicaPolicy | None = None,
    strict: bool = False,
    runner: tuple[int, int] | None = None,
    nodes: str | None = None,
    external_id: str | None = None,
    restored_from: str | None = None,
    priority: Priority = "normal",
    reserved_bytes: int | None = None,
    memory_quota: int | None = None,
    sm_share: int | None = None,
    walltime_s: float | None = None,
) -> tuple[JobRow, str]:
    """A job and its token. What goes into XMIG_JOB is `<id>:<token>`."""
    token = secrets.token_hex(12)
    job = JobRow(
        id=new_id(), name=name, command=command, uid=uid, device=device, registered=registered,
        token_hash=hash_token(token) if registered else None, hang_timeout=hang_timeout,
        replica_policy=replica_policy, strict=strict,
        runner_pid=None if runner is None else runner[0], runner_start=None if runner is None else runner[1],
        nodes=nodes, external_id=external_id, restored_from=restored_from, priority=priority,
        reserved_bytes=reserved_bytes, memory_quota=memory_quota, sm_share=sm_share, walltime_s=walltime_s,
    )  # fmt: skip
    return job, token


def check_membership(job: JobRow | None, name: str, token: str, uid: int) -> JobRow:
    """May this user's process join this job? Raises XmigError with what to do.

    A process of another user may join root's jobs: services begin as root and drop to a user of their own. It has the
    token from a process of the job, and from nobody else: no other user can read the environment of root's processes.
    """
    if job is None:
        raise XmigError(
            f"there is no job {name[:32]!r} (XMIG_JOB)", hint="start the program with `xmigctl run`, or unset XMIG_JOB"
        )
    if uid not in (0, job.uid) and job.uid != 0:
        raise Forbidden(f"the job belongs to user {job.uid}, this process to user {uid}")
    if job.token_hash is None or not hmac.compare_digest(job.token_hash, hash_token(token)):
        raise Forbidden("the job's token does not fit (XMIG_JOB)", hint="start the program with `xmigctl run`")
    return job
