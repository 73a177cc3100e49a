"""A database of an earlier version is brought up to date with everything in it, or left as it was."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.operations import Operations
from sqlalchemy import text

from xmigd.database import migrate
from xmigd.database.engine import make_engine, prepare_folder
from xmigd.errors import StartError

*OLDER, HEAD = sorted(path.name[:4] for path in (migrate.scripts() / "versions").glob("[0-9]*_*.py"))


def snapshot_column(database: sqlite3.Connection) -> str:
    """Before revision 0013 a snapshot was called a cut."""
    columns = {row[1] for row in database.execute("pragma table_info(recoveries)")}
    return "cut" if "cut" in columns else "snapshot"


def older(path: Path, revision: str) -> None:
    """What that version left behind: a job with two processes and what happened to them."""
    prepare_folder(path)
    engine = make_engine(path, writer=True)
    with engine.begin() as connection:
        command.upgrade(migrate.alembic_config(connection), revision)
    engine.dispose()
    with sqlite3.connect(path) as database:
        database.executescript(
            f"""
            insert into devices (id, kind, ordinal, configured, memory_bytes, seen_at)
              values ('cpu:0', 'cpu', 0, 1, 5, 1.5);
            insert into jobs (id, name, command, uid, registered, token_hash, stopped, created_at)
              values ('j1', 'a job', 'python train.py', 1000, 1, 'hash', 0, 2.5);
            insert into processes (id, job_id, pid, start_time, uid, gid, command, device, state, why, generation,
                                   started_at)
              values ('p1', 'j1', 5, 7, 1000, 1000, 'python train.py', 'cpu:0', 'running', 'ready', 3, 2.5),
                     ('p2', 'j1', 6, 8, 1000, 1000, 'python train.py', 'cpu:0', 'ended', 'done', 1, 2.5);
            insert into faults (process_id, number, kind, text, at) values ('p1', 1, 'server', 'killed', 3.5);
            insert into recoveries (process_id, number, cause, outcome, attempts, standby, {snapshot_column(database)},
                                    detected_ms, story, at)
              values ('p1', 1, 'killed', 'resumed', 1, 'warm', 4, 1.5, 'a line', 3.5);
            insert into journal_segments (process_id, number, position, sequence, journal_bytes, live_bytes,
                                          copied_bytes, chunks, objects, ms, reason, at)
              values ('p1', 1, 100, 10, 100, 50, 50, 1, 2, 0.5, 'time', 3.5);
            """
        )
    database.close()


def content(path: Path) -> dict[str, list[tuple[object, ...]]]:
    """What an older version has put there, column by column."""
    with sqlite3.connect(path) as database:
        snapshot = snapshot_column(database)
        found = {
            table: sorted(database.execute(f"select {columns} from {table}").fetchall())
            for table, columns in (
                ("devices", "id, kind, ordinal, configured, memory_bytes, seen_at"),
                ("jobs", "id, name, command, uid, registered, token_hash, stopped, created_at"),
                ("processes", "id, job_id, pid, start_time, uid, gid, device, state, why, generation"),
                ("faults", "process_id, number, kind, text, at"),
                ("recoveries", f"process_id, number, cause, outcome, attempts, {snapshot}, story"),
                ("journal_segments", "process_id, number, position, sequence, ms, reason"),
            )
        }  # fmt: skip
    database.close()
    return found


def revision(path: Path) -> str:
    with sqlite3.connect(path) as database:
        found: str = database.execute("select version_num from alembic_version").fetchone()[0]
    database.close()
    return found


@pytest.mark.parametrize("source", OLDER)
def test_everything_is_there_afterwards(tmp_path: Path, source: str) -> None:
    path = tmp_path / "xmig.db"
    older(path, source)
    before = content(path)
    engine = make_engine(path, writer=True)
    migrate.upgrade(path, engine)
    engine.dispose()
    assert revision(path) == HEAD
    assert content(path) == before
    # The backup is a whole database of the earlier version.
    backup = path.with_suffix(f".{source}.bak")
    assert content(backup) == before
    assert revision(backup) == source
    assert backup.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("target", OLDER)
def test_the_way_back(tmp_path: Path, target: str) -> None:
    """The downgrade scripts keep what the older version knows."""
    path = tmp_path / "xmig.db"
    older(path, "0002")
    before = content(path)
    engine = make_engine(path, writer=True)
    migrate.upgrade(path, engine)
    with engine.connect() as connection:
        migrate.to_revision(connection, target, down=True)
    assert content(path) == before
    assert revision(path) == target
    migrate.upgrade(path, engine)
    engine.dispose()
    assert content(path) == before


def test_a_newer_database_is_refused_and_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "xmig.db"
    older(path, HEAD)
    engine = make_engine(path, writer=True)
    with engine.begin() as connection:
        connection.execute(text("update alembic_version set version_num = '9999'"))
    before = content(path)
    with pytest.raises(StartError, match="another version of xmigd") as refused:
        migrate.upgrade(path, engine)
    engine.dispose()
    assert "install the version that wrote it" in refused.value.hint
    assert content(path) == before
    assert revision(path) == "9999"


def killed(path: Path, left: int) -> bool:
    """Upgrade it in a process that is killed before its step `left`. False: it has fewer."""

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return call

    def upgrade() -> None:
        for name in ("create_table", "create_index", "add_column", "batch_alter_table", "execute"):
            setattr(Operations, name, counted(getattr(Operations, name)))
        migrate._back_up = counted(migrate._back_up)
        migrate.shutil.move = counted(migrate.shutil.move)  # type: ignore[attr-defined]
        engine = make_engine(path, writer=True)
        migrate.upgrade(path, engine)
        engine.dispose()

    process = multiprocessing.get_context("fork").Process(target=upgrade)
    process.start()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


def test_an_upgrade_that_is_killed_is_repeated(tmp_path: Path) -> None:
    """At every step of it: the next start finds the old database or the new one, never something between."""
    kills, old = 0, tmp_path / "old.db"
    older(old, "0001")
    before = content(old)
    while True:
        folder = tmp_path / str(kills)
        folder.mkdir()
        path = folder / "xmig.db"
        shutil.copy(old, path)
        if not killed(path, 1 + 4 * kills):  # steps close together are one test
            break
        kills += 1
        assert content(path) == before
        assert revision(path) == "0001"
        engine = make_engine(path, writer=True)
        migrate.upgrade(path, engine)
        engine.dispose()
        assert content(path) == before
        assert revision(path) == HEAD
    assert kills >= 3
