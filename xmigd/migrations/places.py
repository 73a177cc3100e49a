"""The node's devices as moves see them: what a plan has to know, and the cordon before a drain."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from xmigd.database import models
from xmigd.database.writer import Writer
from xmigd.devices import repository
from xmigd.devices.header import Description
from xmigd.devices.inventory import Inventory, held_bytes
from xmigd.events.bus import Bus
from xmigd.jobs.admission import Admission
from xmigd.migrations.plan import Place
from xmigd.supervisor.ahead import held_by
from xmigd.supervisor.supervisor import Supervisor


class Places:
    def __init__(
        self, *, supervisor: Supervisor, inventory: Inventory, writer: Writer, readers: Engine, bus: Bus,
        admission: Admission,
    ) -> None:  # fmt: skip
        self._supervisor = supervisor
        self._inventory = inventory
        self._writer = writer
        self._readers = readers
        self._bus = bus
        self._admission = admission

    async def known(self) -> list[Place]:
        """Every device that this node has, or had."""
        reserved = await self._admission.outstanding()
        held = Counter(held_bytes(self._supervisor.processes.values()))
        held.update(held_by(self._supervisor.aheads))
        return await asyncio.to_thread(self._read, held, reserved)

    def _read(self, held: Mapping[str, int], reserved: dict[str, int]) -> list[Place]:
        with Session(self._readers) as session:
            rows = repository.listed(session)
            return [self._place(row, held.get(row.id, 0), reserved.get(row.id, 0)) for row in rows]

    def _place(self, row: models.Device, held: int, reserved: int) -> Place:
        description = Description(row.name or "", row.uuid, row.memory_bytes or 0) if row.uuid is not None else None
        reading = self._inventory.read(row.id, description, held)
        free = None if reading.free_bytes is None else max(0, reading.free_bytes - reserved)
        return Place(
            id=row.id, configured=row.configured, cordoned=row.cordoned, cordon_reason=row.cordon_reason,
            healthy=reading.healthy, why=reading.why, free_bytes=free,
            total_bytes=reading.total_bytes,
        )  # fmt: skip

    async def cordon(self, device: str, reason: str, by: str) -> None:
        """It gets no new process. Without a reason it keeps its own. Raises Unavailable: it cannot be written down."""
        reason = reason or self._supervisor.cordoned.get(device) or "drained"

        def write(session: Session) -> None:
            repository.cordon(session, device, True, reason)

        await self._writer.write("devices.cordon", write)
        self._supervisor.cordoned[device] = reason
        data = {"cordoned": True, "reason": reason, "by": by}
        self._bus.publish("device.changed", "device", device, None, data)
