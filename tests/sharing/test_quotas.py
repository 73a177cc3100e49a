"""A program sees its memory quota as its device's memory, wherever it goes and whatever becomes of its server."""

from __future__ import annotations

import os
from typing import Any

import httpx
import pytest

from tests import harness
from tests.api.callers import request_as
from tests.daemon.conftest import MakeNode
from tests.migration.moves import info, moved, resumed, suspended
from tests.sharing.conftest import MIB, Starter, answer, ask
from xmigd.demo.node import Node


def test_through_recovery_move_and_suspension(daemon: Node, start: Starter) -> None:
    quota = 96 * MIB
    program = start("quota", quota, memory_quota=quota)

    def checked() -> str:
        ask(program, "again")
        return answer(program)

    results = [checked()]
    for _ in range(2):
        harness.kill_server(program)
        results.append(checked())
    moved(program, "cpu:1")
    results.append(checked())
    suspended(program)
    resumed(program, "cpu:0")
    results.append(checked())
    assert all(line.startswith("within 96 ") for line in results), results
    assert len(set(results)) == len(results)  # each time its memory went through another kernel
    job = daemon.client.get(f"/v1/jobs/{program.job}")
    assert (job["memory_quota"], job["reserved_bytes"]) == (quota, quota)
    # The device is larger than what this program saw of it.
    sizes = {each["id"]: each["memory_bytes"] for each in daemon.client.get("/v1/devices")}
    assert sizes[info(program)["device"]] == 512 * MIB
    harness.output(program)


def test_without_one_all_is_there(start: Starter) -> None:
    program = start("quota", 512 * MIB)
    ask(program, "again")
    assert answer(program).startswith("within 512 ")
    harness.output(program)


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({"memory_quota": 2048 * MIB}, 422, "quota_too_large"),
        ({"memory_quota": 1}, 422, "invalid"),
        ({"memory_quota": 100 * MIB, "reserve_bytes": 101 * MIB}, 422, "invalid"),
        ({"memory_quota": 100 * MIB, "reserve_bytes": 50 * MIB}, 201, None),
        ({"priority": "important"}, 422, "invalid"),
    ],
    ids=["larger than a device", "none", "less than reserved", "more than reserved", "unknown class"],
)
def test_what_is_requested(daemon: Node, fields: dict[str, Any], status: int, code: str | None) -> None:
    found, body = request_as_root(daemon, fields)
    assert (found, body.get("code")) == (status, code), body
    if status == 201:
        daemon.client.post(f"/v1/jobs/{body['id']}:exited", {"exit_code": 0})


def request_as_root(daemon: Node, fields: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    transport = httpx.HTTPTransport(uds=str(daemon.settings.api_socket))
    with httpx.Client(transport=transport, base_url="http://localhost") as http:
        found = http.post("/v1/jobs", json={"name": "job", **fields})
    return found.status_code, found.json()


@harness.needs_root
def test_nobody_is_critical_without_a_grant(make_node: MakeNode) -> None:
    node = make_node(XMIG_CRITICAL_USERS="60011")
    node.start()
    for uid, status, code in ((60010, 403, "class_not_granted"), (60011, 201, None), (0, 201, None)):
        found, body = request_as(node, uid, "POST", "/v1/jobs", body={"name": "job", "priority": "critical"})
        assert (found, body.get("code")) == (status, code), (uid, body)
    assert request_as(node, 60010, "POST", "/v1/jobs", body={"name": "job", "priority": "best-effort"})[0] == 201
    assert os.geteuid() == 0
