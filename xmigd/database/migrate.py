"""Bring the database to this version's schema, at start."""

from __future__ import annotations

import shutil
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util.exc import CommandError
from sqlalchemy import Connection, Engine, create_engine
from sqlalchemy.exc import DatabaseError, OperationalError

from xmigd import log
from xmigd.errors import StartError

logger = log.get("database")


def scripts() -> Path:
    """The folder `migrations`: in the source tree beside the package, installed inside of it."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "migrations", package.parent / "migrations"):
        if (folder / "env.py").exists():
            return folder
    raise StartError("the database's migrations are missing", hint="install xmigd again")


def alembic_config(connection: Connection | None = None) -> Config:
    config = Config()
    config.set_main_option("script_location", str(scripts()))
    config.attributes["connection"] = connection
    return config


def upgrade(path: Path, engine: Engine) -> None:
    """Raises StartError: full disk, a newer database, not a database."""
    try:
        with engine.connect() as connection:
            current = MigrationContext.configure(connection).get_current_revision()
            connection.rollback()
            newest = ScriptDirectory.from_config(alembic_config()).get_current_head()
            if current == newest:
                return
            if current is not None:
                backup = path.with_suffix(f".{current}.bak")
                _back_up(path, backup)
            logger.info("upgrading the database", path=str(path), source=current, target=newest)
            with connection.begin():
                command.upgrade(alembic_config(connection), "head")
    except CommandError as error:
        raise StartError(
            f"the database {path} is of another version of xmigd: {error}",
            hint="install the version that wrote it, or start with another XMIG_DATABASE",
        ) from None
    except OperationalError as error:
        raise StartError(
            f"the database {path} cannot be written: {error.orig}",
            hint="make room on its disk, or choose another file with XMIG_DATABASE",
        ) from None
    except DatabaseError as error:
        raise StartError(f"{path} is not a database: {error.orig}", hint="choose another XMIG_DATABASE") from None


def _back_up(path: Path, backup: Path) -> None:
    source = create_engine(f"sqlite:///{path}")
    try:
        with source.connect() as connection:
            temporary = backup.with_suffix(".part")
            temporary.unlink(missing_ok=True)
            connection.exec_driver_sql("VACUUM INTO ?", (str(temporary),))
            shutil.move(temporary, backup)
    finally:
        source.dispose()
    logger.info("backed up the database", path=str(backup))
