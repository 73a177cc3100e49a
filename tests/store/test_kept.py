"""Real jobs, real snapshots: what the store has of them afterwards."""

from __future__ import annotations

import itertools
import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.forked import Node
from tests.recovery.conftest import PROGRAMS
from xmigd.demo.node import Program
from xmigd.store.manifest import Manifest, Manifests, load_snapshot, verify
from xmigd.store.memory import records
from xmigd.store.objects import Damaged, Objects

EAGER: dict[str, object] = {"store_budget": 1, "snapshot_cost": 0.3}


@contextmanager
def node_with(native_dir: Path, **settings: object) -> Iterator[Node]:
    with (
        tempfile.TemporaryDirectory(prefix="xmig-") as folder,
        Node(Path(folder), native_dir=native_dir, device_memory=1 << 30, **EAGER | settings) as node,
    ):
        yield node


def segments(program: Program) -> list[dict[str, Any]]:
    """Oldest first."""
    info = program.info()
    assert info is not None
    found: list[dict[str, Any]] = program.node.client.get(f"/v1/processes/{info['id']}/segments", limit=1000)
    return list(reversed(found))


def kept(program: Program) -> list[dict[str, Any]]:
    return [segment for segment in segments(program) if segment["stored_bytes"] is not None]


def manifests(node: Node) -> list[Manifest]:
    """All that the database names, checked from its hash down to the last byte; oldest first."""
    with sqlite3.connect(node.folder / "xmig.db") as database:
        rows = database.execute("select process_id, number, manifest from stored_snapshots order by at").fetchall()
    database.close()
    found = [Manifests(node.folder / "store" / "snapshots").read(*row) for row in rows]
    for manifest in found:
        verify(objects(node), manifest)
    return found


def objects(node: Node) -> Objects:
    return Objects(node.folder / "store" / "objects")


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


def work_until_kept(program: Program, count: int, steps: int = 300) -> None:
    """Let it work until so many of its snapshots have been kept."""

    def enough() -> bool:
        if len(kept(program)) >= count:
            return True
        harness.steps(program, steps)
        return False

    harness.wait_until(enough, f"{count} snapshots are kept")


@pytest.fixture
def running(native_dir: Path, kernels: Path) -> Iterator[tuple[Node, Program]]:
    with node_with(native_dir, store_snapshots=4) as node:
        program = harness.start(node, PROGRAMS / "stepwise.py", kernels=kernels)
        harness.go(program)
        harness.steps(program, 1)
        yield node, program


def test_snapshots_journals_and_images_are_kept(running: tuple[Node, Program]) -> None:
    node, program = running
    work_until_kept(program, 3)
    harness.output(program)
    node.stop()
    found = manifests(node)
    assert found
    for manifest in found:
        snapshot = load_snapshot(objects(node), manifest)
        assert snapshot.position == manifest.position
        assert (
            {part.name for part in manifest.parts if part.kind == "image"}
            == {str(n) for n, _ in snapshot.images}
            != set()
        )
        assert manifest.missing_images == 0
        journal = manifest.part("journal")
        assert journal is not None
        assert manifest.journal_from is not None
        assert journal.bytes == manifest.position - manifest.journal_from
        sequences = [record.sequence for record in records(objects(node).get(journal.hash, journal.bytes))]
        assert sequences == list(range(sequences[0], manifest.sequence + 1)), "every record up to the snapshot"
    for earlier, later in itertools.pairwise(found):
        assert later.journal_from == earlier.position, "nothing is missing between two stored snapshots"
    # A cubin or shared object is there once, whoever uses it.
    assert len({part.hash for m in found for part in m.parts if part.kind == "image"}) == 1
    for path in (node.folder / "store").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0


def test_only_the_newest_stay_and_nothing_else(running: tuple[Node, Program]) -> None:
    node, program = running
    work_until_kept(program, 4)
    first = kept(program)[0]["number"]
    # The daemon tidies every ten seconds: a start does it too.
    node.stop()
    stray = node.folder / "store" / "objects" / "tmpxyz.part"
    stray.write_bytes(b"what a daemon that was killed left behind")
    lost = node.folder / "store" / "snapshots" / ("0" * 32) / "7.json"
    lost.parent.mkdir()
    lost.write_bytes(b"{}")
    node.environment["XMIG_STORE_SNAPSHOTS"] = "1"
    node.start()
    program.until("running")

    def tidy() -> bool:
        harness.steps(program, 50)
        return not stray.exists() and not lost.exists() and first not in {s["number"] for s in kept(program)}

    harness.wait_until(tidy, "what is not needed is removed")
    harness.output(program)
    program.until("ended")
    node.stop()
    found = manifests(node)
    assert files(node.folder / "store" / "snapshots") <= {f"{m.number}.json" for m in found}
    assert files(node.folder / "store" / "objects") == {f"{part.hash}.zst" for m in found for part in m.parts}


def test_what_was_corrupted_is_rejected(running: tuple[Node, Program]) -> None:
    node, program = running
    work_until_kept(program, 1)
    harness.output(program)
    node.stop()
    manifest = manifests(node)[0]
    for part in manifest.parts:
        path = objects(node).path(part.hash)
        good = path.read_bytes()
        middle = len(good) // 2
        for corrupted in (good[:middle], good[:middle] + bytes([good[middle] ^ 4]) + good[middle + 1 :]):
            path.write_bytes(corrupted)
            with pytest.raises(Damaged):
                verify(objects(node), manifest)
        path.write_bytes(good)
        verify(objects(node), manifest)


def test_the_budget_bounds_what_is_kept(native_dir: Path, kernels: Path) -> None:
    with node_with(native_dir, store_budget=0.001) as node:
        program = harness.start(node, PROGRAMS / "stepwise.py", kernels=kernels)
        harness.go(program)

        def snapshots() -> bool:
            harness.steps(program, 100)
            return len(segments(program)) >= 20

        harness.wait_until(snapshots, "20 snapshots")
        work_until_kept(program, 1)  # the first that was chosen may have been overtaken, and there must be others
        assert len(kept(program)) <= 10
        harness.output(program)


def test_it_can_be_turned_off(native_dir: Path, kernels: Path) -> None:
    with node_with(native_dir, store=False) as node:
        program = harness.start(node, PROGRAMS / "stepwise.py", kernels=kernels)
        harness.go(program)
        harness.wait_until(lambda: bool(harness.steps(program, 100)) and len(segments(program)) >= 3, "snapshots")
        assert kept(program) == []
        assert not (node.folder / "store").exists()
        harness.output(program)


def test_a_store_that_cannot_be_written_is_no_jobs_business(native_dir: Path, kernels: Path) -> None:
    with node_with(native_dir, store_free_mib=1 << 40) as node:
        program = harness.start(node, PROGRAMS / "stepwise.py", kernels=kernels)
        harness.go(program)
        harness.wait_until(lambda: bool(harness.steps(program, 100)) and len(segments(program)) >= 3, "snapshots")
        assert kept(program) == []
        harness.output(program)
        # The store has a thread of its own, and no hurry.
        harness.wait_until(lambda: "are left on the disk of" in node.log.read_text(), "why is reported")


@pytest.fixture(scope="module")
def corrupt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("corrupt") / "corrupt.so"
    command: list[str | Path] = [
        "c++",
        "-std=c++20",
        "-O2",
        "-shared",
        "-fPIC",
        "-I",
        harness.ROOT / "shim",
        "-o",
        library,
    ]
    subprocess.run([*command, harness.ROOT / "tests" / "recovery" / "corrupt.cc"], check=True)
    return library


def test_a_program_that_scribbles_over_its_journal(native_dir: Path, kernels: Path, corrupt: Path) -> None:
    """Its own process is lost; the daemon keeps what it can read, and goes on for others."""
    with node_with(native_dir) as node:
        program = harness.start(node, PROGRAMS / "garbage.py", corrupt, 0, kernels=kernels)
        harness.go(program)
        program.process.communicate(timeout=60)
        assert node.client.get("/healthz")["status"] == "ok"
        shutil.rmtree(node.folder / "store", ignore_errors=True)  # and while it is gone, others are kept again
        other = harness.start(node, PROGRAMS / "stepwise.py", kernels=kernels)
        harness.go(other)
        work_until_kept(other, 1)
        harness.output(other)
