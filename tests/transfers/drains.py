"""What the tests of drains to another node share."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.harness import wait_until
from tests.transfers.nodes import TransferNode, wait_for_lines
from tests.transfers.storm import Storm, compared
from xmigd.demo.node import Program


@contextlib.contextmanager
def program(nodes: list[TransferNode], native_dir: Path, folder: Path) -> Iterator[tuple[Program, Storm, Path]]:
    """One that runs on the first node, and in the end has written what it should."""
    output = folder / "steps"
    started = nodes[0].start_program(native_dir, output, 0.01, steps=1_000_000)
    wait_for_lines(output, 5)
    started.until("running")
    yield started, Storm(nodes, random.Random(0)), output
    for node in nodes:
        takes_programs(node)
    output.with_suffix(".stop").touch()
    wait_until(lambda: not any(node.lives() for node in nodes), "the program has ended")
    assert compared(nodes, native_dir, output, folder) == 0


def takes_programs(node: TransferNode, cordoned: bool = False) -> None:
    for each in node.client.get("/v1/devices"):
        node.client.patch(f"/v1/devices/{each['id']}", {"cordoned": cordoned}, "*")


def step(node: TransferNode, **ways: Any) -> dict[str, Any]:
    """What would become of the one program that runs there."""
    devices = [each["id"] for each in node.client.get("/v1/devices")]
    plan = node.client.post("/v1/drain-plans", {"devices": devices} | ways)
    (found,) = plan["steps"]
    assert [plan["moves"], plan["preempted"], plan["stuck"]] == [
        found["how"] == "transfer", found["how"] in ("host", "checkpoint"), found["how"] == "stuck",
    ]  # fmt: skip
    return dict(found)


def codes(found: dict[str, Any]) -> set[str]:
    return {reason["code"] for reason in found["reasons"]}


def drain(node: TransferNode, **body: Any) -> dict[str, Any]:
    return dict(node.client.post("/v1/node:drain", body))
