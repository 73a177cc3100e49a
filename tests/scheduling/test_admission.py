"""Reservations of device memory, with real servers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import harness
from tests.migration.moves import info, succeeded
from tests.recovery.conftest import PROGRAMS, Starter
from xmigd.client import Refused
from xmigd.demo.node import Node, Program

MIB = 1 << 20


@pytest.fixture
def daemon(native_dir: Path) -> Iterator[Node]:
    with harness.own_node(native_dir, device_memory=300 * MIB) as node:
        yield node


def test_a_reservation_is_where_its_programs_are(daemon: Node, start: Starter, kernels: Path) -> None:
    """And while they are suspended it keeps nobody out."""
    command = [
        sys.executable,
        "-m",
        "xmigd.cli",
        "run",
        "--memory",
        "200MiB",
        "--external-id",
        "it",
        "--device",
        "cpu:0",
    ]
    program: list[str | Path] = [sys.executable, harness.CONFORMANCE.parent / "start.py", PROGRAMS / "stepwise.py"]
    variables = {"CUDART": str(harness.cudart("13")), "KERNELS": str(kernels)}
    paths = {"PYTHONPATH": f"{harness.CONFORMANCE}:{harness.ROOT}"}
    with subprocess.Popen(
        [*command, "--", *map(str, program)], env=daemon.environment | variables | paths, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True,
    ) as child:  # fmt: skip
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        job = daemon.client.get("/v1/jobs", external_id="it")[0]["id"]
        runs = Program(daemon, job, child)
        harness.go(runs)
        assert harness.steps(runs, 5)

        def refused(device: str) -> str | None:
            try:
                made = daemon.client.post("/v1/jobs", {"device": device, "reserve_bytes": 200 * MIB})
            except Refused as error:
                return error.code
            daemon.client.delete(f"/v1/jobs/{made['id']}")
            return None

        assert (refused("cpu:0"), refused("cpu:1")) == ("not_admitted", None)
        # Nobody is moved to where it is reserved.
        other = start("training", 10, 120, 0, device="cpu:1")
        harness.go(other)
        harness.wait_until(lambda: info(other)["held_bytes"] >= 120 * MIB, "it has its memory")
        (target,) = [
            each
            for each in daemon.client.post("/v1/migration-plans", {"process": info(other)["id"]})["targets"]
            if each["device"] == "cpu:0"
        ]
        assert [reason["code"] for reason in target["reasons"]] == ["no_room"]
        other.process.kill()
        other.until("ended")

        succeeded(daemon, daemon.client.post(f"/v1/jobs/{job}:preempt", {"prefer": "suspend"}))
        assert refused("cpu:0") is None
        succeeded(daemon, daemon.client.post(f"/v1/jobs/{job}:continue", {"devices": ["cpu:1"]}))
        assert (refused("cpu:0"), refused("cpu:1")) == (None, "not_admitted")
        assert harness.steps(runs, 5)
        harness.output(runs)
    harness.wait_until(lambda: daemon.client.get(f"/v1/jobs/{job}")["state"] == "ended", "it is over")
    assert refused("cpu:1") is None
