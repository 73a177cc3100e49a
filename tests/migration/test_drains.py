"""Drains with real servers: planned before, and within a time."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.api.callers import become
from tests.cli.conftest import ctl
from tests.migration.moves import ended, info, suspended
from tests.recovery.conftest import Starter
from xmigd.client import Refused
from xmigd.demo.node import Node

MEMORY = 360 << 20  # of a device
# MiB. A snapshot takes as much again. Where the filler is, one of the others has room, and two have not.
FILLER, OTHER = 80, 120


@pytest.fixture
def daemon(native_dir: Path) -> Iterator[Node]:
    with harness.own_node(native_dir, devices="cpu:0,cpu:1,cpu:2", device_memory=MEMORY) as node:
        yield node


def plan(node: Node, *devices: str) -> dict[str, Any]:
    found: dict[str, Any] = node.client.post("/v1/drain-plans", {"devices": list(devices)})
    return found


def test_a_plan(daemon: Node, start: Starter) -> None:
    """It reckons with those that go before, leaves out what is suspended, and changes nothing."""
    places = {"cpu:0": OTHER, "cpu:1": FILLER, "cpu:2": OTHER}
    programs = {device: start("training", 10, size, 0, device=device) for device, size in places.items()}
    for device, program in programs.items():
        harness.go(program)
        harness.wait_until(lambda: (info(program)["shadow_bytes"] or 0) >= places[device] << 20, "it has a snapshot")  # noqa: B023
    found = plan(daemon, "cpu:0", "cpu:2")
    first, second = found["steps"]
    assert (found["moves"], found["stuck"]) == (1, 1)
    assert (first["source"], first["target"], first["reasons"]) == ("cpu:0", "cpu:1", [])
    assert first["needed_bytes"] >= OTHER << 20
    assert (second["source"], second["target"], second["job_id"]) == ("cpu:2", None, programs["cpu:2"].job)
    assert {reason["code"] for reason in second["reasons"]} == {"cordoned", "no_room"}
    done = ctl(daemon, "drain", "cpu:0", "--dry-run")
    assert (done.returncode, "cpu:1" in done.stdout) == (0, True), done.stderr
    everything = plan(daemon, "cpu:0", "cpu:1", "cpu:2")
    assert (everything["moves"], everything["stuck"]) == (0, 3)
    suspended(programs["cpu:2"])
    assert (plan(daemon, "cpu:2")["steps"], plan(daemon, "cpu:0")["stuck"]) == ([], 0)
    assert not any(each["cordoned"] for each in daemon.client.get("/v1/devices"))
    assert daemon.client.get("/v1/migrations", kind="move") == []
    for body, status in (({"devices": []}, 422), ({"devices": ["cpu:9"]}, 404), ({"devices": ["cpu:0"], "x": 1}, 422)):
        with pytest.raises(Refused) as caught:
            daemon.client.post("/v1/drain-plans", body)
        assert caught.value.status == status
    daemon.folder.chmod(0o755)
    with become(60_010), pytest.raises(Refused) as caught:
        plan(daemon, "cpu:0")
    assert caught.value.code == "operators_only"


def test_the_time_is_up(daemon: Node, start: Starter) -> None:
    """The move under way is taken back, the others are not begun, and all go on where they were."""
    programs = [start("stepwise", device="cpu:0") for _ in range(2)]
    for program in programs:
        harness.go(program)
        assert harness.steps(program, 5)
    servers = [info(program)["server_pid"] for program in programs]
    for server in servers:
        os.kill(server, signal.SIGSTOP)
    operation = daemon.client.post("/v1/devices/cpu:0:drain", {"within_seconds": 0.5})
    harness.wait_until(lambda: "cancelling" in daemon.log.read_text(), "the time is up")
    for server in servers:
        os.kill(server, signal.SIGCONT)
    operation = ended(daemon, operation)
    assert (operation["state"], operation["error"]["code"]) == ("failed", "drain_incomplete")
    parts = operation["progress"]["parts"]
    assert [part["state"] for part in parts] == ["cancelled", "not_begun"]
    assert all("the time was up" in part["why"] for part in parts)
    assert daemon.client.get("/v1/devices/cpu:0")["cordoned"]
    for program in programs:
        assert (info(program)["state"], info(program)["device"]) == ("running", "cpu:0")
        assert harness.steps(program, 5)
    done = ctl(daemon, "drain", "cpu:0", "--yes", "--within", "1m")
    assert done.returncode == 0, done.stderr
    for program in programs:
        assert info(program)["device"] != "cpu:0"
        assert harness.steps(program, 5)
        harness.output(program)
