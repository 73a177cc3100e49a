"""What is old goes, what is going on stays."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard
from sqlalchemy import Engine, func, insert, select
from sqlalchemy.exc import DatabaseError
from sqlalchemy.orm import Session

from xmigd.database import migrate
from xmigd.database.engine import make_engine, prepare_folder
from xmigd.database.models import Base, Fault, Job, Migration, Operation, Process, Recovery
from xmigd.database.writer import Writer
from xmigd.recording import retention
from xmigd.settings import Settings

NOW = time.time()
OLD = NOW - 100 * retention.DAY
YOUNG = NOW - retention.DAY


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(database=tmp_path / "xmig.db", history_days=90, history_records=100, audit_records=1000)


@pytest.fixture
def engine(settings: Settings) -> Iterator[Engine]:
    prepare_folder(settings.database)
    engine = make_engine(settings.database, writer=True)
    migrate.upgrade(settings.database, engine)
    yield engine
    engine.dispose()


def needed(model: type[Base], **values: Any) -> dict[str, Any]:
    """A row: what is not given and may not be null gets the plainest value."""
    row = dict(values)
    for column in model.__table__.columns:
        if column.name not in row and not column.nullable and not column.primary_key:
            kind = column.type.python_type
            row[column.name] = kind() if kind in (str, int, float, bool, dict, list) else None
    return row


def add(session: Session, model: type[Base], **values: Any) -> None:
    session.execute(insert(model).values(**needed(model, **values)))


def job(session: Session, name: str, at: float, state: str | None) -> None:
    add(session, Job, id=name, created_at=at)
    if state is not None:
        ended = at if state in retention.FINAL else None
        add(session, Process, id=f"p-{name}", job_id=name, state=state, started_at=at, ended_at=ended)


def tidy(engine: Engine, settings: Settings) -> dict[str, int]:
    writer = Writer(engine)
    try:
        return asyncio.run(retention.tidy(writer, settings, NOW))
    finally:
        writer.close()


def ids(session: Session, column: Any) -> set[Any]:
    return set(session.scalars(select(column)))


def test_by_age(engine: Engine, settings: Settings) -> None:
    with Session(engine) as session, session.begin():
        for name, at, state in (
            ("old", OLD, "ended"), ("lost", OLD, "lost"), ("young", YOUNG, "ended"), ("lives", OLD, "running"),
            ("forgotten", OLD, None), ("new", YOUNG, None),
        ):  # fmt: skip
            job(session, name, at, state)
        for process in ("p-old", "p-young", "p-lives"):
            for number in range(3):
                at = OLD if number < 2 else YOUNG
                add(session, Fault, process_id=process, number=number, at=at)
                add(session, Recovery, process_id=process, number=number, at=at)
        for number, (state, ended) in enumerate((("succeeded", OLD), ("failed", YOUNG), ("running", None))):
            add(session, Operation, id=f"o{number}", state=state, created_at=OLD, ended_at=ended)
            add(session, Migration, id=f"m{number}", process_id="p-lives", started_at=OLD, ended_at=ended)
    removed = tidy(engine, settings)
    assert removed == {"recoveries": 4, "faults": 4, "migrations": 1, "operations": 1, "jobs": 3}
    with Session(engine) as session:
        assert ids(session, Job.id) == {"young", "lives", "new"}
        assert ids(session, Process.id) == {"p-young", "p-lives"}
        assert ids(session, Operation.id) == {"o1", "o2"}
        assert ids(session, Migration.id) == {"m1", "m2"}
        # A process that lives keeps its history: the numbers of faults and recoveries go on from there.
        kept = select(func.count()).select_from(Fault).where(Fault.process_id == "p-lives")
        assert session.scalar(kept) == 3
    assert tidy(engine, settings) == {}


def test_by_number(engine: Engine, settings: Settings) -> None:
    with Session(engine) as session, session.begin():
        job(session, "lives", YOUNG, "running")
        for number in range(1300):
            add(session, Operation, id=f"o{number}", state="succeeded", created_at=YOUNG, ended_at=YOUNG)
        add(session, Operation, id="first", number=0, state="running", created_at=YOUNG)
        for number in range(130):
            job(session, f"j{number}", YOUNG + number, "ended")
    assert tidy(engine, settings) == {"operations": 1201, "jobs": 31}
    with Session(engine) as session:
        assert ids(session, Operation.id) == {f"o{number}" for number in range(1201, 1300)} | {"first"}
        assert ids(session, Job.id) == {f"j{number}" for number in range(31, 130)} | {"lives"}


def test_the_audit_goes_into_files(engine: Engine, settings: Settings, tmp_path: Path) -> None:
    audit = Base.metadata.tables["audit"]
    model = next(m.class_ for m in Base.registry.mappers if m.local_table is audit)
    with Session(engine) as session, session.begin():
        for number in range(700):
            add(session, model, action=f"action {number}", at=NOW - 400 * retention.DAY)
        add(session, model, action="young", at=YOUNG)
    assert tidy(engine, settings) == {"audit": 700}
    with Session(engine) as session:
        assert ids(session, audit.c.action) == {"young"}
        with pytest.raises(DatabaseError):
            session.execute(audit.delete())
    files = sorted(tmp_path.glob("audit-*.jsonl.zst"), key=lambda path: int(path.name.split("-")[1]))
    lines = b"".join(zstandard.decompress(path.read_bytes()) for path in files).decode().splitlines()
    assert len(files) == 2
    assert all(path.stat().st_mode & 0o077 == 0 for path in files)
    assert [f"action {number}" in line for number, line in enumerate(lines)] == [True] * 700
