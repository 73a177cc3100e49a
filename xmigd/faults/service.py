"""Faults, as callers see and acknowledge them."""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

from sqlalchemy import CursorResult, update
from sqlalchemy.orm import Session

from xmigd.database import models
from xmigd.database.reader import Reader
from xmigd.database.writer import Writer
from xmigd.errors import NotFound
from xmigd.events.bus import Bus
from xmigd.faults import repository
from xmigd.faults.schemas import FaultInfo
from xmigd.security.callers import Caller


class Faults:
    def __init__(self, writer: Writer, reader: Reader, bus: Bus) -> None:
        self._writer = writer
        self._reader = reader
        self._bus = bus

    def find(self, fault: int, caller: Caller) -> FaultInfo:
        """Raises NotFound."""
        with self._reader.session() as session:
            rows = repository.page(session, fault=fault, owner=caller.owner)
        if not rows:
            raise NotFound(f"there is no fault {fault}", hint="xmigctl fault list lists them")
        return FaultInfo.model_validate(rows[0])

    async def acknowledge(self, fault: int, caller: Caller) -> FaultInfo:
        """The first who says so is remembered. Raises NotFound."""
        before = await asyncio.to_thread(self.find, fault, caller)
        statement = update(models.Fault).where(models.Fault.id == fault, models.Fault.acknowledged_at.is_(None))
        statement = statement.values(acknowledged_at=time.time(), acknowledged_by=caller.name[:255])

        def write(session: Session) -> bool:
            return cast(CursorResult[Any], session.execute(statement)).rowcount == 1

        if await self._writer.write("faults.acknowledge", write):
            data = {"fault": fault, "by": caller.name}
            self._bus.publish("fault.acknowledged", "process", before.process_id, before.job_id, data)
        return await asyncio.to_thread(self.find, fault, caller)
