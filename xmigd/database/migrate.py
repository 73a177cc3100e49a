"""Bring the database to this version's schema, at start."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, Engine, create_engine, inspect
from sqlalchemy.exc import DatabaseError

from xmigd import log
from xmigd.database.damage import check, unusable
from xmigd.database.engine import make_engine
from xmigd.errors import StartError

if TYPE_CHECKING:
    from alembic.config import Config

logger = log.get("database")


def scripts() -> Path:
    """The folder `migrations`: in the source tree beside the package, installed inside of it."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "migrations", package.parent / "migrations"):
        if (folder / "env.py").exists():
            return folder
    raise StartError("the database's migrations are missing", hint="install xmigd again")


def alembic_config(connection: Connection | None = None) -> Config:
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(scripts()))
    config.attributes["connection"] = connection
    return config


def newest(folder: Path) -> str:
    """The revision that this version's scripts lead to. They are numbered, so that alembic need not be queried: it is
    10 MB of memory for as long as the daemon runs, and most starts find nothing to do."""
    return max(path.name for path in (folder / "versions").glob("[0-9]*_*.py"))[:4]


def upgrade(path: Path, engine: Engine) -> None:
    """Raises StartError: full disk, a newer database, not a database."""
    try:
        with engine.connect() as connection:
            current = _current(connection)
            connection.rollback()
            target = newest(scripts())
            if current == target:
                return
            if current is not None:
                if not any((scripts() / "versions").glob(f"{current}_*.py")):
                    raise StartError(
                        f"the database {path} is of another version of xmigd: this one does not know its revision "
                        f"{current}",
                        hint="install the version that wrote it, put the backup that this version has left beside it "
                        f"in its place ({path.with_suffix('.REVISION.bak')}), or start with another XMIG_DATABASE",
                    )
                backup = path.with_suffix(f".{current}.bak")
                _back_up(path, backup)
            logger.info("upgrading the database", path=str(path), source=current, target=target)
            to_revision(connection, "head")
    except DatabaseError as error:
        raise unusable(path, error) from None


async def upgrade_apart(path: Path, begins: Callable[[], None]) -> None:
    """`upgrade` in a process of its own: what it needs of memory goes with it. For a daemon that has no threads yet.
    `begins` is called if there is something to do. Raises StartError."""
    engine = make_engine(path)
    try:
        with engine.connect() as connection:
            driver = connection.connection.driver_connection
            assert driver is not None
            check(path, driver)
            current = _current(connection)
            connection.rollback()
            if current == newest(scripts()):
                return
    except DatabaseError as error:
        raise unusable(path, error) from None
    finally:
        engine.dispose()
    begins()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            upgrade(path, make_engine(path, writer=True))
            status = 0
        except StartError as error:
            os.write(writing, json.dumps([error.message, error.hint]).encode())
        except BaseException as error:
            os.write(writing, json.dumps([f"the database cannot be upgraded: {error!r}", ""])[:4000].encode())
        finally:
            os._exit(status)
    os.close(writing)
    why, ended = await asyncio.to_thread(_end_of, child, reading)
    if why:
        message, hint = json.loads(why)
        raise StartError(message, hint=hint)
    if ended != 0:
        raise StartError("the database's upgrade was interrupted", hint="start xmigd again: it begins anew")


def _end_of(child: int, reading: int) -> tuple[bytes, int]:
    with open(reading, "rb") as reported:
        why = reported.read()
    return why, os.waitpid(child, 0)[1]


def _current(connection: Connection) -> str | None:
    if not inspect(connection).has_table("alembic_version"):
        return None
    found: str | None = connection.exec_driver_sql("select version_num from alembic_version").scalar()
    return found


def to_revision(connection: Connection, revision: str, *, down: bool = False) -> None:
    """In one transaction: a daemon that dies in the middle leaves the database as it was."""
    from alembic import command

    # A table that is changed is made again, and dropping the old one would take along what refers to it. SQLite lets
    # that be switched off outside of transactions only.
    pragma = connection.connection.driver_connection
    assert pragma is not None
    pragma.execute("PRAGMA foreign_keys=OFF")
    try:
        with connection.begin():
            (command.downgrade if down else command.upgrade)(alembic_config(connection), revision)
            wrong = connection.exec_driver_sql("PRAGMA foreign_key_check").first()
            if wrong is not None:
                raise StartError(f"the database's upgrade would leave {wrong[0]} with rows that belong to nothing")
    finally:
        pragma.execute("PRAGMA foreign_keys=ON")


def _back_up(path: Path, backup: Path) -> None:
    source = create_engine(f"sqlite:///{path}")
    try:
        with source.connect() as connection:
            temporary = backup.with_suffix(".part")
            temporary.unlink(missing_ok=True)
            os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
            connection.exec_driver_sql("VACUUM INTO ?", (str(temporary),))
            shutil.move(temporary, backup)
    finally:
        source.dispose()
    logger.info("backed up the database", path=str(backup))
