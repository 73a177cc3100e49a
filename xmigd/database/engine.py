"""Connections to the SQLite file. Writers go through writer.py, which owns the only connection that writes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.dialects import registry
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite

from xmigd.errors import StartError

BUSY_TIMEOUT_MS = 5000


class Dialect(SQLiteDialect_pysqlite):
    """Its savepoints are plain statements: SQLAlchemy would compile each anew, which takes longer than many a write."""

    supports_statement_cache = True

    def do_savepoint(self, connection: Connection, name: str) -> None:
        connection.connection.cursor().execute(f"SAVEPOINT {name}")

    def do_rollback_to_savepoint(self, connection: Connection, name: str) -> None:
        if in_transaction(connection):  # otherwise SQLite has taken all of it back already
            cursor = connection.connection.cursor()
            cursor.execute(f"ROLLBACK TO {name}")
            cursor.execute(f"RELEASE {name}")

    def do_release_savepoint(self, connection: Connection, name: str) -> None:
        connection.connection.cursor().execute(f"RELEASE {name}")


registry.register("sqlite.xmig", __name__, Dialect.__name__)


def make_engine(path: Path, *, writer: bool = False) -> Engine:
    engine = create_engine(f"sqlite+xmig:///{path}", pool_size=1 if writer else 4, max_overflow=0 if writer else 8)

    @event.listens_for(engine, "connect")
    def configure(connection: Any, _: Any) -> None:
        # SQLAlchemy begins transactions itself (below); the driver's own idea of when to begin is switched off.
        connection.isolation_level = None
        for pragma in (
            f"busy_timeout={BUSY_TIMEOUT_MS}", "journal_mode=WAL", "foreign_keys=ON", "synchronous=FULL",
            *(() if writer else ("query_only=ON",)),
        ):  # fmt: skip
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def begin(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writer else "BEGIN")

    return engine


def in_transaction(connection: Connection) -> bool:
    """As SQLite has it, which ends a transaction by itself after some errors. To commit nothing succeeds."""
    driver = connection.connection.driver_connection
    return driver is not None and bool(driver.in_transaction)


def prepare_folder(path: Path) -> None:
    """Make the database's folder, for us alone. Raises StartError if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC
        os.close(os.open(path, flags, 0o600))
    except OSError as error:
        raise StartError(
            f"the database {path} cannot be written: {error.strerror}", hint="choose another file with XMIG_DATABASE"
        ) from None
