"""Checkpoints in host memory: whole at once, on the disk behind the job, and what becomes of them when things end."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.criu.disks import SmallDisk, small_disk
from tests.criu.test_checkpoints import manifest
from tests.criu.test_client_dump import STEPS, criu_or_skip, let_end, wait_for_lines
from tests.criu.test_mirror import begun, create
from tests.migration.moves import ended, succeeded
from xmigd.demo.node import Node

__all__ = ["small_disk"]
pytestmark = pytest.mark.criu


def places(node: Node, checkpoint: str) -> list[str]:
    return list(node.client.get(f"/v1/checkpoints/{checkpoint}")["places"])


def events(node: Node, kind: str) -> list[dict[str, Any]]:
    return [event["data"] for event in node.client.get("/v1/events", limit=1000) if event["type"] == kind]


def test_it_outlives_the_daemon_and_goes_to_the_disk(native_dir: Path, tmp_path: Path, small_disk: SmallDisk) -> None:
    output, memory = tmp_path / "steps", tmp_path / "memory"
    settings = {"criu": criu_or_skip(), "checkpoint_memory_mib": 256, "checkpoint_memory_dir": memory}
    with harness.own_node(native_dir, devices="cpu:0,cpu:1", port=-1, **settings) as node:
        program = begun(node, native_dir, output)
        full = small_disk(1)
        (node.folder / "checkpoints").mkdir(mode=0o700, exist_ok=True)
        (node.folder / "checkpoints" / "objects").symlink_to(full)
        first, second = create(program), create(program)
        assert (places(node, first), places(node, second)) == (["memory"], ["memory"])
        harness.wait_until(lambda: bool(events(node, "checkpoint.disk_failed")), "it is reported")
        assert "No space left" in events(node, "checkpoint.disk_failed")[0]["why"]

        node.kill()
        before, memory = memory, tmp_path / "other"
        node.environment["XMIG_CHECKPOINT_MEMORY_DIR"] = str(memory)
        node.start()
        harness.found_again(node)
        assert places(node, second) == ["memory"]
        assert not before.exists()
        succeeded(node, node.client.post(f"/v1/checkpoints/{second}:verify", {}))
        program.process.kill()
        program.process.wait()
        files = manifest(node, {"checkpoint": second}).programs[0].files
        os.truncate(output, next(file.bytes for file in files if file.path == str(output)))
        succeeded(node, node.client.post(f"/v1/checkpoints/{second}:restore", {"devices": ["cpu:1"]}))
        let_end(output)
        wait_for_lines(output, STEPS)

        subprocess.run(["mount", "-o", "remount,size=64m", full], check=True)
        harness.wait_until(lambda: places(node, second) == ["memory", "disk"], "it goes to the disk", 120)
        assert node.client.get(f"/v1/checkpoints/{first}")["stored_bytes"] > 0
        succeeded(node, node.client.post(f"/v1/checkpoints/{first}:verify", {}))
        node.client.delete(f"/v1/checkpoints/{first}")
        node.client.delete(f"/v1/checkpoints/{second}")
        assert list(memory.iterdir()) == []


def test_the_machine_was_lost_before_it_was_on_the_disk(
    native_dir: Path, tmp_path: Path, small_disk: SmallDisk
) -> None:
    output, memory = tmp_path / "steps", tmp_path / "memory"
    settings = {"criu": criu_or_skip(), "checkpoint_memory_mib": 256, "checkpoint_memory_dir": memory}
    with harness.own_node(native_dir, port=-1, **settings) as node:
        program = begun(node, native_dir, output)
        (node.folder / "checkpoints").mkdir(mode=0o700, exist_ok=True)
        (node.folder / "checkpoints" / "objects").symlink_to(small_disk(1))
        checkpoint = create(program)
        node.kill()
        shutil.rmtree(memory)
        node.start()
        harness.found_again(node)
        harness.wait_until(lambda: bool(events(node, "checkpoint.lost")), "it is reported")
        assert places(node, checkpoint) == []
        refused = ended(node, node.client.post(f"/v1/checkpoints/{checkpoint}:verify", {}))
        assert refused["error"]["code"] == "damaged"
        node.client.delete(f"/v1/checkpoints/{checkpoint}")
        let_end(output)
        assert program.finish()[0] == 0
