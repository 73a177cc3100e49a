"""Reading the database, with all that has happened until then."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from xmigd.database.writer import Writer


class Reader:
    def __init__(self, writer: Writer, engine: Engine) -> None:
        self._writer = writer
        self._engine = engine

    @contextmanager
    def session(self) -> Iterator[Session]:
        """It may wait for a write: not for the loop's thread."""
        self._writer.catch_up()
        with Session(self._engine) as session:
            yield session
