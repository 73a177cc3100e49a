"""One request for many jobs, with real servers: each has an outcome of its own."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests import harness
from tests.api.callers import become
from tests.cli.conftest import ctl
from tests.migration.moves import ended, info, succeeded
from tests.recovery.conftest import Starter
from xmigd.client import Refused
from xmigd.demo.node import Node, Program


def bulk(node: Node, action: str, **body: Any) -> dict[str, Any]:
    operation = node.client.post("/v1/jobs:bulk", {"action": action, **body})
    result: dict[str, Any] = succeeded(node, operation)["result"]
    assert result["action"] == action
    return result


def working(start: Starter, count: int) -> list[Program]:
    programs = [start("stepwise") for _ in range(count)]
    for program in programs:
        harness.go(program)
        harness.steps(program, 5)
        program.node.client.patch(f"/v1/jobs/{program.job}", {"labels": {"queue": "night"}}, "*")
    return programs


def test_each_job_has_an_outcome(daemon: Node, start: Starter) -> None:
    programs = working(start, 3)
    *good, bad = programs
    paused = f"/v1/processes/{info(bad)['id']}"
    daemon.client.post(f"{paused}:pause")
    result = bulk(daemon, "suspend", jobs=[*(each.job for each in programs), "none"])
    assert (result["succeeded"], result["failed"]) == (2, 2)
    assert [each["job"] for each in result["outcomes"]] == [*(each.job for each in programs), "none"]
    assert [(each["state"], each["code"]) for each in result["outcomes"]] == [
        ("succeeded", None), ("succeeded", None), ("failed", "paused"), ("failed", "not_found"),
    ]  # fmt: skip
    for each in result["outcomes"][:2]:
        assert daemon.client.get(f"/v1/operations/{each['operation']}")["kind"] == "suspension"
    daemon.client.post(f"{paused}:continue")
    assert [info(each)["state"] for each in programs] == ["suspended", "suspended", "running"]

    assert bulk(daemon, "resume", labels=["queue=night"])["failed"] == 1  # one is not suspended
    result = bulk(daemon, "preempt", labels=["queue=night"], prefer="suspend")
    assert {each["result"]["how"] for each in result["outcomes"]} == {"suspended"}
    assert bulk(daemon, "continue", labels=["queue"], devices=["cpu:1"])["failed"] == 0
    assert {info(each)["device"] for each in programs} == {"cpu:1"}
    assert bulk(daemon, "migrate", labels=["queue"], target="cpu:0")["failed"] == 0
    assert {info(each)["device"] for each in programs} == {"cpu:0"}
    assert all(harness.steps(each, 5) for each in programs)
    assert bulk(daemon, "end", jobs=[good[0].job])["succeeded"] == 1
    assert good[0].process.wait(timeout=30) != 0

    done = ctl(daemon, "bulk", "suspend", "--label", "queue", "-o", "json")
    assert (done.returncode, len(json.loads(done.stdout)["result"]["outcomes"])) == (0, 2)
    done = ctl(daemon, "bulk", "suspend", bad.job, good[0].job)
    assert done.returncode == 6
    assert "not_found" in done.stdout
    done = ctl(daemon, "continue", bad.job[:12])
    assert (done.returncode, "goes on, on cpu:0" in done.stdout) == (0, True), done.stderr
    done = ctl(daemon, "preempt", bad.job[:12], "--deadline", "1m", "--prefer", "suspend")
    assert (done.returncode, "suspended, its state in host memory" in done.stdout) == (0, True), done.stderr


def test_whom_it_concerns(daemon: Node) -> None:
    daemon.folder.chmod(0o755)

    def refused(**body: Any) -> tuple[int, str]:
        with pytest.raises(Refused) as caught:
            daemon.client.post("/v1/jobs:bulk", body)
        return caught.value.status, caught.value.code

    assert refused(action="suspend") == (422, "invalid")
    assert refused(action="suspend", jobs=["a"], labels=["b"]) == (422, "invalid")
    assert refused(action="migrate", jobs=["a"]) == (422, "invalid")
    assert refused(action="end", jobs=["a"], target="cpu:0") == (422, "invalid")
    assert refused(action="end", labels=["nobody=has-it"]) == (404, "not_found")
    ours = daemon.client.post("/v1/jobs", {"labels": {"of": "root"}})["id"]
    with become(60_010):
        assert refused(action="end", labels=["of=root"]) == (404, "not_found")
        outcome = succeeded(daemon, daemon.client.post("/v1/jobs:bulk", {"action": "end", "jobs": [ours]}))
        assert outcome["result"]["outcomes"][0]["code"] == "not_found"
    assert daemon.client.get(f"/v1/jobs/{ours}")["state"] == "created"


def test_the_daemon_is_killed_meanwhile(daemon: Node, start: Starter) -> None:
    """What was begun is brought to an end, and reported for each job as it is."""
    programs = working(start, 3)
    operation = daemon.client.post("/v1/jobs:bulk", {"action": "suspend", "labels": ["queue"]})
    daemon.kill()
    daemon.start()
    harness.found_again(daemon)
    outcomes = ended(daemon, operation)["result"]["outcomes"]
    states = {each["job"]: each["state"] for each in outcomes}
    for program in programs:
        assert (states[program.job] == "succeeded") == (info(program)["state"] == "suspended"), outcomes
