"""What this node shows of itself: to its own callers, and to those of peers, as far as they see it."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from xmigd import __version__
from xmigd.consolidation.plan import OVER
from xmigd.database.reader import Reader
from xmigd.devices.inventory import held_bytes
from xmigd.devices.names import devices_of
from xmigd.devices.service import Devices
from xmigd.fleet.schemas import (
    MOST_JOBS,
    MOST_OF_JOB,
    MOST_PROCESSES,
    FleetDevice,
    FleetJob,
    FleetProcess,
    NodeShown,
    Way,
)
from xmigd.jobs import repository as jobs
from xmigd.migrations.plan import general, in_allocation
from xmigd.security.callers import Caller
from xmigd.supervisor.process import Process
from xmigd.supervisor.supervisor import Supervisor
from xmigd.text import harmless
from xmigd.transfers import repository as transfers

SEEN = 50  # transfers by which a way is judged


class Own:
    def __init__(
        self, *, supervisor: Supervisor, devices: Devices, reader: Reader, busy: Callable[[str], float | None]
    ) -> None:
        """`busy`: the busy share of a process, if it is known."""
        self._supervisor = supervisor
        self._devices = devices
        self._reader = reader
        self._busy = busy

    async def shown(self, owner: int | None) -> NodeShown:
        """To a caller who sees what belongs to this user. None: everything."""
        processes = [one for one in self._supervisor.processes.values() if one.state not in OVER]
        held = held_bytes(processes)
        of_job: dict[str, list[Process]] = {}
        for one in sorted(processes, key=lambda each: (each.row.start_time, each.row.pid)):
            if owner is None or one.job.uid == owner:
                of_job.setdefault(one.job.id, []).append(one)
        mine = {job: [self._process(one, len(its)) for one in its[:MOST_OF_JOB]] for job, its in of_job.items()}
        return await asyncio.to_thread(self._read, owner, held, mine)

    def _process(self, one: Process, listed: int) -> FleetProcess:
        """`listed`: of its job."""
        why = next(iter(general(one, "proxy", "move")), None)
        stays = "" if why is None else why.text
        if not stays and one.job.nodes is not None:
            stays = "its job has ranks on several nodes"
        elif not stays and listed > MOST_OF_JOB:
            stays = f"its job has {listed} processes; of more than {MOST_OF_JOB} none is moved by a plan"
        elif not stays and listed != len(self._supervisor.processes_of(one.job.id)):
            stays = "a process of its job is ending"
        elif not stays and any(each.job.id != one.job.id for each in self._supervisor.together(one)):
            stays = "it shares communicators with processes of other jobs"
        elif not stays and len(devices_of(one.row.device)) != 1:
            stays = "a process with several devices is not packed with others"
        elif not stays and (one.state != "running" or one.paused):
            stays = f"it is {'paused' if one.paused else one.state}"
        return FleetProcess(
            id=one.row.id, device=one.row.device, state=one.state, memory_bytes=sum(held_bytes([one]).values()),
            busy_share=self._busy(one.row.id), stays=harmless(stays, 300), rank=one.grouped,
        )  # fmt: skip

    def _read(self, owner: int | None, held: Mapping[str, int], mine: Mapping[str, list[FleetProcess]]) -> NodeShown:
        caller = Caller("fleet", "read", owner, None, "xmigd")
        ids = sorted(mine)
        listed: list[str] = []
        count = 0
        for id in ids:
            count += len(mine[id])
            if len(listed) < MOST_JOBS and count <= MOST_PROCESSES:
                listed.append(id)
        with self._reader.session() as session:
            rows = jobs.details(session, listed)
            moved = transfers.page(session, direction="out", limit=SEEN)
        return NodeShown(
            version=__version__, at=time.time(), devices=[_device(each, held) for each in self._devices.listed(caller)],
            jobs=[_job(row, mine[row["id"]]) for row in rows], left_out=len(ids) - len(listed), ways=ways(moved),
        )  # fmt: skip


def _device(each: Any, held: Mapping[str, int]) -> FleetDevice:
    return FleetDevice(
        id=each.id, name=None if each.name is None else harmless(each.name, 255),
        state=each.state if each.configured else "not_configured", why=harmless(each.why, 300),
        memory_bytes=each.memory_bytes, used_bytes=each.used_bytes,
        capacity_bytes=None if each.free_bytes is None else each.free_bytes + held.get(each.id, 0),
        utilisation=each.utilisation, health=each.health, findings=[harmless(text, 300) for text in each.findings[:16]],
        processes=each.processes,
    )  # fmt: skip


def _job(row: Mapping[str, Any], processes: list[FleetProcess]) -> FleetJob:
    whom = jobs.allocated_to(row["external_id"])
    if whom is not None:
        why = in_allocation(whom).text
        processes = [one.model_copy(update={"stays": one.stays or why}) for one in processes]
    return FleetJob(
        id=row["id"], name=harmless(row["name"], 255), uid=row["uid"], user=harmless(row["user"], 255),
        state=row["state"], created_at=row["created_at"], priority=row["priority"], processes=processes,
    )  # fmt: skip


def ways(rows: list[dict[str, Any]]) -> dict[str, Way]:
    """By peer, of transfers that succeeded."""
    of_peer: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["state"] == "done":
            of_peer.setdefault(row["peer"], []).append(row)
    found = {}
    for peer, done in list(of_peer.items())[:64]:
        still = [row["standstill_ms"] for row in done if row["standstill_ms"] is not None]
        speeds = []
        for row in done:
            largest = max(row["rounds"], key=lambda each: each["copied_bytes"], default=None)
            if largest is not None and largest["ms"] > 0 and largest["copied_bytes"] > 0:
                speeds.append(largest["copied_bytes"] * 1e3 / largest["ms"])
        found[peer] = Way(
            transfers=len(done), standstill_ms=statistics.median(still) if still else None,
            bytes_per_s=statistics.median(speeds) if speeds else None,
        )  # fmt: skip
    return found
