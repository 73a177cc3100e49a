"""A database that cannot be used: the daemon says which file it is and what to do, and does not touch it."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import MakeNode
from .disks import small_disk
from .node import Node, Program
from .test_start import start_in_vain

GARBAGE = os.urandom(64 << 10)


def garbage(path: Path) -> None:
    path.write_bytes(GARBAGE)


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2 // 4096 * 4096)


def torn_page(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1000)


def overwritten(path: Path) -> None:
    """A page of a table that a start does not read: SQLite alone would find it when that is wanted."""
    with sqlite3.connect(path) as database:
        (page,) = database.execute("select rootpage from sqlite_master where name = 'recoveries'").fetchone()
    database.close()
    with open(path, "r+b") as file:
        file.seek((page - 1) * 4096)
        file.write(GARBAGE[:4096])


def without_its_header(path: Path) -> None:
    with open(path, "r+b") as file:
        file.write(b"\0" * 100)


@pytest.fixture
def used(make_node: MakeNode) -> Node:
    """A node that has run and ended; its database is one file."""
    node = make_node()
    node.start()
    with node.http() as http:
        for number in range(50):
            assert http.post("/v1/jobs", json={"name": f"{number}" * 100}).status_code == 201
    assert node.kill(signal.SIGTERM) == 0
    with sqlite3.connect(node.database) as connection:
        connection.execute("pragma wal_checkpoint(truncate)")
    connection.close()
    return node


@pytest.mark.parametrize("damage", [garbage, truncated, torn_page, overwritten, without_its_header])
def test_a_damaged_database(used: Node, damage: Callable[[Path], None]) -> None:
    damage(used.database)
    before = used.database.read_bytes()
    line = start_in_vain(used)
    assert line.startswith(f"xmigd: the database {used.database} is damaged, or none of xmigd's: "), line
    assert f"mv {used.database} {used.database}.damaged" in line
    assert "what is lost with it" in line
    assert used.database.read_bytes() == before
    backup = used.database.with_suffix(".0011.bak")
    backup.write_bytes(b"")
    assert f"put a backup in its place (there is {backup})" in start_in_vain(used)
    # What it says helps.
    for path in used.database.parent.glob(f"{used.database.name}*"):
        path.rename(used.folder / path.name)
    used.start()
    assert used.get("/v1/jobs") == []


def test_programs_go_on_without_it(make_node: MakeNode) -> None:
    """As the message promises."""
    node = make_node()
    node.start()
    with Program(node) as program:
        assert program.welcome()[0] == 0
        process = node.wait_for_standby()
        node.kill()
        for path in node.database.parent.glob(f"{node.database.name}-*"):
            path.unlink()
        garbage(node.database)
        assert "programs that run go on" in start_in_vain(node)
        node.database.unlink()
        node.start()
        assert node.wait_for_standby()["server_pid"] == process["server_pid"]


def test_a_newer_schema(used: Node) -> None:
    with sqlite3.connect(used.database) as connection:
        connection.execute("update alembic_version set version_num = '9999'")
    connection.close()
    line = start_in_vain(used)
    assert f"the database {used.database} is of another version of xmigd" in line
    assert "install the version that wrote it, put the backup" in line


def test_a_disk_that_is_not_for_writing(used: Node) -> None:
    with small_disk(used.folder / "disk", "16m") as folder:
        (folder / "xmig.db").write_bytes(used.database.read_bytes())
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        used.environment["XMIG_DATABASE"] = str(folder / "xmig.db")
        line = start_in_vain(used)
        assert f"the database {folder / 'xmig.db'} cannot be written" in line
        assert "XMIG_DATABASE" in line


def test_a_folder_in_its_place(used: Node) -> None:
    used.database.unlink()
    used.database.mkdir()
    assert f"the database {used.database} cannot be written: Is a directory" in start_in_vain(used)


def test_it_is_in_use(used: Node) -> None:
    connection = sqlite3.connect(used.database)
    connection.execute("pragma locking_mode=exclusive")
    connection.execute("begin exclusive")
    line = start_in_vain(used)
    connection.close()
    assert f"the database {used.database} is in use" in line
