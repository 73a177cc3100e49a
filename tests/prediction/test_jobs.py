"""Predictions of running jobs by a real daemon with real servers."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.api.callers import become
from tests.cli.conftest import ctl
from tests.daemon.node import until
from tests.harness import needs_root
from tests.recovery.conftest import PROGRAMS, kernels
from xmigd.cli.exits import Exit
from xmigd.client import Client, Refused
from xmigd.demo.node import Node

__all__ = ["kernels"]

MIB = 1 << 20
JOBS = 60
SECONDS, PEAK = 1000.0, 200 * MIB


@pytest.fixture(scope="module")
def node(native_dir: Path) -> Iterator[Node]:
    with harness.own_node(native_dir, device_memory=300 * MIB, reserve_predicted=True) as node:
        yield node


def remember(node: Node, command: str, jobs: int = JOBS) -> None:
    """As if jobs named `stepwise` had run here, one after the other."""
    now = time.time()
    with contextlib.closing(sqlite3.connect(node.folder / "xmig.db", timeout=60)) as database, database:
        for number in range(jobs):
            id, begun = f"past-{number}", now - (jobs + 1 - number) * 1200.0
            ended = begun + SECONDS + number % 10
            values = {
                "id": id, "name": "stepwise", "command": command, "uid": os.getuid(), "registered": 1, "stopped": 0,
                "created_at": begun,
            }  # fmt: skip
            _insert(database, "jobs", values)
            process = {
                "id": f"process-{number}", "job_id": id, "pid": 1, "start_time": 1, "uid": os.getuid(), "gid": 0,
                "command": command, "device": "cpu:0", "state": "ended", "why": "", "location": "device",
                "generation": 1, "started_at": begun, "ended_at": ended,
            }  # fmt: skip
            _insert(database, "processes", process)
            profile = {"job_id": id, "devices": 1, "peak_bytes": PEAK + number % 7 * MIB}
            _insert(database, "job_profiles", profile)


def _insert(database: sqlite3.Connection, table: str, values: dict[str, Any]) -> None:
    columns = ", ".join(values)
    database.execute(f"insert into {table} ({columns}) values ({', '.join('?' * len(values))})", [*values.values()])


def predicted(node: Node, job: str) -> dict[str, Any]:
    found: dict[str, Any] = node.client.get(f"/v1/jobs/{job}/prediction")
    return found


def profile_of(node: Node, job: str) -> int | None:
    with contextlib.closing(sqlite3.connect(node.folder / "xmig.db", timeout=60)) as database:
        row = database.execute("select peak_bytes from job_profiles where job_id = ?", (job,)).fetchone()
    return None if row is None else int(row[0])


@needs_root
def test_a_job_from_before_there_is_a_history_to_its_end(node: Node, kernels: Path) -> None:
    program = harness.start(node, PROGRAMS / "stepwise.py", kernels=kernels, device="cpu:0")
    harness.go(program)
    harness.steps(program, 5)
    job = str(program.job)
    unknown = predicted(node, job)
    assert unknown["remaining_s"] == {
        "p50": None, "p90": None, "unknown": "0 jobs have ended; 40 are needed",
    }  # fmt: skip
    shown = ctl(node, "predict", job)
    assert (shown.returncode, "unknown: 0 jobs have ended" in shown.stdout) == (Exit.OK, True)

    command = node.client.get(f"/v1/jobs/{job}")["command"]
    remember(node, command)
    found = until(lambda: one if (one := predicted(node, job))["remaining_s"]["p90"] else None, "a model", 240)
    left, peak = found["remaining_s"], found["peak_bytes"]
    assert 0.8 * SECONDS < left["p50"] <= left["p90"] < 1.2 * SECONDS
    assert 0.9 * PEAK < peak["p50"] <= peak["p90"] < 1.2 * PEAK
    assert f"over {JOBS} ended jobs" in found["basis"]
    shown = ctl(node, "predict", job)
    assert (shown.returncode, shown.stdout.count("(P90)")) == (Exit.OK, 2)
    assert until(lambda: profile_of(node, job), "its peak is written down") > 0
    _is_in_plans(node, job)
    _is_its_users(node, job)

    # No job is expected to take longer than its walltime.
    brief = node.client.post("/v1/jobs", {"name": "stepwise", "walltime_s": 60.0, "reserve_bytes": MIB})
    assert node.client.get(f"/v1/jobs/{brief['id']}")["walltime_s"] == 60.0
    assert predicted(node, brief["id"])["remaining_s"]["p90"] <= 60.0
    node.client.delete(f"/v1/jobs/{brief['id']}")

    # A program that is about to begin gets its memory reserved: two fit, each on a device of its own.
    taken = node.client.post("/v1/jobs", {"name": "stepwise", "command": command, "device": "cpu:1"})
    assert 0.9 * PEAK < taken["reserved_bytes"] < 1.2 * PEAK
    with pytest.raises(Refused, match="as predicted from earlier jobs") as refused:
        node.client.post("/v1/jobs", {"name": "stepwise", "command": command, "device": "cpu:1"})
    assert refused.value.code == "not_admitted"
    assert node.client.post("/v1/jobs", {"name": "stepwise", "reserve_bytes": MIB})["reserved_bytes"] == MIB

    node.client.delete(f"/v1/jobs/{job}")
    until(lambda: node.client.get(f"/v1/jobs/{job}")["state"] == "stopped", "it is over")
    with pytest.raises(Refused) as over:
        predicted(node, job)
    assert over.value.code == "job_over"
    with pytest.raises(Refused) as nobody:
        predicted(node, "nobody")
    assert nobody.value.code == "not_found"


def _is_in_plans(node: Node, job: str) -> None:
    plan = node.client.post("/v1/consolidation-plans", {"assumed_busy_share": 0.0})
    (planned,) = plan["jobs"]
    assert (planned["job_id"], planned["remaining_s_p90"] > 0.8 * SECONDS, plan["refusals"]) == (job, True, [])
    kept = ctl(node, "consolidate", "plan", "--least-remaining", str(10 * SECONDS), "-o", "json")
    assert [each["code"] for each in json.loads(kept.stdout)["refusals"]] == ["ends_soon"]


def _is_its_users(node: Node, job: str) -> None:
    node.folder.chmod(0o755)
    with become(60_010, ()), contextlib.closing(Client(node.settings)) as client, pytest.raises(Refused) as refused:
        client.get(f"/v1/jobs/{job}/prediction")
    assert refused.value.code == "not_found"
