"""Admission: a job may say how much device memory it will need, and is refused where that is not free.

A reservation is for each of the job's devices. It counts from the job's registration to its end, on the devices that
its programs are on; while they are suspended it does not. What of it the programs have taken is counted as theirs, so
only the rest is kept free. A job whose programs do not come within UNUSED_FOR loses it, unless it ends with a program
that is there.

It keeps those apart that reserve. A program without a reservation is not held back.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from xmigd.database.reader import Reader
from xmigd.devices import repository as devices
from xmigd.devices.header import Description
from xmigd.devices.inventory import Inventory, held_bytes
from xmigd.devices.names import devices_of
from xmigd.errors import Conflict, Invalid
from xmigd.jobs import repository
from xmigd.records import PRIORITIES, JobRow
from xmigd.supervisor.process import Process
from xmigd.supervisor.supervisor import Supervisor

UNUSED_FOR = 600.0  # seconds
OVER = ("ended", "stopped", "lost")


@dataclass(frozen=True, slots=True)
class _Reservation:
    devices: tuple[str, ...]
    bytes: int  # on each of them
    watched: bool  # its job ends with a program
    at: float  # Unix seconds


class Admission:
    """Lives in the event loop's thread."""

    def __init__(
        self, *, supervisor: Supervisor, inventory: Inventory, reader: Reader, names: Sequence[str],
        jobs: Iterable[tuple[JobRow, float]],
    ) -> None:  # fmt: skip
        """`names`: of this node's devices. `jobs`: with reservations, of the last daemon, and when each was made."""
        self._supervisor = supervisor
        self._inventory = inventory
        self._reader = reader
        self._names = names
        self._reservations = {job.id: _reservation(job, at) for job, at in jobs}
        self._coming: dict[str, tuple[str, int]] = {}  # jobs that are being resumed: where, and bytes

    async def admit(self, job: JobRow, *, is_predicted: bool = False) -> str:
        """The devices that it gets: those that it names, or the one with the most room. From now on its memory is
        reserved. `is_predicted`: nobody named its memory. Raises Conflict: there is no room."""
        assert job.reserved_bytes is not None
        room, total = await self._room()
        # Nothing waits from here on: two jobs do not get the same room.
        choices = self.choices(job)
        self._check_quota(job, choices, total)
        least = {choice: min((room.get(name, 0) for name in devices_of(choice)), default=0) for choice in choices}
        fitting = [choice for choice in choices if least[choice] >= job.reserved_bytes]
        if not fitting:
            raise self._refusal(job, choices, room, is_predicted)
        chosen = max(fitting, key=lambda choice: least[choice])
        self._reservations[job.id] = _Reservation(
            tuple(devices_of(chosen)), job.reserved_bytes, job.runner_pid is not None, time.time()
        )
        return chosen

    def choices(self, job: JobRow) -> list[str]:
        """The devices of which it could get one: those that it names, as one, or each that takes jobs."""
        if job.device is not None:
            return [job.device]
        return [name for name in self._names if name not in self._supervisor.cordoned]

    async def room(self) -> dict[str, int]:
        """Of each device: what is neither used nor reserved, in bytes. What nobody knows is not there."""
        return (await self._room())[0]

    @contextlib.contextmanager
    def coming(self, job: str, device: str, bytes: int) -> Iterator[None]:
        """Meanwhile so much is kept free for a suspended job, which reserves nothing until it runs."""
        self._coming[job] = (device, bytes)
        try:
            yield
        finally:
            del self._coming[job]

    def forget(self, job: str) -> None:
        self._reservations.pop(job, None)

    async def outstanding(self) -> dict[str, int]:
        """What of each device's free memory is reserved."""
        if not self._reservations:
            return {}
        self._drop(await asyncio.to_thread(self._states, list(self._reservations)))
        return self._outstanding(self._held())

    # --- what is free -------------------------------------------------------------------------------------------------

    async def _room(self) -> tuple[dict[str, int], dict[str, int]]:
        """Of each device: what is neither used nor reserved, and all. What nobody knows is not free."""
        held = self._held()  # before what is free: a program that takes memory meanwhile must not count for less
        states, free, total = await asyncio.to_thread(self._read, held_bytes(list(self._supervisor.processes.values())))
        self._drop(states)
        reserved = self._outstanding(held)
        for device, bytes in self._coming.values():
            reserved[device] = reserved.get(device, 0) + bytes
        room = {name: max(0, bytes - reserved.get(name, 0)) for name, bytes in free.items() if bytes is not None}
        return room, total

    def _read(self, held: Mapping[str, int]) -> tuple[dict[str, str], dict[str, int | None], dict[str, int]]:
        states = self._states(list(self._reservations))
        with self._reader.session() as session:
            rows = [row for row in devices.listed(session) if row.id in self._names]
            session.expunge_all()
        free: dict[str, int | None] = {}
        total: dict[str, int] = {}
        for row in rows:
            known = Description(row.name or "", row.uuid, row.memory_bytes or 0) if row.uuid is not None else None
            reading = self._inventory.read(row.id, known, held.get(row.id, 0))
            free[row.id] = reading.free_bytes
            if reading.total_bytes is not None:
                total[row.id] = reading.total_bytes
        return states, free, total

    def _states(self, jobs: list[str]) -> dict[str, str]:
        with self._reader.session() as session:
            return {row["id"]: row["state"] for row in repository.details(session, jobs)}

    def _drop(self, states: Mapping[str, str]) -> None:
        """Reservations of jobs that are over, or whose programs have not come. `states`: of those that there were."""
        for job, state in states.items():
            reservation = self._reservations.get(job)
            if reservation is None:
                continue
            unused = state == "created" and not reservation.watched and time.time() - reservation.at > UNUSED_FOR
            if state in OVER or unused:
                del self._reservations[job]

    def _held(self) -> dict[str, dict[str, int]]:
        """By job and device; of suspended ones nothing."""
        held: dict[str, dict[str, int]] = {}
        for process in list(self._supervisor.processes.values()):
            its = held.setdefault(process.job.id, {})
            if process.state == "suspended":
                continue
            taken = held_bytes([process])
            for name in devices_of(process.row.device):
                its[name] = its.get(name, 0) + taken.get(name, 0)
        return held

    def _outstanding(self, held: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
        found: dict[str, int] = {}
        for job, reservation in self._reservations.items():
            its = held.get(job)  # None: no process has come yet
            for name in reservation.devices if its is None else its:
                taken = 0 if its is None else its[name]
                found[name] = found.get(name, 0) + max(0, reservation.bytes - taken)
        return found

    @staticmethod
    def _check_quota(job: JobRow, choices: Sequence[str], total: Mapping[str, int]) -> None:
        """Raises Invalid: no device that it could get is that large."""
        if job.memory_quota is None or not choices:
            return
        most = max(min(total.get(name, 1 << 62) for name in devices_of(choice)) for choice in choices)
        if job.memory_quota > most:
            raise Invalid(
                f"memory_quota: {job.memory_quota >> 20} MiB are more than a device has that the job could get: "
                f"{most >> 20} MiB", code="quota_too_large", hint="name less, or another device (xmigctl device list)",
            )  # fmt: skip

    def _refusal(
        self, job: JobRow, choices: Sequence[str], room: Mapping[str, int], is_predicted: bool
    ) -> Conflict:  # fmt: skip
        names = [name for choice in choices for name in devices_of(choice)]
        free = ", ".join(f"{name} has {room.get(name, 0) >> 20} MiB" for name in names) or "every device is cordoned"
        lower = [process for process in self._supervisor.processes.values() if _is_below(process, job)]
        freed = sum(held_bytes(lower).get(name, 0) for name in names)
        hint = f"; jobs of a lower priority hold {freed >> 20} MiB there, and can be preempted" if freed else ""
        predicted = ", as predicted from earlier jobs (XMIG_RESERVE_PREDICTED)" if is_predicted else ""
        assert job.reserved_bytes is not None
        return Conflict(
            f"the job reserves {job.reserved_bytes >> 20} MiB{predicted}, and that is not free: {free} that are "
            "neither used nor reserved", code="not_admitted", hint=f"wait for room, or reserve less{hint}",
        )  # fmt: skip


def _is_below(process: Process, job: JobRow) -> bool:
    return process.state != "suspended" and PRIORITIES.index(process.job.priority) > PRIORITIES.index(job.priority)


def _reservation(job: JobRow, at: float) -> _Reservation:
    names = () if job.device is None else tuple(devices_of(job.device))
    return _Reservation(names, job.reserved_bytes or 0, job.runner_pid is not None, at)
