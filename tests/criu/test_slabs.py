"""A job is restored from what its server has copied to host memory, as it is there: read, and never written."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.criu.test_checkpoints import checkpoint, restored
from tests.criu.test_client_dump import criu_or_skip
from tests.criu.test_increments import begun, put, written
from tests.criu.test_memory import places
from tests.migration.moves import succeeded
from xmigd.demo.node import Node

pytestmark = pytest.mark.criu


def compared(folder: Path, number: int) -> str:
    put(folder / "compare", number)
    harness.wait_until((folder / f"compared.{number}").exists, "it has compared")
    assert (folder / "out").read_text() == ""
    return (folder / f"compared.{number}").read_text()


def process_of(node: Node, made: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = node.client.get(f"/v1/processes/{made['process']}")
    return found


def test_again_and_again_whatever_the_job_does_with_it(native_dir: Path, tmp_path: Path) -> None:
    """An increment, of slabs of two checkpoints. The disk has nothing of use; servers and the daemon die in between."""
    memory = tmp_path / "memory"
    settings = {"checkpoint_memory_mib": 2048, "checkpoint_memory_dir": memory, "criu": criu_or_skip()}
    with harness.own_node(native_dir, port=-1, **settings) as node:
        program = begun(node, tmp_path)
        written(tmp_path, 100)
        first = checkpoint(program)
        written(tmp_path, 101)
        second = checkpoint(program, stop=True)
        assert places(node, second["checkpoint"]) == ["memory", "disk"]
        node.client.delete(f"/v1/checkpoints/{first['checkpoint']}")
        for piece in (node.folder / "checkpoints" / "objects").rglob("?" * 64):
            piece.write_bytes(b"damaged")

        back = restored(node, second)
        assert back["shared_bytes"] >= 30 << 20, "all that the program has"
        written(tmp_path, 102)
        for act in ("suspend", "resume"):  # what has changed is not written where it was
            succeeded(node, node.client.post(f"/v1/processes/{back['process']}:{act}", {}))
        before = process_of(node, back)
        os.kill(before["server_pid"], signal.SIGKILL)
        harness.wait_until(
            lambda: (now := process_of(node, back))["recoveries"] > before["recoveries"] and now["state"] == "running",
            "it is recovered",
        )
        written(tmp_path, 103)
        node.client.delete(f"/v1/checkpoints/{checkpoint_of(node, back)}")
        assert compared(tmp_path, 1) == "103"
        harness.wait_until(lambda: not Path(f"/proc/{back['pid']}").exists(), "its pid is free")

        node.kill()
        node.start()
        put(tmp_path / "order", 101)  # as it was: the program has written that, and may have had the file open
        again = restored(node, second)
        assert again["shared_bytes"] == back["shared_bytes"]
        assert compared(tmp_path, 2) == "101"
        node.client.delete(f"/v1/checkpoints/{second['checkpoint']}")
        assert list(memory.iterdir()) == []


def test_a_damaged_copy_is_left_for_the_disk(native_dir: Path, tmp_path: Path) -> None:
    """The next server finds it, when the program is there already. It is counted, and not used again."""
    memory = tmp_path / "memory"
    settings = {"checkpoint_memory_mib": 2048, "checkpoint_memory_dir": memory, "criu": criu_or_skip()}
    with harness.own_node(native_dir, port=-1, **settings) as node:
        program = begun(node, tmp_path)
        written(tmp_path, 100)
        made = checkpoint(program, stop=True)
        harness.wait_until(lambda: "disk" in places(node, made["checkpoint"]), "it is on the disk, too")
        for slab in memory.glob("*.slab"):
            with slab.open("r+b") as file:
                for at in range(0, slab.stat().st_size, 2 << 20):
                    file.seek(at)
                    content = file.read(8)
                    file.seek(at)
                    file.write(bytes(each ^ 1 for each in content))
        back = restored(node, made)
        assert back["shared_bytes"] == 0
        assert places(node, made["checkpoint"]) == ["disk"]
        assert re.search(
            r"^xmigd_checkpoint_copies_damaged_total [1-9]", node.client.get_text("/metrics"), re.MULTILINE
        )
        assert compared(tmp_path, 1) == "100"


def checkpoint_of(node: Node, made: dict[str, Any]) -> str:
    """Another one, of what was restored."""
    operation = node.client.post("/v1/checkpoints", {"process": made["process"]})
    found: str = succeeded(node, operation)["result"]["checkpoint"]
    return found


def slow(folder: Path, criu: str) -> Path:
    """A CRIU that restores only when the file `go` is there."""
    script = folder / "criu"
    wait = f'[ "$1" != restore ] || until [ -e "{folder}/go" ]; do sleep 0.01; done'
    script.write_text(f'#!/bin/sh\n{wait}\nexec "{criu}" "$@"\n')
    script.chmod(0o755)
    return script


@pytest.mark.parametrize("killed", [False, True], ids=["there", "killed"])
def test_its_server_works_beside_criu(native_dir: Path, tmp_path: Path, killed: bool) -> None:
    """And if that is lost meanwhile, another one does all of it afterwards."""
    settings = {"checkpoint_memory_mib": 2048, "checkpoint_memory_dir": tmp_path / "memory"}
    with harness.own_node(native_dir, port=-1, criu=slow(tmp_path, criu_or_skip()), **settings) as node:
        program = begun(node, tmp_path)
        written(tmp_path, 100)
        made = checkpoint(program, stop=True)
        operation = node.client.post(f"/v1/checkpoints/{made['checkpoint']}:restore", {})
        all_of_it = rf"content is ahead .*settled_bytes={32 << 20} .*total_bytes={32 << 20}"
        harness.wait_until(lambda: re.search(all_of_it, node.log.read_text()) is not None, "a server has it all")
        (server,) = harness.server_pids(node)
        if killed:
            os.kill(server, signal.SIGKILL)
            harness.wait_until(lambda: server not in harness.server_pids(node), "it is gone")
        (tmp_path / "go").touch()
        back = succeeded(node, operation)["result"]
        assert (process_of(node, back)["server_pid"] == server) is not killed
        assert compared(tmp_path, 1) == "100"
