"""Alembic's entry. The daemon runs it with its own connection at start; by hand: `alembic -x database=FILE ...`."""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection, create_engine

from xmigd.database.models import Base


def migrate(connection: Connection) -> None:
    context.configure(connection=connection, target_metadata=Base.metadata, render_as_batch=True)
    with context.begin_transaction():
        context.run_migrations()


given = context.config.attributes.get("connection")
if given is not None:
    migrate(given)
else:
    with create_engine(f"sqlite:///{context.get_x_argument(as_dictionary=True)['database']}").begin() as own:
        migrate(own)
