"""What is true at the moment of a scrape."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from xmigd import __version__
from xmigd.connections.quotas import Kind, Quotas
from xmigd.database import models
from xmigd.database.reader import Reader
from xmigd.database.writer import Writer
from xmigd.devices import repository
from xmigd.devices.header import Description, counters
from xmigd.devices.inventory import Inventory, held_bytes
from xmigd.devices.names import devices_of
from xmigd.events.bus import Bus
from xmigd.metrics.requests import Requests
from xmigd.operations.service import Operations
from xmigd.policies.breaker import Breaker
from xmigd.supervisor.process import Process
from xmigd.supervisor.supervisor import Supervisor

STATES = ("starting", "running", "recovering", "losing", "draining", "lost")


class ProcessCollector(Collector):
    """Processes and devices."""

    def __init__(self, supervisor: Supervisor, reader: Reader, inventory: Inventory) -> None:
        self._supervisor = supervisor
        self._reader = reader
        self._inventory = inventory

    def collect(self) -> Iterable[Metric]:
        with self._reader.session() as session:
            devices = list(repository.listed(session))
        processes = list(self._supervisor.processes.values())
        uuids = {row.id: row.uuid or row.id for row in devices}
        yield _gauge("xmigd_info", "The daemon's version", ["version"], [((__version__,), 1)])
        states = Counter(process.state for process in processes)
        yield _gauge(
            "xmigd_processes", "Programs that are served", ["state"],
            [((state,), states[state]) for state in sorted({*STATES, *states})],
        )  # fmt: skip
        yield from self._processes(processes, uuids)
        yield from self._stalls(processes)
        yield from self._devices(devices, processes)

    def _processes(self, processes: list[Process], uuids: dict[str, str]) -> Iterable[Metric]:
        labels = ["job", "device"]
        sums: dict[str, Counter[tuple[str, ...]]] = {
            name: Counter() for name in ("held", "live", "shadow", "journal", "calls")
        }
        for process in processes:
            used = ",".join(uuids.get(each, each) for each in devices_of(process.row.device))
            key: tuple[str, ...] = (process.job.id, used)
            sums["held"][key] += sum(handle.size for handle in list(process.handles.values()))
            sums["shadow"][key] += process.shadow_bytes
            if process.last_snapshot is not None:
                sums["live"][key] += process.last_snapshot.live_bytes
            if process.memory is not None:
                with contextlib.suppress(OSError, ValueError):
                    found = counters(process.memory.journal.fileno())
                    if found is not None:
                        sums["journal"][key] += found.used_bytes
                        sums["calls"][key] += found.records
        for name, text in (
            ("held", "Memory that is held: programs' memory, shadows, module images"),
            ("live", "Device memory that the last snapshot found live"),
            ("shadow", "Device memory that holds the last snapshot"),
            ("journal", "What of the journals is in use"),
        ):
            yield _gauge(f"xmigd_{name}_bytes", text, labels, sums[name].items())
        calls = CounterMetricFamily("xmigd_calls", "Calls that programs have put into their journals", labels=labels)
        for job_and_device, value in sums["calls"].items():
            calls.add_metric(job_and_device, value)
        yield calls

    def _stalls(self, processes: list[Process]) -> Iterable[Metric]:
        labels = ["job", "process"]
        expected = GaugeMetricFamily(
            "xmigd_expected_stall_seconds", "What the program would wait if its server died now", labels=labels
        )
        bound = GaugeMetricFamily("xmigd_stall_bound_seconds", "What snapshots are to keep that below", labels=labels)
        cost = CounterMetricFamily(
            "xmigd_snapshot_seconds", "Time for which snapshots kept the program's work waiting", labels=labels
        )
        now = time.monotonic_ns()
        for process in processes:
            if (stall := process.stall()) is not None:
                key = (process.job.id, process.row.id)
                expected.add_metric(key, stall.expected(now) / 1e9)
                bound.add_metric(key, stall.bound / 1e9)
                cost.add_metric(key, stall.spent / 1e9)
        yield from (expected, bound, cost)

    def _devices(self, rows: list[models.Device], processes: list[Process]) -> Iterable[Metric]:
        labels = ["device", "name"]
        held = held_bytes(processes)
        memory = GaugeMetricFamily("xmigd_device_memory_bytes", "Device memory", labels=[*labels, "kind"])
        utilisation = GaugeMetricFamily(
            "xmigd_device_utilisation_ratio", "Share of time in which a kernel ran", labels=labels
        )
        cordoned = GaugeMetricFamily("xmigd_device_cordoned", "1: it takes no new process", labels=labels)
        for row in rows:
            if not row.configured:
                continue
            known = None if row.uuid is None else Description(row.name or "", row.uuid, row.memory_bytes or 0)
            reading = self._inventory.read(row.id, known, held.get(row.id, 0))
            labelled = (row.uuid or row.id, row.id)
            for kind, value in (
                ("total", reading.total_bytes), ("used", reading.used_bytes), ("free", reading.free_bytes),
                ("held", held.get(row.id, 0)),
            ):  # fmt: skip
                if value is not None:
                    memory.add_metric([*labelled, kind], value)
            if reading.utilisation is not None:
                utilisation.add_metric(labelled, reading.utilisation)
            cordoned.add_metric(labelled, row.cordoned)
        yield from (memory, utilisation, cordoned)


class WorkCollector(Collector):
    """What the daemon does."""

    def __init__(
        self, *, supervisor: Supervisor, operations: Operations, bus: Bus, breaker: Breaker, writer: Writer,
        damaged: Callable[[], int],
    ) -> None:  # fmt: skip
        """`damaged`: copies in host memory, of checkpoints."""
        self._supervisor = supervisor
        self._operations = operations
        self._bus = bus
        self._breaker = breaker
        self._writer = writer
        self._damaged = damaged

    def collect(self) -> Iterable[Metric]:
        ended = CounterMetricFamily("xmigd_operations", "Operations that are over", labels=["kind", "state"])
        for (kind, state), count in list(self._operations.counts.items()):
            ended.add_metric([kind, state], count)
        yield ended
        active = Counter(row.kind for row in self._operations.active())
        yield _gauge(
            "xmigd_operations_active", "Operations under way", ["kind"],
            [((kind,), count) for kind, count in active.items()],
        )  # fmt: skip
        events = CounterMetricFamily("xmigd_events", "Events published", labels=["type"])
        for type, count in list(self._bus.counts.items()):
            events.add_metric([type], count)
        yield events
        yield _gauge("xmigd_event_listeners", "Who listens to events", [], [((), self._bus.listeners)])
        yield _gauge("xmigd_breaker_open", "1: automation is stopped", [], [((), self._breaker.is_open)])
        acts = CounterMetricFamily("xmigd_automatic_actions", "What xMIG did by itself", labels=["action"])
        for action, count in list(self._breaker.acts.items()):
            acts.add_metric([action], count)
        yield acts
        yield CounterMetricFamily(
            "xmigd_automatic_actions_refused", "What the circuit breaker stopped", value=self._breaker.refused
        )
        yield CounterMetricFamily(
            "xmigd_checkpoint_copies_damaged", "Of host memory: what was restored of them came from the disk",
            value=self._damaged(),
        )  # fmt: skip
        failing = self._writer.failure is not None
        ready = self._supervisor.host_pool.ready
        yield _gauge("xmigd_host_pool_bytes", "Host memory that is ready for suspensions", [], [((), ready)])
        yield _gauge("xmigd_database_failing", "1: it takes no writes", [], [((), failing)])


class RequestCollector(Collector):
    """Who asks for what."""

    def __init__(self, requests: Requests, quotas: Quotas) -> None:
        self._requests = requests
        self._quotas = quotas

    def collect(self) -> Iterable[Metric]:
        requests = self._requests
        counted = CounterMetricFamily("xmigd_http_requests", "Requests", labels=["method", "route", "status"])
        for (method, route, status), count in list(requests.counts.items()):
            counted.add_metric([method, route, str(status)], count)
        spent = CounterMetricFamily("xmigd_http_request_seconds", "Time spent on them", labels=["method", "route"])
        for (method, route), seconds in list(requests.seconds.items()):
            spent.add_metric([method, route], seconds)
        yield from (counted, spent)
        quotas = self._quotas
        kinds: tuple[Kind, ...] = ("ordinary", "reserved", "lobby", "stream")
        yield _gauge(
            "xmigd_connections", "Connections to the API; lobby: of those who have no more", ["kind"],
            [((kind,), quotas.open(kind)) for kind in kinds],
        )  # fmt: skip
        refused = CounterMetricFamily("xmigd_connections_refused", "Refused, by whose limit it was", labels=["limit"])
        for limit, count in list(quotas.refused.items()):
            refused.add_metric([limit], count)
        yield refused


def _gauge(
    name: str, text: str, labels: list[str], values: Iterable[tuple[tuple[str, ...], float]]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=labels)
    for key, value in values:
        family.add_metric(key, value)
    return family
