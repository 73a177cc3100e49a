"""Jobs that are preempted as checkpoints, with real servers and CRIU, or not at all."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.criu.test_client_dump import STEPS, criu_or_skip, let_end, wait_for_lines
from tests.criu.test_client_dump import start as start_alone
from tests.migration.moves import ended, info, succeeded, suspended
from xmigd.demo.node import Node, Program

from .preempting import continued, is_cancelled, preempt, preempted, refusal

pytestmark = pytest.mark.criu
SLOW = '#!/bin/sh\nif [ "$1" = dump ]; then while [ ! -e {go} ]; do sleep 0.01; done; fi\nexec {criu} "$@"\n'


@pytest.fixture(scope="module")
def node(native_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("criu")
    criu = folder / "criu"
    criu.write_text(SLOW.format(go=folder / "go-on", criu=criu_or_skip()))
    criu.chmod(0o755)
    with harness.own_node(native_dir, port=-1, criu=criu) as node:
        yield node


@pytest.fixture
def go(node: Node) -> Path:
    """While this file is not there, CRIU dumps nothing."""
    file = Path(node.environment["XMIG_CRIU"]).parent / "go-on"
    file.unlink(missing_ok=True)
    return file


@pytest.fixture(scope="module")
def expected(node: Node, native_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    output = tmp_path_factory.mktemp("undisturbed") / "steps"
    let_end(output)
    assert start_alone(node, native_dir, output, 0).finish()[0] == 0
    return output.read_text()


def begun(node: Node, native_dir: Path, output: Path, **options: Any) -> Program:
    program = start_alone(node, native_dir, output, 0.02, **options)
    wait_for_lines(output, STEPS // 4)
    return program


def test_and_continues_as_another_job(node: Node, native_dir: Path, tmp_path: Path, go: Path, expected: str) -> None:
    go.touch()
    output = tmp_path / "steps"
    program = begun(node, native_dir, output)
    path = f"/v1/jobs/{program.job}"
    node.client.patch(path, {"labels": {"queue": "night"}, "external_id": "slurm:1"}, "*")
    operation = preempt(program, prefer="checkpoint")
    assert program.process.wait(timeout=30) == -signal.SIGKILL
    result = succeeded(node, operation)["result"]
    assert (result["how"], result["process_location"]) == ("checkpoint", "checkpoint")
    harness.wait_until(lambda: node.client.get(path)["state"] in ("ended", "lost"), "it is over")
    again = continued(node, program.job, devices=["cpu:1"])
    job = node.client.get(f"/v1/jobs/{again['job']}")
    assert (job["labels"], job["external_id"], job["restored_from"]) == ({"queue": "night"}, "slurm:1", program.job)
    assert refusal(node, f"{path}:continue") == "continued_already"
    let_end(output)
    wait_for_lines(output, STEPS)
    assert output.read_text() == expected


def test_the_deadline_passes(node: Node, native_dir: Path, tmp_path: Path, go: Path, expected: str) -> None:
    """While it is dumped: it goes on, and there is no checkpoint."""
    output = tmp_path / "steps"
    program = begun(node, native_dir, output)
    operation = preempt(program, prefer="checkpoint", deadline_seconds=1)
    is_cancelled(node, operation)
    go.touch()
    operation = ended(node, operation)
    assert (operation["state"], operation["error"]["code"]) == ("failed", "deadline_exceeded")
    assert info(program)["state"] == "running"
    assert node.client.get("/v1/checkpoints", job=program.job) == []
    let_end(output)
    assert program.finish()[0] == 0
    assert output.read_text() == expected


def test_it_is_not_possible(node: Node, native_dir: Path, tmp_path: Path, go: Path, expected: str) -> None:
    """The other end of its socket is ours."""
    go.touch()
    output = tmp_path / "steps"
    ours, its = socket.socketpair()
    program = begun(node, native_dir, output, stdin=its.fileno())
    operation = ended(node, preempt(program, prefer="checkpoint"))
    assert (operation["state"], operation["error"]["code"]) == ("failed", "not_preempted")
    assert "(not_movable)" in operation["error"]["detail"]
    assert preempted(program)["how"] == "suspended"
    continued(node, program.job)
    let_end(output)
    assert program.finish()[0] == 0
    assert output.read_text() == expected
    ours.close()
    its.close()


def test_it_was_suspended_before(node: Node, native_dir: Path, tmp_path: Path, go: Path, expected: str) -> None:
    go.touch()
    output = tmp_path / "steps"
    program = begun(node, native_dir, output)
    suspended(program)
    operation = preempt(program, prefer="checkpoint")
    program.process.wait(timeout=30)
    assert succeeded(node, operation)["result"]["how"] == "checkpoint"
    continued(node, program.job)
    let_end(output)
    wait_for_lines(output, STEPS)
    assert output.read_text() == expected


def test_the_daemon_is_killed_meanwhile(node: Node, native_dir: Path, tmp_path: Path, go: Path, expected: str) -> None:
    output = tmp_path / "steps"
    program = begun(node, native_dir, output)
    operation = preempt(program, prefer="checkpoint")
    active = {"job": program.job, "state": "running"}
    harness.wait_until(
        lambda: any(each["phase"] == "dumping" for each in node.client.get("/v1/operations", **active)),
        "the dump", closely=True,
    )  # fmt: skip
    node.kill()
    go.touch()
    node.start()
    harness.found_again(node)
    operation = ended(node, operation)
    assert (operation["state"], operation["error"]["process_location"]) == ("failed", "source")
    let_end(output)
    assert program.finish()[0] == 0
    assert output.read_text() == expected
