"""Several nodes in one view: each with its callers' authority, and nodes that lie, hang and are gone."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

from tests.fleet.nodes import FleetNode
from tests.harness import wait_until
from tests.web.front import end_calm, start_calm
from xmigd.client import Client

USER = 60_010


def answered(node: FleetNode, caller: Client | None = None) -> dict[str, dict[str, Any]]:
    """What it shows once all have answered: a slow machine may need several attempts."""
    found: dict[str, dict[str, Any]] = {}

    def holds() -> bool:
        found.update(node.fleet(caller))
        return all(each["state"] == "answered" for each in found.values())

    wait_until(holds, "all answer")
    return found


def test_everybody_sees_what_is_theirs(nodes: list[FleetNode]) -> None:
    one, two, _ = nodes
    program = start_calm(two, "training", device="cpu:1")
    for caller, jobs in ((one.client, ["training"]), (one.as_user(0), ["training"]), (one.as_user(USER), [])):
        fleet = answered(one, caller)
        assert list(fleet) == ["one", "three", "two"]
        assert {node["state"] for node in fleet.values()} == {"answered"}
        shown = fleet["two"]["shown"]
        assert [job["name"] for job in shown["jobs"]] == jobs
        assert [each["id"] for each in shown["devices"]] == ["cpu:0", "cpu:1"]
        assert [each["processes"] for each in shown["devices"]] == [0, 1]
    process = answered(one)["two"]["shown"]["jobs"][0]["processes"][0]
    assert (process["device"], process["state"], process["stays"]) == ("cpu:1", "running", "")
    wait_until(lambda: two.fleet()["one"]["state"] != "silent", "it has answered")
    refused = two.fleet()["one"]
    assert (refused["state"], refused["shown"]) == ("not_allowed", None)
    assert "fleet_readers" in refused["why"]
    assert "answered" in one.ctl("fleet", "list")
    assert "training" in one.ctl("fleet", "jobs")
    assert one.ctl("fleet", "devices").count("cpu:") == 6
    assert "not allowed" in two.ctl("fleet", "jobs")
    two.client.patch(f"/v1/jobs/{program.job}", {"external_id": "slurm:4711"}, "*")
    stays = answered(one)["two"]["shown"]["jobs"][0]["processes"][0]["stays"]
    assert stays == "it is Slurm's job 4711, which may not leave the devices of its allocation"
    end_calm(program)


def shown(**changes: Any) -> dict[str, Any]:
    return {"shown": {"version": "1", "at": 1.0, "devices": [], "jobs": []} | changes}


DEVICE = {"id": "cpu:0", "state": "ready"}
PROCESS = {"id": "p", "device": "cpu:0", "state": "running", "memory_bytes": 1}
JOB = {"id": "j", "name": "n", "uid": 1, "user": "u", "state": "running", "created_at": 1.0, "processes": []}
LIES = [
    {}, {"shown": None}, {"shown": []}, shown(devices=[DEVICE, DEVICE]), shown(devices=[DEVICE | {"id": "../x"}]),
    shown(jobs=[JOB | {"name": "a\x1b[2J"}]), shown(jobs=[JOB | {"uid": -1}]), shown(jobs=[JOB | {"id": "a/b"}]),
    shown(jobs=[JOB | {"processes": [PROCESS | {"memory_bytes": 1 << 70}]}]), shown(at=1e300),
    shown(jobs=[JOB | {"processes": [PROCESS, PROCESS]}]), shown(ways={"a b": {"transfers": 1}}),
    shown(jobs=[JOB] * 1001),
]  # fmt: skip


def test_a_peer_that_lies(nodes: list[FleetNode]) -> None:
    one, _, three = nodes
    before = answered(one)["three"]["shown"]
    for lie in LIES:
        three.lies(json.dumps(lie))
        found = one.fleet()["three"]
        while found["state"] == "silent":  # a slow machine, and not a lie
            found = one.fleet()["three"]
        assert (found["state"], found["shown"]["at"]) == ("invalid", before["at"]), lie
    # Of another user's jobs it may speak to an operator only.
    three.lies(json.dumps(shown(jobs=[JOB])))
    user = one.as_user(USER)
    wait_until(lambda: one.fleet(user)["three"]["why"] == "it lists jobs of other users", "the lie is found")
    answered(one)
    three.is_honest()
    wait_until(lambda: one.fleet()["three"]["shown"]["at"] > before["at"], "it is honest again")


def test_a_peer_that_hangs(nodes: list[FleetNode]) -> None:
    """It is waited for once, and shown with its last answer and its age."""
    one, _, three = nodes
    seen = answered(one)["three"]["shown"]
    three.lies("hang")
    found = one.fleet()["three"]
    assert (found["state"], found["shown"]) == ("silent", seen)
    began = time.monotonic()
    for _ in range(5):
        assert one.fleet()["three"]["state"] == "silent"
    assert time.monotonic() - began < 5 * 1.5
    three.is_honest()
    wait_until(lambda: one.fleet()["three"]["state"] == "answered", "it is requested again")


def test_a_daemon_that_is_stopped(nodes: list[FleetNode]) -> None:
    one, two, _ = nodes
    seen = answered(one)["two"]["shown"]
    assert two.process is not None
    os.kill(two.process.pid, signal.SIGSTOP)
    try:
        assert one.fleet()["two"]["state"] in ("silent", "unreachable")
        wait_until(lambda: one.fleet()["two"]["state"] == "unreachable", "the link is lost")
        found = one.fleet()["two"]
        assert found["shown"] == seen
        assert found["age_s"] > 1
        assert found["why"]
        assert "old" in one.ctl("fleet", "devices")
    finally:
        os.kill(two.process.pid, signal.SIGCONT)
    wait_until(lambda: one.fleet()["two"]["state"] == "answered", "it is back")
