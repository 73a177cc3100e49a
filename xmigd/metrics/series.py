"""Time series for charts: the last minutes, in memory only. They are samples, no records: a restart forgets them.

One ring per process and device, a sample every INTERVAL seconds. What is not known is None.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from xmigd import log
from xmigd.database.writer import Writer
from xmigd.devices import repository
from xmigd.devices.header import Counters, Description, counters
from xmigd.devices.inventory import Inventory, held_bytes
from xmigd.supervisor.process import Process

logger = log.get("series")

INTERVAL = 2.0  # seconds
KEPT = 900  # samples: half an hour
PROCESS_FIELDS = (
    "held_bytes", "live_bytes", "shadow_bytes", "journal_bytes", "calls_per_s", "snapshot_ms", "snapshot_share",
    "expected_stall_ms", "stall_bound_ms", "busy_share", "idle_share", "step_ms", "peak_bytes", "link_bytes_per_s",
    "host_bytes_per_s",
)  # fmt: skip
DEVICE_FIELDS = ("used_bytes", "free_bytes", "held_bytes", "utilisation")
ReadDevices = Callable[[], Mapping[str, Mapping[str, Any]]]


class Series:
    """Samples of one subject, oldest first."""

    def __init__(self, fields: tuple[str, ...]) -> None:
        self.fields = fields
        self._samples: deque[tuple[float, tuple[Any, ...]]] = deque(maxlen=KEPT)

    def add(self, at: float, values: Mapping[str, Any]) -> None:
        self._samples.append((at, tuple(values.get(field) for field in self.fields)))

    def columns(self, since: float = 0.0) -> dict[str, list[Any]]:
        """`at` and each field, of the samples after `since`."""
        chosen = [sample for sample in list(self._samples) if sample[0] > since]
        listed: dict[str, list[Any]] = {"at": [at for at, _ in chosen]}
        for place, field in enumerate(self.fields):
            listed[field] = [values[place] for _, values in chosen]
        return listed


class _Before:
    """What the last sample of a process was made of."""

    def __init__(self, process: Process, found: Counters | None) -> None:
        self.at = time.monotonic()
        self.records = None if found is None else found.records
        self.snapshot_ms = process.snapshot_ms
        self.busy_ns = process.busy_ns()


class Sampler:
    def __init__(
        self, processes: Mapping[str, Process], read_devices: ReadDevices, also: Callable[[str], Mapping[str, Any]]
    ) -> None:
        """`also`: more values of a process."""
        self._processes = processes
        self._read_devices = read_devices
        self._also = also
        self._before: dict[str, _Before] = {}
        self._of_processes: dict[str, Series] = {}
        self._of_devices: dict[str, Series] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def of_process(self, process: str) -> Series:
        return self._of_processes.get(process) or Series(PROCESS_FIELDS)

    def of_device(self, device: str) -> Series:
        return self._of_devices.get(device) or Series(DEVICE_FIELDS)

    async def _run(self) -> None:
        while True:
            try:
                self.sample_processes()
                devices = await asyncio.to_thread(self._read_devices)  # may wait for the driver
                at = time.time()
                for device, values in devices.items():
                    self._of_devices.setdefault(device, Series(DEVICE_FIELDS)).add(at, values)
            except Exception:
                logger.exception("a sample failed")
            await asyncio.sleep(INTERVAL)

    def sample_processes(self) -> None:
        at = time.time()
        for gone in self._of_processes.keys() - self._processes.keys():
            del self._of_processes[gone]
            self._before.pop(gone, None)
        for name, process in self._processes.items():
            self._of_processes.setdefault(name, Series(PROCESS_FIELDS)).add(at, self._values(name, process))

    def _values(self, name: str, process: Process) -> dict[str, Any]:
        found = None
        if process.memory is not None:
            with contextlib.suppress(OSError, ValueError):
                found = counters(process.memory.journal.fileno())
        before, now = self._before.get(name), _Before(process, found)
        self._before[name] = now
        rate: float | None = None
        share: float | None = None
        busy: float | None = None
        if before is not None and now.at > before.at:
            seconds = now.at - before.at
            if now.records is not None and before.records is not None and now.records >= before.records:
                rate = (now.records - before.records) / seconds
            if now.busy_ns is not None and before.busy_ns is not None:
                busy = min(1.0, max(0, now.busy_ns - before.busy_ns) / 1e9 / seconds)
            share = min(1.0, (now.snapshot_ms - before.snapshot_ms) / 1e3 / seconds)
        snapshot, stall = process.last_snapshot, process.stall()
        return {
            "held_bytes": sum(handle.size for handle in process.handles.values()),
            "live_bytes": None if snapshot is None else snapshot.live_bytes, "shadow_bytes": process.shadow_bytes,
            "journal_bytes": None if found is None else found.used_bytes, "calls_per_s": rate,
            "snapshot_ms": None if snapshot is None else snapshot.ms, "snapshot_share": share,
            "expected_stall_ms": None if stall is None else stall.expected(time.monotonic_ns()) / 1e6,
            "stall_bound_ms": None if stall is None else stall.bound / 1e6, "busy_share": busy, **self._also(name),
        }  # fmt: skip


class DeviceReader:
    """What is known of each device now. What the database says of them is read when that may have changed."""

    def __init__(self, writer: Writer, readers: Engine, processes: Mapping[str, Process], inventory: Inventory) -> None:
        self._writer = writer
        self._readers = readers
        self._processes = processes
        self._inventory = inventory
        self._version: tuple[int, int] | None = None
        self._known: dict[str, Description | None] = {}

    def __call__(self) -> dict[str, dict[str, Any]]:
        """May wait for the driver."""
        version = self._writer.version
        if version != self._version:
            with Session(self._readers) as session:
                rows = [row for row in repository.listed(session) if row.configured]
            self._known = {
                row.id: None if row.uuid is None else Description(row.name or "", row.uuid, row.memory_bytes or 0)
                for row in rows
            }
            self._version = version
        held = held_bytes(list(self._processes.values()))
        found: dict[str, dict[str, Any]] = {}
        for device, known in self._known.items():
            reading = self._inventory.read(device, known, held.get(device, 0))
            found[device] = {
                "used_bytes": reading.used_bytes, "free_bytes": reading.free_bytes,
                "held_bytes": held.get(device, 0), "utilisation": reading.utilisation,
            }  # fmt: skip
        return found
