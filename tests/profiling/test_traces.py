"""Traces of real programs: what is in them, a server that is lost meanwhile, and requests that cannot be done."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import harness
from tests.api.callers import become
from tests.cli.conftest import ctl
from tests.collectives.conftest import PROGRAMS as RANKED
from tests.profiling.conftest import PROGRAMS, RunSteps, fetch, over, slices, take
from xmigd.client import Refused
from xmigd.demo.node import Node

OF_A_STEP = {("mix", 4, 64): 3, ("mix", 8, 32): 1, ("mix", 1, 64): 1}


def refused(node: Node, method: str, path: str, body: dict[str, object] | None = None) -> tuple[int, str]:
    with pytest.raises(Refused) as error:
        node.client.post(path, body) if method == "POST" else node.client.get(path)
    return error.value.status, error.value.code


def test_all_operations_are_there(node: Node, run_steps: RunSteps) -> None:
    program = run_steps()
    before = program.until("running")
    operation = over(node, take(node, program, 0.5))
    document = fetch(node, operation)
    kernels = slices(document, "kernel")
    shapes = Counter((one["name"], one["args"]["grid"][0], one["args"]["block"][0]) for one in kernels)
    steps = shapes["mix", 8, 32]
    assert steps > 3
    # It may begin and end in the middle of one.
    assert all(abs(shapes[shape] - each * steps) <= each for shape, each in OF_A_STEP.items())
    copies = Counter((one["args"]["direction"], one["args"]["bytes"]) for one in slices(document, "copy"))
    assert set(copies) == {("host to device", 4096), ("device to host", 64), ("on the device", 4096)}
    assert {one["args"]["bytes"] for one in slices(document, "memset")} == {64}
    # Records are there without a gap between them that a snapshot or a lost event would leave.
    assert len({one["args"]["record"] for one in kernels}) == len(kernels)
    assert len({one["tid"] for one in kernels}) == 2  # streams
    assert operation["result"]["dropped"] == document["otherData"]["dropped"] == 0
    assert operation["result"]["kinds"]["kernel"] == len(kernels)
    assert all(-1e5 < one["ts"] < 60e6 for one in kernels)
    after = program.until("running")
    assert [after[name] for name in ("server_pid", "generation", "pid")] == [
        before[name] for name in ("server_pid", "generation", "pid")
    ]
    listed = node.client.get(f"/v1/jobs/{program.job}/traces")
    assert [one["id"] for one in listed] == [operation["id"]]


def test_a_server_is_lost_in_the_middle(node: Node, run_steps: RunSteps) -> None:
    program = run_steps()
    harness.wait_until(lambda: (program.info() or {})["standby"] == "warm", "a standby")
    operation = take(node, program, 60)
    harness.wait_until(lambda: written(node, operation) > 0, "the first operations")
    harness.kill_server(program)
    harness.wait_until(lambda: program.recoveries() != [] and recovered(program.recoveries()[0]), "the recovery")
    before = written(node, operation)
    harness.wait_until(lambda: written(node, operation) > before, "more operations")
    # Its program ends, and with it the trace.
    assert program.process.stdin is not None
    program.process.stdin.write("\n")
    program.process.stdin.flush()
    operation = over(node, operation)
    document = fetch(node, operation)
    assert operation["result"]["servers_lost"] == 2  # the second one with its program
    instants = [one["name"] for one in document["traceEvents"] if one["ph"] == "i"]
    assert any("goes on" in one for one in instants), instants
    servers = {one["args"]["server"] for one in slices(document, "kernel")}
    assert len(servers) == 2
    replays = [one for one in slices(document, "xmig") if one["name"] == "replay"]
    assert len(replays) == 1
    assert program.recoveries()[-1]["exact"]
    assert {one["args"]["server"] for one in slices(document, "replayed")} <= {replays[0]["args"]["server"]}


def recovered(recovery: dict[str, object]) -> bool:
    return recovery["outcome"] == "resumed"


def written(node: Node, operation: dict[str, object]) -> int:
    found = node.client.get(f"/v1/operations/{operation['id']}")
    return int((found["progress"] or {}).get("written_bytes", 0))


def test_all_ranks_and_their_collectives(node: Node, tmp_path: Path) -> None:
    command: list[str | Path] = [sys.executable, RANKED / "launch.py", "2", tmp_path, RANKED / "steps.py", "0"]
    program = node.program(command, name="steps", device="cpu:0,1")
    harness.wait_until(lambda: all((tmp_path / f"began.{rank}").exists() for rank in range(2)), "both ranks")
    document = fetch(node, over(node, take(node, program, 0.7)))
    collectives = slices(document, "collective")
    assert {one["pid"] for one in collectives} == {1, 2}
    assert "all-reduce" in {one["name"] for one in collectives}
    assert all(one["args"]["bytes"] > 0 for one in collectives)
    (tmp_path / "enough").touch()
    program.process.communicate(timeout=120)


def test_what_cannot_be_done(node: Node, run_steps: RunSteps) -> None:
    program = run_steps()
    path = f"/v1/jobs/{program.job}/traces"
    assert refused(node, "POST", "/v1/jobs/none/traces", {"seconds": 1}) == (404, "not_found")
    for seconds in (0, -1, 61, "long"):
        assert refused(node, "POST", path, {"seconds": seconds}) == (422, "invalid")
    assert refused(node, "GET", "/v1/traces/none") == (404, "not_found")
    if os.geteuid() == 0:
        node.folder.chmod(0o755)
        with become(60_010):
            assert refused(node, "POST", path, {"seconds": 1}) == (404, "not_found")
            assert refused(node, "GET", f"/v1/jobs/{program.job}/profile") == (404, "not_found")
            assert node.client.get(f"/v1/jobs/{program.job}/traces") == []
    operation = take(node, program, 60)
    assert refused(node, "POST", path, {"seconds": 1}) == (409, "trace_under_way")
    assert refused(node, "GET", f"/v1/traces/{operation['id']}") == (409, "trace_under_way")
    node.client.delete(f"/v1/operations/{operation['id']}")
    assert over(node, operation)["state"] == "cancelled"
    assert refused(node, "GET", f"/v1/traces/{operation['id']}") == (404, "not_found")
    suspended = node.client.post(f"/v1/processes/{program.until('running')['id']}:suspend", {"to": "host"})
    assert over(node, suspended)["state"] == "succeeded"
    assert refused(node, "POST", path, {"seconds": 1}) == (409, "suspended")
    resumed = node.client.post(f"/v1/processes/{program.until('suspended')['id']}:resume", {})
    assert over(node, resumed)["state"] == "succeeded"
    # What the server before the suspension was given has not stayed behind.
    assert slices(fetch(node, over(node, take(node, program, 0.3))), "kernel")


@pytest.fixture
def small(native_dir: Path) -> Iterator[Node]:
    with harness.own_node(native_dir, devices="cpu:0", port=-1, trace_mib=1, traces_kept=1) as node:
        yield node


def test_what_has_no_room_is_counted(small: Node, kernels: Path, tmp_path: Path) -> None:
    program = harness.start(small, PROGRAMS / "steps.py", kernels=kernels)
    harness.go(program)
    operation = take(small, program, 60)

    def dropped() -> bool:
        found = small.client.get(f"/v1/operations/{operation['id']}")
        return int((found["progress"] or {}).get("dropped", 0)) > 0

    harness.wait_until(dropped, "more than fits", timeout=55)
    small.client.delete(f"/v1/operations/{operation['id']}")
    assert over(small, operation)["state"] == "cancelled"
    files = []
    for number in range(2):
        file = tmp_path / f"{number}.json"
        done = ctl(small, "trace", str(program.job), "--seconds", "0.1", "--output", str(file))
        assert done.returncode == 0, done.stderr
        assert "kernel" in done.stdout
        files.append(small.client.get(f"/v1/jobs/{program.job}/traces"))
        assert file.stat().st_size == files[-1][0]["bytes"]
    assert len(files[1]) == 1
    with pytest.raises(Refused, match="not there any more"):
        small.client.get_bytes(f"/v1/traces/{files[0][0]['id']}")
    done = ctl(small, "trace", str(program.job), "--output", str(tmp_path / "none" / "trace.json"))
    assert done.returncode == 2
    assert "directory" in done.stderr
    assert "steps True" in harness.output(program)
