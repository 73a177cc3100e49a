"""Each server of a job that is not of the class normal gets a slot in its devices' pages, soon after its start;
standbys have theirs, too. Servers that execute nothing are not waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass

from xmigd import log
from xmigd.devices.names import devices_of
from xmigd.ipc import messages as m
from xmigd.records import Priority
from xmigd.servers.server import Server
from xmigd.settings import Settings
from xmigd.sharing.pages import Page, Shown
from xmigd.supervisor.process import Process

logger = log.get("sharing")

GIVE_EVERY = 0.1  # seconds, until a new server has its slots
REST = 1.0  # seconds, while no job shares anything: a daemon at rest does nothing
NOTHING = Shown(0, 0, 0)


@dataclass(slots=True)
class _Slot:
    server: Server
    process: str
    page: Page
    number: int


@dataclass(frozen=True, slots=True)
class _Device:
    critical: Page
    best_effort: Page

    def of(self, priority: Priority) -> Page:
        return self.critical if priority == "critical" else self.best_effort


class Neighbours:
    def __init__(self, processes: Mapping[str, Process], settings: Settings) -> None:
        self._processes = processes
        self._settings = settings
        self._devices: dict[str, _Device] = {}
        self._slots: dict[tuple[int, str], _Slot] = {}  # by the server's id() and device
        self._before: dict[str, Shown] = {}  # by process: what its servers that are gone had written
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def waiting(self, process: str) -> Shown:
        """How long its kernels have waited for others."""
        shown = [self._before.get(process, NOTHING)]
        shown += [slot.page.read(slot.number) for slot in self._slots.values() if slot.process == process]
        return _sum(shown)

    def shares(self, process: str) -> bool:
        """Has the server that executes its slots?"""
        found = self._processes.get(process)
        server = None if found is None else found.server(found.machine.active)
        return server is not None and any(slot.server is server for slot in self._slots.values())

    def look(self) -> bool:
        """Give slots to servers that have none, and take them from those that are gone. Does any job share?"""
        shared = {name: each for name, each in self._processes.items() if each.job.priority != "normal"}
        wanted: dict[tuple[int, str], tuple[Process, int, Server, int]] = {}
        for process in shared.values():
            for number, server in process.servers.items():
                if number == process.machine.holder or not server.takes_sharing or not server.pid:
                    continue
                for ordinal, name in enumerate(devices_of(server.device)):
                    wanted[id(server), name] = (process, number, server, ordinal)
        for key in [key for key, slot in self._slots.items() if key not in wanted or wanted[key][2] is not slot.server]:
            self._leave(self._slots.pop(key))
        for name in self._before.keys() - shared.keys():
            del self._before[name]
        for key, (process, number, server, ordinal) in wanted.items():
            slot = self._slots.get(key)
            if slot is None:
                slot = self._give(process, server, key[1], ordinal)
                if slot is None:
                    continue
                self._slots[key] = slot
            runs = number == process.machine.active and process.state != "suspended"
            slot.page.set_present(slot.number, runs)
        return bool(shared)

    def _leave(self, slot: _Slot) -> None:
        self._before[slot.process] = _sum([self._before.get(slot.process, NOTHING), slot.page.read(slot.number)])
        slot.page.give_back(slot.number)

    def _give(self, process: Process, server: Server, device: str, ordinal: int) -> _Slot | None:
        priority, settings = process.job.priority, self._settings
        pages = self._devices.get(device)
        if pages is None:
            pages = self._devices[device] = _Device(Page("xmig-critical"), Page("xmig-best-effort"))
        page = pages.of(priority)
        number = page.take()
        if number is None:  # more servers than anybody has on one device
            return None
        message = m.pack(
            "share", **{"class": priority}, ordinal=ordinal, slot=number, backlog=settings.best_effort_backlog,
            backlog_ns=settings.best_effort_backlog_us * 1000, longest_wait=round(settings.best_effort_wait * 1e9),
            slice=round(settings.best_effort_slice * 1e9),
        )  # fmt: skip
        if priority == "critical":
            server.send(message, (page.fd,))
        else:
            server.send(message, (page.fd, pages.critical.reading))
        return _Slot(server, process.row.id, page, number)

    async def _run(self) -> None:
        while True:
            try:
                any_shares = self.look()
            except Exception:
                logger.exception("servers cannot be given what they share")
                any_shares = False
            await asyncio.sleep(GIVE_EVERY if any_shares else REST)


def _sum(shown: list[Shown]) -> Shown:
    return Shown(
        sum(one.held for one in shown), sum(one.held_ns for one in shown), sum(one.overdue for one in shown)
    )  # fmt: skip
