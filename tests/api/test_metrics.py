"""Metrics and series, of a daemon with the real server and of one that only uses the protocol."""

from __future__ import annotations

import os
import re
import struct

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.daemon.node import Node, Program, until
from xmigd.devices import header
from xmigd.metrics.series import KEPT, Series
from xmigd.native import Layout

from .callers import request_as


def metrics(http: httpx.Client) -> dict[str, dict[tuple[str, ...], float]]:
    """name → label values, in the order of the labels → value"""
    text = http.get("/metrics").text
    found: dict[str, dict[tuple[str, ...], float]] = {}
    described = re.findall(r"^# HELP (\S+)", text, re.MULTILINE)
    assert len(described) == len(set(described)), "two of one name would be added up"
    for family in text_string_to_metric_families(text):
        assert family.name.startswith("xmigd_")
        for sample in family.samples:
            assert "pid" not in sample.labels
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


def test_metrics(daemon: Node, http: httpx.Client) -> None:
    with Program(daemon) as program:
        assert program.welcome()[0] == 0
        process = daemon.wait_for_standby()
        job = process["job_id"]
        assert http.post(f"/v1/jobs/{job}/faults:inject", json={"kind": "kill"}).status_code == 202
        found = until(
            lambda: m if (m := metrics(http)).get("xmigd_recoveries_total", {}).get(("resumed",)) else None, "counted"
        )
        assert found["xmigd_recoveries_total"]["resumed",] == 1
        assert found["xmigd_recovery_seconds_count"][()] == 1
        assert sum(found["xmigd_faults_total"].values()) == 1
        assert sum(found["xmigd_processes"].values()) == 1
        assert any(job in key for key in found["xmigd_held_bytes"])
        assert {key[1] for key in found["xmigd_device_cordoned"]} == {"cpu:0", "cpu:1"}
        assert found["xmigd_http_requests_total"]["POST", "/v1/jobs/{job}/faults:inject", "202"] == 1
        assert found["xmigd_breaker_open"][()] == 0
    until(lambda: "xmigd_held_bytes" not in metrics(http), "the job's series end with it")
    assert request_as(daemon, 60010, "GET", "/metrics")[0] == 403


def test_series(daemon: Node, http: httpx.Client) -> None:
    with Program(daemon) as program:
        assert program.welcome()[0] == 0
        process = daemon.wait_for_standby()["id"]

        def samples() -> dict[str, list[float | None]] | None:
            found = http.get(f"/v1/processes/{process}/series").json()["samples"]
            return found if len(found["at"]) >= 2 else None

        found = until(samples, "two samples")
        assert {len(values) for values in found.values()} == {len(found["at"])}
        assert found["snapshot_ms"][0] is None
        last = found["at"][-2]
        later = http.get(f"/v1/processes/{process}/series", params={"since": last}).json()["samples"]
        assert later["at"][0] > (last or 0)
        assert request_as(daemon, 60010, "GET", f"/v1/processes/{process}/series")[0] == 404
    device = http.get("/v1/devices/cpu:0/series").json()["samples"]
    assert device["utilisation"][0] is None
    for path in ("/v1/devices/x/series", "/v1/processes/x/series"):
        assert http.get(path).status_code == 404


def test_a_ring_has_an_end() -> None:
    series = Series(("a",))
    for number in range(KEPT + 10):
        series.add(number, {"a": number, "b": 1})
    columns = series.columns()
    assert (len(columns["at"]), columns["at"][0], columns["a"][-1]) == (KEPT, 10, KEPT + 9)


def test_the_header_is_read_where_the_layout_has_it() -> None:
    """The offsets that header.py computes, against those of shim/journal/layout.h."""
    fd = os.memfd_create("journal")
    try:
        assert header.descriptions(fd) == []
        assert header.counters(fd) is None
        os.truncate(fd, 2 << 20)
        os.pwrite(fd, struct.pack("<QIIQ", header.MAGIC, max(header.VERSIONS), 1, 1 << 20), 0)
        os.pwrite(fd, b"a\x1bb\0" + bytes(124) + bytes(range(16)) + struct.pack("<Q", 5), 48)
        described = header.descriptions(fd)
        assert [(d.name, d.total_bytes) for d in described] == [("a?b", 5)]
        os.pwrite(fd, struct.pack("<QQ", 100, 7), 6464)
        os.pwrite(fd, struct.pack("<Q", 40), 6592)
        assert header.counters(fd) == header.Counters(records=7, used_bytes=60)
        os.pwrite(fd, struct.pack("<Q", 5), 6784)
        assert header.snapshot(fd) == 5
        at = Layout().stall_at  # that the server says the same is tested in tests/daemon/test_handshake.py
        assert header.stall(fd, at) is None  # no server has reported anything
        os.pwrite(fd, struct.pack("<9Q", 1000, 1, 40, 1500, 30, 200, 150, 9, 2), at)
        reported = header.stall(fd, at)
        assert reported == header.Stall(1000, True, 40, 1500, 30, 200, 150, 9)
        assert (reported.expected(1000), reported.expected(1020), reported.expected(900)) == (90, 120, 90)
        assert header.stall(fd, 0) is None  # a layout without it
        for place in range(7):  # the program can write there, too
            if place != 1:
                os.pwrite(fd, struct.pack("<Q", (1 << 64) - 1), at + 8 * place)
                assert header.stall(fd, at) is None
                os.pwrite(fd, struct.pack("<Q", 5), at + 8 * place)
    finally:
        os.close(fd)


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_health(http: httpx.Client, path: str) -> None:
    assert http.get(path).json() == {"status": "ok"}
    assert re.fullmatch(r"[0-9a-f]{32}", http.get(path).headers["x-request-id"])
