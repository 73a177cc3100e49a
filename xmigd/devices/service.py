"""Devices, as callers see and cordon them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from sqlalchemy.orm import Session

from xmigd.database import models
from xmigd.database.reader import Reader
from xmigd.database.writer import Writer
from xmigd.devices import repository
from xmigd.devices.header import Description
from xmigd.devices.inventory import Inventory, held_bytes
from xmigd.devices.names import devices_of
from xmigd.devices.schemas import DeviceChange, DeviceInfo, Grade
from xmigd.errors import NotFound
from xmigd.events.bus import Bus
from xmigd.health import repository as findings
from xmigd.mps.service import Mps
from xmigd.security.callers import Caller
from xmigd.supervisor.process import Process
from xmigd.supervisor.supervisor import Supervisor


class Devices:
    def __init__(
        self, *, supervisor: Supervisor, inventory: Inventory, mps: Mps, writer: Writer, reader: Reader, bus: Bus
    ) -> None:
        self._supervisor = supervisor
        self._inventory = inventory
        self._mps = mps
        self._writer = writer
        self._reader = reader
        self._bus = bus

    def listed(self, caller: Caller) -> list[DeviceInfo]:
        """May wait for the driver."""
        with self._reader.session() as session:
            return self._describe(session, caller, list(repository.listed(session)))

    def find(self, device: str, caller: Caller) -> DeviceInfo:
        """May wait for the driver. Raises NotFound."""
        with self._reader.session() as session:
            return self._describe(session, caller, [_row(session, device)])[0]

    def check_known(self, device: str) -> None:
        """Raises NotFound."""
        with self._reader.session() as session:
            _row(session, device)

    async def change(
        self, device: str, change: DeviceChange, *, check: Callable[[int], None], caller: Caller
    ) -> DeviceInfo:
        """`check` refuses a version that is not the one to be changed. Raises NotFound, and what `check` does."""

        def write(session: Session) -> tuple[bool, str]:
            row = _row(session, device)
            check(row.version)
            cordoned = row.cordoned if change.cordoned is None else change.cordoned
            reason = (row.cordon_reason if change.reason is None else change.reason) if cordoned else ""
            repository.cordon(session, device, cordoned, reason)
            if not cordoned:  # whoever lets it take processes has seen to what was found
                findings.close(session, device, caller.name)
            return cordoned, reason

        cordoned, reason = await self._writer.write("devices.change", write)
        if cordoned:
            self._supervisor.cordoned[device] = reason
        else:
            self._supervisor.cordoned.pop(device, None)
        data = {"cordoned": cordoned, "reason": reason, "by": caller.name}
        self._bus.publish("device.changed", "device", device, None, data)
        return await asyncio.to_thread(self.find, device, caller)

    async def lose(self, device: str, reason: str, *, caller: Caller) -> DeviceInfo:
        """It is cordoned, and its processes go on elsewhere. Raises NotFound."""

        def write(session: Session) -> None:
            _row(session, device)
            repository.cordon(session, device, True, f"lost: {reason}"[:255])

        await self._writer.write("devices.cordon", write)
        processes = self._supervisor.lose_device(device, f"lost: {reason}"[:255])
        data = {"cordoned": True, "reason": f"lost: {reason}"[:255], "by": caller.name, "processes": processes}
        self._bus.publish("device.changed", "device", device, None, data)
        return await asyncio.to_thread(self.find, device, caller)

    def _describe(self, session: Session, caller: Caller, rows: list[models.Device]) -> list[DeviceInfo]:
        """Rows with what is known of the devices now; whose processes are there only to those who see them."""
        processes = list(self._supervisor.processes.values())
        use: dict[str, list[Process]] = {}
        for process in processes:
            for name in devices_of(process.row.device):
                use.setdefault(name, []).append(process)
        held = held_bytes(processes)
        wrong: dict[str, list[models.Finding]] = {}
        for finding in findings.open_ones(session):
            wrong.setdefault(finding.device, []).append(finding)
        return [
            self._info(caller, row, use.get(row.id, []), held.get(row.id, 0), wrong.get(row.id, [])) for row in rows
        ]

    def _info(
        self, caller: Caller, row: models.Device, processes: list[Process], held: int, wrong: list[models.Finding]
    ) -> DeviceInfo:
        description = None
        if row.uuid is not None:
            description = Description(row.name or "", row.uuid, row.memory_bytes or 0)
        reading = self._inventory.read(row.id, description, held)
        mps, mps_why = self._mps.state(row.id)
        return DeviceInfo(
            id=row.id, kind=row.kind, ordinal=row.ordinal, configured=row.configured, uuid=row.uuid,
            name=row.name or reading.name,
            state="unhealthy" if not reading.healthy else "cordoned" if row.cordoned else "ready",
            why=reading.why or row.cordon_reason, memory_bytes=reading.total_bytes or row.memory_bytes,
            used_bytes=reading.used_bytes, free_bytes=reading.free_bytes, utilisation=reading.utilisation,
            held_bytes=held, cordoned=row.cordoned, cordon_reason=row.cordon_reason,
            mps=mps, mps_why=mps_why, health=cast(Grade, wrong[0].rung) if wrong else "fine",
            findings=[each.text for each in wrong], processes=len(processes),
            process_ids=sorted(each.row.id for each in processes if caller.sees(each.job.uid)), version=row.version,
        )  # fmt: skip


def _row(session: Session, device: str) -> models.Device:
    row = session.get(models.Device, device)
    if row is None:
        raise NotFound(f"there is no device {device!r}", hint="xmigctl device list lists them")
    return row
