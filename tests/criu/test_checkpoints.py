"""Checkpoints of programs that run: made, restored, and compared with a run that nobody disturbed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.criu.test_client_dump import STEPS, criu_or_skip, let_end, start, wait_for_lines
from tests.migration.moves import ended, info, succeeded
from xmigd.client import Refused
from xmigd.demo.node import Node, Program

pytestmark = pytest.mark.criu


@pytest.fixture(scope="module")
def node(native_dir: Path) -> Iterator[Node]:
    with harness.own_node(native_dir, devices="cpu:0,cpu:1", port=-1, criu=criu_or_skip()) as node:
        yield node


@pytest.fixture
def undisturbed(node: Node, native_dir: Path, tmp_path: Path) -> str:
    """What the program writes."""
    output = tmp_path / "undisturbed"
    let_end(output)
    assert start(node, native_dir, output, 0).finish()[0] == 0
    return output.read_text()


def begun(node: Node, native_dir: Path, output: Path) -> Program:
    program = start(node, native_dir, output, 0.02)
    wait_for_lines(output, STEPS // 4)
    return program


def checkpoint(program: Program, **fields: Any) -> dict[str, Any]:
    node = program.node
    operation = node.client.post("/v1/checkpoints", {"process": info(program)["id"], **fields})
    result: dict[str, Any] = succeeded(node, operation)["result"]
    return result


def restored(node: Node, made: dict[str, Any], *devices: str) -> dict[str, Any]:
    path = f"/v1/checkpoints/{made['checkpoint']}:restore"
    result: dict[str, Any] = succeeded(node, node.client.post(path, {"devices": list(devices)}))["result"]
    return result


def test_a_job_is_restored_where_it_was(node: Node, native_dir: Path, tmp_path: Path, undisturbed: str) -> None:
    output = tmp_path / "steps"
    program = begun(node, native_dir, output)
    made = checkpoint(program, stop=True)
    assert program.process.wait(timeout=30) == -signal.SIGKILL
    before = len(output.read_text().splitlines())
    assert before < STEPS
    again = restored(node, made, "cpu:1")
    let_end(output)
    wait_for_lines(output, STEPS)
    assert output.read_text() == undisturbed
