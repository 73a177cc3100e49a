"""What Slurm starts as root on a node: prolog, epilog, health check."""

from __future__ import annotations

import os
import socket
import sys
import time
from typing import Any, NoReturn

from xmigd.cli import slurm_controller as controller
from xmigd.cli.common import connect
from xmigd.cli.exits import CommandError, Exit
from xmigd.cli.follow import OVER
from xmigd.client import Client, Refused
from xmigd.errors import XmigError

OURS = "xmig: "  # begins the reason of a drain that the health check has made, and takes back
WANTED = "xmig-drain "  # begins the reason of a drain that names devices to be emptied
WITHIN = 120.0  # seconds in which the prolog has the devices
INTERVAL = 0.1  # seconds between two looks


def _options() -> list[str]:
    """Of the job: what the SPANK plug-in has left for prolog and epilog. Empty: it is not under xMIG."""
    return os.environ.get("SPANK_XMIG", "").split()


def _node() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]


def _slurm_job() -> str:
    job = os.environ.get("SLURM_JOB_ID", "")
    if not job.isdecimal():
        raise CommandError("there is no SLURM_JOB_ID: this command is Slurm's", exit_code=Exit.USAGE)
    return job


# --- prolog -----------------------------------------------------------------------------------------------------------


def before_job() -> None:
    """Raises XmigError: the job must not start here. Slurm drains the node, and queues the job again."""
    if not _options():
        return
    client = connect()
    try:
        client.get("/readyz")
        devices = client.get("/v1/devices")
    except XmigError as error:
        _refuse(f"xmigd is not ready: {error.message}" if not isinstance(error, Refused) else str(error))
    given = os.environ.get("SLURM_JOB_GPUS", "")
    numbers = set(given.split(",")) if given else None
    its = [one for one in devices if one["configured"] and (numbers is None or str(one["ordinal"]) in numbers)]
    bad = [one for one in its if one["state"] != "ready"]
    if not its or (bad and (numbers is not None or len(bad) == len(its))):
        _refuse(_why(bad[0]) if bad else f"xMIG has no device {given}")
    _make_room(client, {one["id"] for one in its})


def _refuse(why: str) -> NoReturn:
    """So that the health check takes the drain back: Slurm's own reason would stay."""
    try:
        controller.drain(_node(), OURS + why)
    except XmigError as error:
        print(f"xmigctl: {error}", file=sys.stderr)
    raise CommandError(why, exit_code=Exit.REFUSED)


def _make_room(client: Client, devices: set[str]) -> None:
    """Jobs that Slurm has suspended leave the devices that the next one gets. Raises CommandError."""
    end = time.monotonic() + WITHIN
    for job in client.get("/v1/jobs", live=True, limit=1000):
        scheduler, _, number = (job["external_id"] or "").partition(":")
        if scheduler != "slurm" or not number.isdecimal() or not job["processes"] or number == _slurm_job():
            continue
        processes = client.get("/v1/processes", live=True, job=job["id"], limit=1000)
        if not any(_is_on(row["device"], devices) for row in processes) or not controller.suspended(number):
            continue
        _leave(client, job["id"], number, end)


def _is_on(device: str, devices: set[str]) -> bool:
    kind, _, numbers = device.partition(":")
    return any(f"{kind}:{number.removeprefix(kind + ':')}" in devices for number in numbers.split(","))


def _leave(client: Client, job: str, number: str, end: float) -> None:
    operation: dict[str, Any] | None = None
    while client.get(f"/v1/jobs/{job}")["state"] == "running":
        if time.monotonic() > end:
            raise CommandError(
                f"job {number}, which Slurm has suspended, did not leave its device within {WITHIN:g} s",
                hint=f"xmigctl job show slurm:{number}", exit_code=Exit.REFUSED,
            )  # fmt: skip
        if operation is None or operation["state"] in OVER:
            try:
                body = {"deadline_seconds": WITHIN, "prefer": "suspend"}
                operation = client.start(f"/v1/jobs/{job}:preempt", body)
            except Refused:  # its own task was earlier, or it has just ended
                operation = None
        time.sleep(INTERVAL)
        if operation is not None:
            operation = client.get(f"/v1/operations/{operation['id']}")
            if operation["state"] == "failed":
                why = (operation["error"] or {}).get("detail")
                raise CommandError(f"job {number} does not leave its device: {why}", exit_code=Exit.REFUSED)


# --- epilog -----------------------------------------------------------------------------------------------------------


def after_job() -> None:
    """An epilog that fails drains the node for good: what is wrong with xmigd, the health check finds."""
    if not _options():
        return
    try:
        _clean()
    except XmigError as error:
        print(f"xmigctl: {error}", file=sys.stderr)


def _clean() -> None:
    """Raises XmigError."""
    client, number = connect(), _slurm_job()
    jobs = client.get("/v1/jobs", external_id=f"slurm:{number}", limit=1000)
    for job in jobs:
        if job["processes"]:
            client.delete(f"/v1/jobs/{job['id']}")
    began = max((int(job["labels"].get("restarts", "0")) for job in jobs), default=0)
    if controller.restarts(number) > began:
        return
    for job in jobs:
        for checkpoint in client.get("/v1/checkpoints", job=job["id"]):
            client.delete(f"/v1/checkpoints/{checkpoint['id']}")


# --- health -----------------------------------------------------------------------------------------------------------


def check_health() -> None:
    """Raises XmigError: Slurm's controller does not answer."""
    node = _node()
    client = connect()
    try:
        client.get("/readyz")
        devices = [one for one in client.get("/v1/devices") if one["configured"]]
        why = "; ".join(_why(one) for one in devices if one["state"] != "ready")
    except XmigError as error:
        devices, why = [], f"xmigd is not ready ({error.code})"
    state, reason = controller.node_state(node)
    drained = "DRAIN" in state
    if drained and reason.startswith(WANTED):
        _empty(client, reason.removeprefix(WANTED).split(), devices, reason)
    elif why and (not drained or (reason.startswith(OURS) and reason != OURS + why)):
        controller.drain(node, OURS + why)
    elif not why and drained and reason.startswith(OURS):
        controller.resume(node)


def _why(device: dict[str, Any]) -> str:
    """In the reason of a drain, which has no line ends and no quotes."""
    text = f"{device['id']} is {device['state']}: {device['why']}"
    return "".join(each for each in text if each.isprintable() and each not in "\"'[]=")[:200]


def _empty(client: Client, wanted: list[str], devices: list[dict[str, Any]], reason: str) -> None:
    """Drain those that are not cordoned yet: once."""
    for device in devices:
        if device["id"] in wanted and not device["cordoned"]:
            client.start(f"/v1/devices/{device['id']}:drain", {"reason": f"Slurm: {reason}"})
