"""Device memory of this node that communicators take which were made ahead, of all groups, whoever coordinates them.

A device has one pool of it: a program that has no room for its own data gets it, whosever standby has it, and may count
it as free.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from xmigd import log
from xmigd.devices.names import devices_of
from xmigd.groups.prepared import Server as Number
from xmigd.groups.prepared import Spare
from xmigd.ipc import messages as m
from xmigd.servers.server import Server
from xmigd.supervisor.process import Process
from xmigd.supervisor.state import now

logger = log.get("groups")

Device = Mapping[Number, int]  # the servers that use it, with the number of devices that each of them uses


class Group(Protocol):
    """Whoever has servers of this node make communicators ahead."""

    def bytes_on(self, device: Device) -> int: ...
    def spare(self, t: int, device: Device) -> Spare: ...
    def give_up(self, t: int, device: Device) -> None: ...


class StandbyMemory:
    def __init__(self, bound: int, processes: Mapping[str, Process]) -> None:
        """`bound`: bytes of device memory that the communicators of one standby may take; 0: there are none."""
        self.bound = bound
        self._processes = processes
        self._groups: list[Group] = []
        self._counted: dict[str, list[int]] = {}  # by process: what it may count as free of each device

    def add(self, group: Group) -> None:
        self._groups.append(group)

    def remove(self, group: Group) -> None:
        self._groups.remove(group)

    def short(self, process: Process, server: Server, message: m.MemoryShort) -> None:
        """Its program has no room for its own data."""
        names = devices_of(server.device)
        coming = 0
        if message.ordinal < len(names):
            name, t = names[message.ordinal], now()
            users = self._users_of(name)
            coming = sum((one.spare(t, users) for one in self._groups), Spare(0)).of(message.bytes)
            if coming:
                about = {"process": process.row.id[:12], "device": name, "mib": coming >> 20}
                logger.info("communicators that were made ahead are given up for a program's memory", **about)
                for group in self._groups:
                    group.give_up(t, users)
        server.send(m.pack("memory_given_up", number=message.number, bytes=coming))

    def count(self) -> None:
        """Each program may count as free what is given up for it."""
        by_device: dict[str, int] = {}
        for process in self._processes.values():
            if process.active is None or (server := process.server(process.active)) is None:
                continue
            names = devices_of(server.device)
            for name in names:
                if name not in by_device:
                    users = self._users_of(name)
                    by_device[name] = sum(group.bytes_on(users) for group in self._groups)
            counted = [by_device[name] for name in names]
            if counted != self._counted.get(process.row.id, []):
                self._counted[process.row.id] = counted
                process.count_standby_bytes(counted)

    def finished(self, process: Process) -> None:
        self._counted.pop(process.row.id, None)

    def _users_of(self, device: str) -> dict[Number, int]:
        return {
            (process.row.id, number): len(devices)
            for process in self._processes.values()
            for number, of in process.server_devices().items()
            if device in (devices := devices_of(of))
        }
