"""engine=driver over REST and the command line: a real daemon, a real helper, a stand-in for the driver."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cli.conftest import ctl
from tests.daemon.conftest import MakeNode, make_node, peer_native
from tests.daemon.node import Node, until
from xmigd.cli.exits import Exit

from .conftest import FIRST, GIB, SECOND, Driver

__all__ = ["make_node", "peer_native"]


@pytest.fixture
def node(driver: Driver, make_node: MakeNode) -> Node:
    node = make_node(XMIG_DEVICES="cuda:0,cuda:1", **driver.environment)
    node.start()
    return node


def records(node: Node) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = node.get("/v1/migrations")
    return found


def test_moved(node: Node, driver: Driver, program: int) -> None:
    name = f"pid:{program}"
    done = ctl(node, "migrate", name, "--plan", "--engine", "driver", "-o", "json")
    plan = json.loads(done.stdout)
    assert [(target["device"], target["allowed"]) for target in plan["targets"]] == [
        ("cuda:0", False),
        ("cuda:1", True),
    ]
    done = ctl(node, "migrate", name, "cuda:1", "--engine", "driver")
    assert done.returncode == 0, done.stderr
    assert driver.where(program) == ("running", SECOND)
    (record,) = records(node)
    assert (record["engine"], record["state"], record["source"], record["target"]) == (
        "driver",
        "done",
        "cuda:0",
        "cuda:1",
    )
    assert [phase["name"] for phase in record["phases"]][:4] == ["locking", "saving", "restoring", "unlocking"]
    assert record["downtime_ms"] > 0
    assert (record["total_bytes"], record["processed_bytes"]) == (8 * GIB, None)
    (process,) = node.get("/v1/processes")
    assert (process["state"], process["pid"], process["device"]) == ("native", program, "cuda:1")
    assert ctl(node, "migrate", name, "cuda:0", "--engine", "driver").returncode == 0
    assert len(node.get("/v1/processes")) == 1
    assert driver.calls.count("init") == 1  # the helper is kept


def test_refused(node: Node, driver: Driver, program: int) -> None:
    driver.gpu(f"{FIRST} {80 * GIB} 0 0 0 NVIDIA H200", f"{SECOND} {80 * GIB} {79 * GIB} 0 0 NVIDIA H200")
    done = ctl(node, "migrate", f"pid:{program}", "cuda:1", "--engine", "driver")
    assert (done.returncode, "has room for 1.0 GiB" in done.stderr) == (Exit.REFUSED, True), done.stderr
    assert "the process is where it was" in done.stderr
    for arguments, code in (
        (("migrate", "pid:1", "cuda:1", "--engine", "driver"), Exit.REFUSED),
        (("migrate", "pid:999999999", "cuda:1", "--engine", "driver"), Exit.NOT_FOUND),
        (("migrate", f"pid:{program}", "cuda:9", "--engine", "driver"), Exit.NOT_FOUND),
        (("migrate", f"pid:{program}", "cuda:1"), Exit.REFUSED),
        (("suspend", f"pid:{program}", "--to", "file"), Exit.REFUSED),
        (("resume", f"pid:{program}"), Exit.REFUSED),
    ):
        done = ctl(node, *arguments)
        assert done.returncode == code, (arguments, done.stderr)
    assert (driver.calls, records(node)) == ([], [])


def test_rolled_back(node: Node, driver: Driver, program: int) -> None:
    driver.fail("restore", 999)
    done = ctl(node, "migrate", f"pid:{program}", "cuda:1", "--engine", "driver")
    assert done.returncode == Exit.OPERATION_FAILED
    assert "restore: CUDA_ERROR_UNKNOWN" in done.stderr
    assert driver.where(program) == ("running", FIRST)
    (record,) = records(node)
    assert (record["state"], record["process_location"]) == ("failed", "source")


def test_suspended_and_resumed(node: Node, driver: Driver, program: int) -> None:
    assert ctl(node, "suspend", f"pid:{program}").returncode == 0
    assert driver.where(program)[0] == "checkpointed"
    assert node.get("/v1/processes")[0]["location"] == "host"
    node.kill()
    node.start()
    done = ctl(node, "resume", f"pid:{program}", "--device", "cuda:1")
    assert done.returncode == 0, done.stderr
    assert driver.where(program) == ("running", SECOND)


@pytest.mark.parametrize("call", ["lock", "checkpoint", "restore", "unlock"])
def test_the_daemon_is_killed_during_each_call(node: Node, driver: Driver, program: int, call: str) -> None:
    slow = driver.folder / "slow"
    slow.write_text(call)
    done = ctl(node, "migrate", f"pid:{program}", "cuda:1", "--engine", "driver", "--no-wait", "-o", "json")
    operation = json.loads(done.stdout)["id"]
    until(lambda: any(line.split()[0] == call for line in driver.calls), f"{call} has begun")
    node.kill()
    slow.unlink()  # the old helper is still at it, and ends then
    node.start()
    ended = until(lambda: over(node, operation), "it is resolved")
    assert driver.where(program)[0] == "running"
    on_target = call in ("restore", "unlock")
    assert driver.where(program)[1] == (SECOND if on_target else FIRST)
    assert ended["state"] == ("succeeded" if on_target else "failed")
    assert records(node)[0]["state"] == ("done" if on_target else "failed")


def over(node: Node, operation: str) -> dict[str, Any] | None:
    found: dict[str, Any] = node.get(f"/v1/operations/{operation}")
    return found if found["state"] in ("succeeded", "failed", "cancelled") else None


def test_others_programs_are_not_ours(node: Node, driver: Driver, program: int) -> None:
    from tests.api.callers import request_as

    body = {"process": f"pid:{program}", "target": "cuda:1", "engine": "driver"}
    status, answer = request_as(node, 12345, "POST", "/v1/migrations", body=body)
    assert (status, answer["code"]) == (403, "forbidden")
    assert driver.calls == []
