"""The jobs that may still get processes: who owns them, and the token that lets a process in."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import uuid

from xmigd.devices.names import devices_of
from xmigd.errors import Forbidden, Unavailable, XmigError
from xmigd.records import JobRow


def new_id() -> str:
    return uuid.uuid4().hex


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
    strict: bool = False,
    runner: tuple[int, int] | None = None,
) -> tuple[JobRow, str]:
    """A job and its token. What goes into XMIG_JOB is `<id>:<token>`."""
    token = secrets.token_hex(12)
    job = JobRow(
        id=new_id(), name=name, command=command, uid=uid, device=device, registered=registered,
        token_hash=hash_token(token) if registered else None, hang_timeout=hang_timeout, strict=strict,
        runner_pid=None if runner is None else runner[0], runner_start=None if runner is None else runner[1],
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


def resolve_device(wanted: str, devices: list[str]) -> str:
    """`wanted` as the server's --device takes it. Raises XmigError if this node has no such device."""
    for device in devices_of(wanted):
        if device not in devices:
            raise XmigError(
                f"this node has no device {wanted!r}", hint=f"it has {', '.join(devices)}", code="no_such_device"
            )
    return wanted


def least_used(devices: list[str], in_use: list[str]) -> str:
    """The device with the fewest processes; the first of them."""
    return min(devices, key=lambda device: (in_use.count(device), devices.index(device)))


def choose_device(wanted: str | None, devices: list[str], in_use: list[str], cordoned: dict[str, str]) -> str:
    """Where a new process goes: where its job wants to be, otherwise to the device with the fewest processes. Raises
    XmigError: there is none, or it takes no new processes."""
    if wanted is None:
        free = [device for device in devices if device not in cordoned]
        if not free:
            raise Unavailable(
                "every device of this node is cordoned", code="device_cordoned", hint="xmigctl device uncordon"
            )
        return least_used(free, in_use)
    resolve_device(wanted, devices)
    for device in devices_of(wanted):
        if device in cordoned:
            why = f": {cordoned[device]}" if cordoned[device] else ""
            raise Unavailable(
                f"{device} is cordoned and takes no new process{why}", code="device_cordoned",
                hint=f"choose another device, or xmigctl device uncordon {device}",
            )  # fmt: skip
    return wanted
