"""A snapshot that cannot be kept after all leaves nothing in the store: on a busy machine that is many a one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import harness
from tests.store.test_memory import LAYOUT, RING, make_snapshot
from xmigd.database import migrate
from xmigd.database.engine import make_engine, prepare_folder
from xmigd.database.writer import Writer
from xmigd.ipc.fds import Fd
from xmigd.ipc.messages import Snapshot
from xmigd.settings import Settings
from xmigd.store.snapshot_store import SnapshotStore


@pytest.fixture
def snapshot_store(tmp_path: Path) -> Iterator[SnapshotStore]:
    settings = Settings(database=tmp_path / "xmig.db", store_budget=1)
    prepare_folder(settings.database)
    engine = make_engine(settings.database, writer=True)
    migrate.upgrade(settings.database, engine)
    writer = Writer(engine)
    snapshot_store = SnapshotStore(settings, LAYOUT, writer, engine)
    yield snapshot_store
    snapshot_store.close()
    writer.close()


def snapshot(number: int) -> Snapshot:
    return Snapshot(
        type="snapshot", number=number, position=700, sequence=9, ms=1, chunks=1, copied_bytes=1, live_bytes=1,
        journal_bytes=1, objects=1, reason="",
    )  # fmt: skip


def test_a_snapshot_that_another_one_has_overtaken(snapshot_store: SnapshotStore, tmp_path: Path) -> None:
    """Its journal is in the store before its file turns out to be another one's."""
    with contextlib.ExitStack() as stack:
        fds = [Fd(os.memfd_create(name)) for name in ("journal", "snapshot0", "snapshot1")]
        for fd in fds:
            stack.callback(fd.close)
        os.ftruncate(fds[0].fileno(), LAYOUT.header_bytes + RING)
        os.pwrite(fds[2].fileno(), make_snapshot(7), 0)
        snapshot_store.snapshot("ab" * 16, "cd" * 16, snapshot(5), fds, {})
        harness.wait_until(lambda: snapshot_store.figures.failed == 1, "it is given up")
    assert snapshot_store.figures.kept == 0
    assert [path for path in (tmp_path / "store").rglob("*") if path.is_file()] == []
