"""What a warm standby is informed of the process that it may get, so that it maps its memory and loads modules and
kernels beforehand."""

from __future__ import annotations

from xmigd.ipc import messages as m
from xmigd.memory.handles import Handle
from xmigd.servers.server import Server
from xmigd.supervisor.state import ProcessState


class Preload:
    """Tells each standby what its process has, memory and images, as they come and go, and when a snapshot may hold
    something new."""

    def __init__(self, process: ProcessState) -> None:
        self._process = process
        self._reported: Server | None = None  # who knows all that there is
        self._objects: int | None = None  # of the last snapshot that it was informed of
        self._changed = False

    def added(self, handle: Handle) -> None:
        standby = self._standby()
        if standby is not None and standby is self._reported:
            standby.send(handle.message, (handle.fd,))
            self._changed |= handle.kind == "image"

    def dropped(self, handle: Handle) -> None:
        standby = self._standby()
        if standby is not None and standby is self._reported:
            standby.send(m.pack("memory", op="drop", id=handle.id))

    def snapshot(self, objects: int | None) -> None:
        """There is a standby, or a snapshot with so many objects: as many as before mean that nothing is new."""
        standby, memory = self._standby(), self._process.memory
        if standby is None or memory is None:
            return
        if standby is not self._reported:
            self._reported, self._changed = standby, False
            for handle in self._process.handles.values():
                self.added(handle)
        if self._changed or objects != self._objects:
            self._changed, self._objects = False, objects
            standby.preloaded = False
            standby.send(m.pack("preload"), (memory.snapshot0, memory.snapshot1))

    def loaded(self, server: Server, message: m.Preloaded) -> None:
        server.preloaded_bytes = message.device_bytes
        server.preloaded = True

    def _standby(self) -> Server | None:
        number = self._process.machine.standby
        if number is None or self._process.machine.servers[number] != "warm":
            return None
        return self._process.server(number) if self._process.machine.limits.preload else None
