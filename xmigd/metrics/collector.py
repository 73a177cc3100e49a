"""What is true at the moment of a scrape."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterable

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from xmigd import __version__
from xmigd.api.context import Node
from xmigd.connections.quotas import Kind
from xmigd.database import models
from xmigd.devices import repository
from xmigd.devices.header import Description, counters
from xmigd.devices.inventory import held_bytes
from xmigd.devices.names import devices_of
from xmigd.supervisor.process import Process

STATES = ("starting", "running", "recovering", "losing", "draining", "lost")


class NodeCollector(Collector):
    def __init__(self, node: Node) -> None:
        self._node = node

    def collect(self) -> Iterable[Metric]:
        node = self._node
        with node.read() as session:
            devices = list(repository.listed(session))
        processes = list(node.supervisor.processes.values())
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
        yield from self._work()
        yield from self._requests()

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
            if process.last_cut is not None:
                sums["live"][key] += process.last_cut.live_bytes
            if process.memory is not None:
                with contextlib.suppress(OSError, ValueError):
                    found = counters(process.memory.journal.fileno())
                    if found is not None:
                        sums["journal"][key] += found.used_bytes
                        sums["calls"][key] += found.records
        for name, text in (
            ("held", "Memory that is held: programs' memory, shadows, module images"),
            ("live", "Device memory that the last cut found live"),
            ("shadow", "Device memory that holds the last cut"),
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
        cost = CounterMetricFamily("xmigd_snapshot_seconds", "Time that snapshots have cost the program", labels=labels)
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
            reading = self._node.inventory.read(row.id, known, held.get(row.id, 0))
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

    def _work(self) -> Iterable[Metric]:
        node = self._node
        ended = CounterMetricFamily("xmigd_operations", "Operations that are over", labels=["kind", "state"])
        for (kind, state), count in list(node.operations.counts.items()):
            ended.add_metric([kind, state], count)
        yield ended
        active = Counter(row.kind for row in node.operations.active())
        yield _gauge(
            "xmigd_operations_active", "Operations under way", ["kind"],
            [((kind,), count) for kind, count in active.items()],
        )  # fmt: skip
        events = CounterMetricFamily("xmigd_events", "Events published", labels=["type"])
        for type, count in list(node.bus.counts.items()):
            events.add_metric([type], count)
        yield events
        yield _gauge("xmigd_event_listeners", "Who listens to events", [], [((), node.bus.listeners)])
        yield _gauge("xmigd_breaker_open", "1: automation is stopped", [], [((), node.breaker.is_open)])
        acts = CounterMetricFamily("xmigd_automatic_actions", "What xMIG did by itself", labels=["action"])
        for action, count in list(node.breaker.acts.items()):
            acts.add_metric([action], count)
        yield acts
        yield CounterMetricFamily(
            "xmigd_automatic_actions_refused", "What the circuit breaker stopped", value=node.breaker.refused
        )
        failing = node.writer.failure is not None
        ready = node.supervisor.host_pool.ready
        yield _gauge("xmigd_host_pool_bytes", "Host memory that is ready for suspensions", [], [((), ready)])
        yield _gauge("xmigd_database_failing", "1: it takes no writes", [], [((), failing)])

    def _requests(self) -> Iterable[Metric]:
        requests = self._node.requests
        counted = CounterMetricFamily("xmigd_http_requests", "Requests", labels=["method", "route", "status"])
        for (method, route, status), count in list(requests.counts.items()):
            counted.add_metric([method, route, str(status)], count)
        spent = CounterMetricFamily("xmigd_http_request_seconds", "Time spent on them", labels=["method", "route"])
        for (method, route), seconds in list(requests.seconds.items()):
            spent.add_metric([method, route], seconds)
        yield from (counted, spent)
        quotas = self._node.connections
        if quotas is None:
            return
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
