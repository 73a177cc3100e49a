"""What the tests of preemptions share."""

from __future__ import annotations

from typing import Any

import pytest

from tests import harness
from tests.migration.moves import succeeded
from xmigd.client import Refused
from xmigd.demo.node import Node, Program


def preempt(program: Program, **body: Any) -> dict[str, Any]:
    started: dict[str, Any] = program.node.client.post(f"/v1/jobs/{program.job}:preempt", body)
    return started


def preempted(program: Program, **body: Any) -> dict[str, Any]:
    result: dict[str, Any] = succeeded(program.node, preempt(program, **body))["result"]
    return result


def continued(node: Node, job: str, **body: Any) -> dict[str, Any]:
    result: dict[str, Any] = succeeded(node, node.client.post(f"/v1/jobs/{job}:continue", body))["result"]
    return result


def refusal(node: Node, path: str) -> str:
    with pytest.raises(Refused) as caught:
        node.client.post(path, {})
    return caught.value.code


def is_cancelled(node: Node, operation: dict[str, Any]) -> None:
    """The deadline has passed, or somebody has cancelled it, and what it has begun has heard of that."""

    def part() -> str:
        now = node.client.get(f"/v1/operations/{operation['id']}")
        return str((now["progress"] or {}).get("operation"))

    def does() -> bool:
        lines = node.log.read_text().splitlines()
        return any("cancelling" in line and f"operation={part()}" in line for line in lines)

    harness.wait_until(does, "what it has begun is cancelled")
