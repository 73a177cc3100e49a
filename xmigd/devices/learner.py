"""What the devices of this node are, learnt from the programs that have them."""

from __future__ import annotations

from sqlalchemy import update

from xmigd.database import models
from xmigd.database.writer import Writer
from xmigd.devices.header import Description, descriptions
from xmigd.devices.names import devices_of
from xmigd.supervisor.process import Process


class DeviceLearner:
    """What devices are called, as their programs see them; known once a program has had one."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._known: dict[str, Description] = {}

    def uuid(self, device: str) -> str | None:
        known = self._known.get(device)
        return None if known is None else known.uuid

    def __call__(self, process: Process) -> None:
        if process.memory is None:
            return
        described = descriptions(process.memory.journal.fileno())
        for name, description in zip(devices_of(process.row.device), described, strict=False):
            if self._known.get(name) != description:
                self._known[name] = description
                statement = (
                    update(models.Device)
                    .where(models.Device.id == name)
                    .values(uuid=description.uuid, name=description.name, memory_bytes=description.total_bytes)
                )
                self._writer.record("devices.learn", lambda session, statement=statement: session.execute(statement))  # type: ignore[misc]
