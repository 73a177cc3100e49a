"""Programs under `xmigctl run --movable`, and what becomes of their checkpoints."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from tests import harness
from tests.criu.test_client_dump import ROOT, STEPS
from tests.migration.moves import succeeded
from xmigd.demo.node import Node, Program
from xmigd.ids import new_id


def run_apart(node: Node, command: list[str | Path], output: Path, *options: str, **environment: str) -> Program:
    """With its output in files, and nothing open that leads out of its namespaces."""
    name = f"{output.name}-{new_id()[:8]}"
    words = [sys.executable, "-m", "xmigd.cli", "run", "--movable", *options, "--name", name, "--", *command]
    with output.with_suffix(".out").open("wb") as out:
        process = subprocess.Popen(
            words, env=node.environment | environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, text=True,
            cwd=ROOT,
        )  # fmt: skip
    node._programs.append(process)
    return Program(node, job_of(node, name), process)


def job_of(node: Node, name: str) -> str:
    def found() -> list[dict[str, Any]]:
        return [one for one in node.client.get("/v1/jobs") if one["name"] == name]

    harness.wait_until(lambda: bool(found()), f"job {name} is known")
    return str(found()[0]["id"])


def client(node: Node, native_dir: Path, output: Path, pause: float = 0.02, *options: str) -> Program:
    command: list[str | Path] = [sys.executable, ROOT / "tests" / "criu" / "client.py", output, str(STEPS), str(pause)]
    return run_apart(node, command, output, *options, KERNELS=str(native_dir / "xmig_kernels.so"))


def checkpoint(program: Program, *, stop: bool = False) -> dict[str, Any]:
    node = program.node
    operation = node.client.post("/v1/checkpoints", {"job": program.job, "stop": stop})
    if stop:
        program.process.wait(timeout=60)
    result: dict[str, Any] = succeeded(node, operation)["result"]
    return result


def restored(node: Node, made: dict[str, Any], **fields: Any) -> dict[str, Any]:
    path = f"/v1/checkpoints/{made['checkpoint']}:restore"
    result: dict[str, Any] = succeeded(node, node.client.post(path, {"devices": [], **fields}))["result"]
    return result
