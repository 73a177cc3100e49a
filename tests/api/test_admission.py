"""Jobs that reserve device memory: as many as fit are admitted, whatever comes at the same time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.cli.conftest import ctl_process
from tests.daemon.conftest import MakeNode
from tests.daemon.node import Node

MIB = 1 << 20
ROOM = 1024  # MiB of each of the two devices


@pytest.fixture
def node(make_node: MakeNode) -> Node:
    node = make_node()
    node.start()
    return node


def reserve(node: Node, mib: int, **fields: Any) -> tuple[int, dict[str, Any]]:
    with node.http() as http:
        answer = http.post("/v1/jobs", json={"name": "job", "reserve_bytes": mib * MIB, **fields})
    return answer.status_code, answer.json()


def end(node: Node, job: str) -> None:
    with node.http() as http:
        assert http.post(f"/v1/jobs/{job}:exited", json={"exit_code": 0}).is_success


def test_as_many_as_fit(node: Node) -> None:
    status, first = reserve(node, 600, priority="best-effort")
    assert (status, first["device"], first["reserved_bytes"], first["priority"]) == (
        201, "cpu:0", 600 * MIB, "best-effort",
    )  # fmt: skip
    _, second = reserve(node, 600)
    assert (second["device"], second["priority"]) == ("cpu:1", "normal")
    status, refused = reserve(node, 600)
    assert (status, refused["code"]) == (409, "not_admitted")
    assert "cpu:0 has 424 MiB, cpu:1 has 424 MiB" in refused["detail"]
    assert reserve(node, 424, device="cpu:1")[0] == 201
    assert reserve(node, 1, device="cpu:0,1")[0] == 409
    end(node, second["id"])
    status, third = reserve(node, 600)
    assert (status, third["device"]) == (201, "cpu:1")
    with node.http() as http:
        http.delete(f"/v1/jobs/{first['id']}")
        http.patch("/v1/devices/cpu:0", json={"cordoned": True}, headers={"If-Match": "*"})
    assert reserve(node, 600)[0] == 409  # there is room on a device that takes nobody
    with node.http() as http:
        http.patch("/v1/devices/cpu:0", json={"cordoned": False}, headers={"If-Match": "*"})
    assert reserve(node, ROOM)[0] == 201
    listed = node.get(f"/v1/jobs/{third['id']}")
    assert (listed["reserved_bytes"], listed["device"]) == (600 * MIB, "cpu:1")


def test_at_the_same_time(node: Node) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: reserve(node, 500), range(16)))
    admitted = [job["device"] for status, job in answers if status == 201]
    assert sorted(admitted) == ["cpu:0", "cpu:0", "cpu:1", "cpu:1"]


def test_another_daemon_knows_them(node: Node) -> None:
    _, first = reserve(node, 600)
    _, second = reserve(node, 600)
    end(node, second["id"])
    node.kill()
    node.start()
    assert reserve(node, 600, device=first["device"])[0] == 409
    assert reserve(node, 600)[0] == 201
    assert reserve(node, 600)[0] == 409


def test_on_the_command_line(node: Node) -> None:
    for size, code in (("2GiB", 2), ("1024MiB", 0), ("lots", 2), ("0", 2)):
        done = ctl_process(node, "run", "--memory", size, "--priority", "critical", "--", "true")
        assert done.returncode == code, done.stderr
    (job,) = node.get("/v1/jobs")
    assert (job["priority"], job["reserved_bytes"]) == ("critical", 1 << 30)
