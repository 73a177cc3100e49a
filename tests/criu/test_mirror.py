"""A second place for checkpoints: copied in the background, used when the first one has lost something."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.checkpoints.s3 import failing, proxy_of, served
from tests.criu.disks import SmallDisk, small_disk
from tests.criu.stopping import stop_at_checkpoint
from tests.criu.test_client_dump import STEPS, criu_or_skip, let_end, start, wait_for_lines
from tests.migration.moves import ended, succeeded
from xmigd.checkpoints.offline import check
from xmigd.demo.node import Node, Program

__all__ = ["small_disk"]
pytestmark = pytest.mark.criu


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    (tmp_path / "mirror").mkdir()
    return tmp_path / "mirror"


@pytest.fixture
def node(native_dir: Path, mirror: Path) -> Iterator[Node]:
    settings = {"criu": criu_or_skip(), "checkpoint_mirror": mirror, "node": "a"}
    with harness.own_node(native_dir, devices="cpu:0,cpu:1", port=-1, **settings) as node:
        yield node


def begun(node: Node, native_dir: Path, output: Path) -> Program:
    program = start(node, native_dir, output, 0.02)
    wait_for_lines(output, STEPS // 4)
    return program


def create(program: Program) -> str:
    node = program.node
    operation = succeeded(node, node.client.post("/v1/checkpoints", {"job": program.job}))
    return str(operation["result"]["checkpoint"])


def is_mirrored(node: Node, checkpoint: str) -> bool:
    return bool(node.client.get(f"/v1/checkpoints/{checkpoint}")["mirrored"])


def failures(node: Node) -> list[dict[str, Any]]:
    return [e["data"] for e in node.client.get("/v1/events", limit=1000) if e["type"] == "checkpoint.mirror_failed"]


def files(folder: Path) -> dict[str, bytes]:
    """Manifests and pieces."""
    found = {}
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # it is being removed
            if path.is_file() and path.name != "mirror":
                found[path.name] = path.read_bytes()
    return found


def test_it_is_restored_from_the_mirror(node: Node, native_dir: Path, tmp_path: Path, mirror: Path) -> None:
    output, undisturbed = tmp_path / "steps", tmp_path / "undisturbed"
    let_end(undisturbed)
    assert start(node, native_dir, undisturbed, 0).finish()[0] == 0
    program = begun(node, native_dir, output)
    first = create(program)
    node.client.put(f"/v1/jobs/{program.job}/checkpoint-policy", {"every_minutes": 600, "keep": 7}, "*")
    second = stop_at_checkpoint(program)
    harness.wait_until(lambda: is_mirrored(node, first) and is_mirrored(node, second), "both are in the mirror")
    assert files(mirror / "a") == files(node.folder / "checkpoints"), "each piece once, and both manifests"
    assert ((mirror / "a").stat().st_mode & 0o777) == 0o700
    report = check(mirror / "a")
    assert (report.whole, len(report.checkpoints)) == (True, 2)

    node.client.delete(f"/v1/checkpoints/{first}")
    left = files(node.folder / "checkpoints")
    harness.wait_until(lambda: files(mirror / "a") == left, "what was removed is removed from the mirror")

    shutil.rmtree(node.folder / "checkpoints" / "objects")
    (node.folder / "checkpoints" / f"{second}.json").unlink()
    verified = ended(node, node.client.post(f"/v1/checkpoints/{second}:verify", {}))
    assert verified["error"]["code"] == "damaged", "what is here is damaged"
    again = succeeded(node, node.client.post(f"/v1/checkpoints/{second}:restore", {"devices": ["cpu:1"]}))["result"]
    path = f"/v1/jobs/{again['job']}/checkpoint-policy"
    harness.wait_until(lambda: node.client.get(path)["keep"] == 7, "the restored job has the policy of the earlier one")
    let_end(output)
    wait_for_lines(output, STEPS)
    assert output.read_text() == undisturbed.read_text()
    assert failures(node) == []


def test_a_mirror_that_is_gone_comes_back(node: Node, native_dir: Path, tmp_path: Path, mirror: Path) -> None:
    """No checkpoint fails by it, and nothing is written where the mirror was mounted."""
    output = tmp_path / "steps"
    program = begun(node, native_dir, output)
    first = create(program)
    harness.wait_until(lambda: is_mirrored(node, first), "it is in the mirror")
    (mirror / "a").rename(tmp_path / "elsewhere")
    second = create(program)
    harness.wait_until(lambda: bool(failures(node)), "it is reported")
    assert "gone" in failures(node)[0]["why"]
    assert not is_mirrored(node, second)
    node.client.delete(f"/v1/checkpoints/{first}")  # the last one that is there
    before = len(failures(node))
    harness.wait_until(lambda: len(failures(node)) > before, "it is tried again")
    assert list(mirror.iterdir()) == []
    (tmp_path / "elsewhere").rename(mirror / "a")
    harness.wait_until(lambda: is_mirrored(node, second), "it is there again", 120)
    assert not (mirror / "a" / f"{first}.json").exists()
    let_end(output)
    assert program.finish()[0] == 0


def test_a_mirror_that_is_full(native_dir: Path, tmp_path: Path, small_disk: SmallDisk) -> None:
    """It is tried again, and what is half copied is no checkpoint."""
    output, mirror = tmp_path / "steps", small_disk(1)
    settings = {"criu": criu_or_skip(), "checkpoint_mirror": mirror, "node": "a"}
    with harness.own_node(native_dir, port=-1, **settings) as node:
        program = begun(node, native_dir, output)
        checkpoint = create(program)
        harness.wait_until(lambda: bool(failures(node)), "it is reported")
        assert "No space left" in failures(node)[0]["why"]
        assert not is_mirrored(node, checkpoint)
        assert list((mirror / "a").glob("*.json")) == []
        subprocess.run(["mount", "-o", "remount,size=64m", mirror], check=True)
        harness.wait_until(lambda: is_mirrored(node, checkpoint), "it is tried again", 120)
        assert files(mirror / "a") == files(node.folder / "checkpoints")
        let_end(output)
        assert program.finish()[0] == 0


def test_the_daemon_leaves_in_the_middle(node: Node, native_dir: Path, tmp_path: Path, mirror: Path) -> None:
    """The next one goes on, replaces what is damaged, and writes nothing twice."""
    output = tmp_path / "steps"
    program = begun(node, native_dir, output)
    checkpoint = create(program)
    harness.wait_until(lambda: is_mirrored(node, checkpoint), "it is in the mirror")
    node.kill()
    # As if it had left before the manifest was written, and the other machine had lost a piece that was not synced.
    (mirror / "a" / f"{checkpoint}.json").unlink()
    pieces = sorted(path for path in (mirror / "a" / "objects").rglob("*") if path.is_file())
    pieces[0].write_bytes(b"")
    kept = {path: path.stat().st_mtime_ns for path in pieces[1:]}
    with sqlite3.connect(node.folder / "xmig.db") as database:
        database.execute("update checkpoints set mirrored_in = null")
    database.close()
    node.start()
    harness.found_again(node)
    harness.wait_until(lambda: is_mirrored(node, checkpoint), "it is in the mirror")
    assert files(mirror / "a") == files(node.folder / "checkpoints")
    assert kept == {path: path.stat().st_mtime_ns for path in pieces[1:]}
    let_end(output)
    assert program.finish()[0] == 0


def test_a_bucket_is_a_second_place(native_dir: Path, tmp_path: Path) -> None:
    """From which a job is restored when nothing is left here. The credentials are in no log and no answer."""
    output = tmp_path / "steps"
    with served(tmp_path) as server, proxy_of(server) as proxy:
        server.client().create_bucket(Bucket="checkpoints")
        settings = {
            "criu": criu_or_skip(), "node": "a", "checkpoint_mirror": "s3://checkpoints/of/this",
            "checkpoint_mirror_endpoint": proxy.endpoint,
            "checkpoint_mirror_credentials": server.credentials(tmp_path / "credentials"),
        }  # fmt: skip
        proxy.fault = failing("QuotaExceeded", 403)
        with harness.own_node(native_dir, devices="cpu:0,cpu:1", port=-1, **settings) as node:
            program = begun(node, native_dir, output)
            checkpoint = stop_at_checkpoint(program)
            harness.wait_until(lambda: bool(failures(node)), "it is reported")
            assert "the quota is full" in failures(node)[0]["why"]
            proxy.fault = None
            harness.wait_until(lambda: is_mirrored(node, checkpoint), "it is in the bucket", 120)
            shutil.rmtree(node.folder / "checkpoints" / "objects")
            (node.folder / "checkpoints" / f"{checkpoint}.json").unlink()
            succeeded(node, node.client.post(f"/v1/checkpoints/{checkpoint}:export", {}))
            succeeded(node, node.client.post(f"/v1/checkpoints/{checkpoint}:restore", {"devices": ["cpu:1"]}))
            let_end(output)
            wait_for_lines(output, STEPS)
            answers = str(node.client.get("/v1/events", limit=1000)) + str(node.client.get("/v1/node"))
            logged = "".join(path.read_text() for path in node.folder.glob("*.log"))
            assert logged
            assert server.secret not in answers + logged
            node.client.delete(f"/v1/checkpoints/{checkpoint}")
            wait_for = "what was removed is removed from the bucket"
            harness.wait_until(lambda: server.client().list_objects_v2(Bucket="checkpoints")["KeyCount"] == 1, wait_for)
