"""The database: schema, the writer's promises, records."""

from __future__ import annotations

import json
import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Engine, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from xmigd.database import migrate
from xmigd.database.engine import make_engine
from xmigd.database.models import Base, Job
from xmigd.database.writer import Writer
from xmigd.devices.repository import configure as configure_devices
from xmigd.devices.repository import listed
from xmigd.errors import StartError, Unavailable
from xmigd.faults import repository as faults
from xmigd.ipc.messages import Snapshot
from xmigd.jobs import repository as jobs
from xmigd.jobs.repository import job_model
from xmigd.process.events import FaultRecord, RecoveryRecord
from xmigd.processes import repository as processes
from xmigd.processes.repository import live_ones
from xmigd.recording.database import DatabaseRecords
from xmigd.records import JobRow, ProcessRow

JOB = JobRow(id="j", name="n", command="c", uid=0, device=None, registered=True, token_hash="h")
PROCESS = ProcessRow(id="p", job="j", pid=5, start_time=7, uid=0, gid=0, command="c", device="cpu:0")


def test_the_migrations_make_the_models(engine: Engine) -> None:
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []


def test_the_migrations_can_be_undone(path: Path, engine: Engine) -> None:
    from alembic import command

    with engine.begin() as connection:
        command.downgrade(migrate.alembic_config(connection), "base")
    with engine.connect() as connection:
        tables = connection.execute(text("select name from sqlite_master where type='table'")).scalars().all()
        assert set(tables) <= {"alembic_version", "sqlite_sequence"}
    migrate.upgrade(path, engine)


def test_an_operators_budget_for_snapshots_keeps_its_meaning(path: Path, engine: Engine) -> None:
    from alembic import command

    def settings() -> list[str]:
        with engine.connect() as connection:
            return list(connection.execute(text("select settings from policies order by name")).scalars())

    with engine.begin() as connection:
        command.downgrade(migrate.alembic_config(connection), "0009")
        connection.execute(text(
            "insert into policies (name, version, settings, updated_at, updated_by) values "
            "('recovery', 1, '{\"cut_budget\": 0.02, \"max_attempts\": 3}', 0, 'me'), ('retention', 1, '{}', 0, 'me')"
        ))  # fmt: skip
    migrate.upgrade(path, engine)
    assert [json.loads(each) for each in settings()] == [{"snapshot_cost": 0.02, "max_attempts": 3}, {}]
    with engine.begin() as connection:
        command.downgrade(migrate.alembic_config(connection), "0009")
    assert json.loads(settings()[0]) == {"cut_budget": 0.02, "max_attempts": 3}
    migrate.upgrade(path, engine)


def test_events_of_recoveries_get_the_new_words(path: Path, engine: Engine) -> None:
    """Who asks for earlier events gets all of them in the same words."""
    from alembic import command

    def data() -> Any:
        with engine.connect() as connection:
            return json.loads(connection.execute(text("select data from events where type = 'recovery'")).scalar_one())

    with engine.begin() as connection:
        command.downgrade(migrate.alembic_config(connection), "0012")
        connection.execute(text(
            "insert into events (at, type, subject_type, subject_id, data) values "
            "(1, 'recovery', 'process', 'p', '{\"outcome\": \"resumed\", \"redone_ms\": 12.5}')"
        ))  # fmt: skip
    migrate.upgrade(path, engine)
    assert data() == {"outcome": "resumed", "replayed_ms": 12.5}
    with engine.begin() as connection:
        command.downgrade(migrate.alembic_config(connection), "0012")
    assert data() == {"outcome": "resumed", "redone_ms": 12.5}
    migrate.upgrade(path, engine)


def test_pragmas(engine: Engine, reading: Engine) -> None:
    for each in (engine, reading):
        with each.connect() as connection:
            for name, value in (("journal_mode", "wal"), ("foreign_keys", 1), ("synchronous", 2)):
                assert connection.exec_driver_sql(f"pragma {name}").scalar() == value
    with reading.connect() as connection, pytest.raises(OperationalError):
        connection.execute(text("delete from jobs"))


def test_the_file_is_private(path: Path, engine: Engine) -> None:
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_newer_database_is_refused(path: Path, engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("update alembic_version set version_num = '9999'"))
    with pytest.raises(StartError, match="another version"):
        migrate.upgrade(path, engine)


def test_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    path.write_bytes(b"this is a text file, not a database, and long enough to be taken for one" * 20)
    engine = make_engine(path, writer=True)
    with pytest.raises(StartError, match="not a database"):
        migrate.upgrade(path, engine)
    engine.dispose()


def test_records(engine: Engine, reading: Engine) -> None:
    writer = Writer(engine)
    records = DatabaseRecords(writer)
    records.job_made(JOB)
    records.process_started(PROCESS)
    records.process_state("p", "running", "ready")
    records.server_assigned("p", 9, 11, 1)
    snapshot: dict[str, Any] = dict.fromkeys(Snapshot.model_fields, 1) | {
        "type": "snapshot",
        "reason": "budget",
        "off_device": False,
    }
    for number in range(1, 1301):
        records.snapshot("p", Snapshot(**snapshot | {"number": number}))
    records.snapshot("p", Snapshot(**snapshot | {"number": 1300}))  # taken again after a recovery
    records.fault("p", FaultRecord(number=1, kind="server", t=1, text="x"))
    recovery = RecoveryRecord(number=1, cause="x", fault=1, occurred=1_000_000, detected=2_000_000, story=["x", "y"])
    records.recovery("p", recovery)
    recovery.resumed, recovery.outcome, recovery.differing, recovery.compared = 51_000_000, "resumed", 1, 5
    records.recovery("p", recovery)
    configure = writer.submit("devices.configure", lambda s: configure_devices(s, ["cpu:0", "cpu:1"], 0))
    configure.result(60)
    writer.submit("devices.configure", lambda s: configure_devices(s, ["cpu:1"], 5)).result(60)
    with Session(reading) as session:
        live = live_ones(session)
        assert [(p.row, p.job, p.server_pid, p.faults, p.recoveries) for p in live] == [(PROCESS, JOB, 9, 1, 1)]
        assert [s.number for s in processes.segments(session, "p", 2000)] == list(range(1300, 300, -1))
        found = faults.recoveries(session, job_id="j", process_id=None, before=None, limit=5)
        assert len(found) == 1
        assert (found[0]["detected_ms"], found[0]["resumed_ms"], found[0]["exact"]) == (1.0, 50.0, False)
        assert found[0]["story"] == ["x", "y"]
        assert jobs.page(session, jobs.Conditions())[0] | {"created_at": 0} == {
            "id": "j", "name": "n", "command": "c", "uid": 0, "user": "root", "device": None, "devices": ["cpu:0"],
                "registered": True,
                "hang_timeout": None, "replica_policy": None, "created_at": 0,
            "state": "running", "processes": 1, "faults": 1, "recoveries": 1, "suspended": 0, "ended_at": None,
            "duration_s": None, "exit_code": None, "exit_signal": None, "strict": False, "nodes": [], "unprotected": 0,
            "labels": {}, "external_id": None, "restored_from": None, "version": 1,
            "priority": "normal", "reserved_bytes": None, "memory_quota": None, "sm_share": None,
            "walltime_s": None,
        }  # fmt: skip
        assert [(d.id, d.configured) for d in listed(session)] == [("cpu:0", False), ("cpu:1", True)]
    records.process_state("p", "lost", "why it was lost")
    records.process_state("p", "ended", "the program has exited")
    writer.close()
    with Session(reading) as session:
        process = processes.page(session)[0]
        assert (process["state"], process["why"]) == ("lost", "why it was lost")
        assert live_ones(session) == []


def full(session: Session) -> None:
    raise OperationalError("insert", {}, sqlite3.OperationalError("database or disk is full"))


def test_a_full_disk_loses_no_record_and_fails_requests(engine: Engine, reading: Engine) -> None:
    writer = Writer(engine)
    records = DatabaseRecords(writer)
    is_full = threading.Event()
    is_full.set()
    writer.record("devices.configure", lambda session: full(session) if is_full.is_set() else None)
    records.job_made(JOB)
    records.process_started(PROCESS)
    with pytest.raises(Unavailable, match="disk of the database is full") as refused:
        writer.submit("devices.configure", full).result(60)
    assert refused.value.code == "disk_full"
    assert writer.failure == "database or disk is full"
    is_full.clear()
    writer.submit("devices.configure", lambda session: None).result(60)
    assert writer.failure is None
    with Session(reading) as session:
        assert session.get(Job, "j") is not None
        assert len(live_ones(session)) == 1
    writer.close()


def test_a_restart_forgets_no_size_of_a_device(engine: Engine) -> None:
    """Otherwise a device whose programs have been seen would have no room after it."""
    with Session(engine) as session:
        configure_devices(session, ["cpu:0"], 0)
        (device,) = listed(session)
        device.uuid, device.memory_bytes = "u", 1 << 30
        session.flush()
        configure_devices(session, ["cpu:0"], 0)
        session.flush()
        session.expire_all()
        assert [one.memory_bytes for one in listed(session)] == [1 << 30]
        configure_devices(session, ["cpu:0"], 1 << 20)  # a setting
        session.flush()
        session.expire_all()
        assert [one.memory_bytes for one in listed(session)] == [1 << 20]


def test_who_reads_waits_for_what_has_happened(
    engine: Engine, reading: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xmigd.database.writer.READERS_PATIENCE", 60.0)
    writer = Writer(engine)
    records = DatabaseRecords(writer)
    begun, go = threading.Event(), threading.Event()

    def slow(session: Session) -> None:
        begun.set()
        assert go.wait(60)

    writer.record("devices.configure", slow)
    assert begun.wait(60)
    records.job_made(JOB)  # not in the slow one's transaction
    before = writer.version
    threading.Timer(0.05, go.set).start()
    writer.catch_up()
    assert go.is_set()
    with Session(reading) as session:
        assert session.get(Job, "j") is not None
    assert writer.version != before
    writer.close()


def test_who_reads_does_not_wait_for_a_full_disk(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xmigd.database.writer.READERS_PATIENCE", 60.0)
    writer = Writer(engine)
    is_full = threading.Event()
    is_full.set()
    for _ in range(3):
        writer.record("devices.configure", lambda session: full(session) if is_full.is_set() else None)
        reader = threading.Thread(target=writer.catch_up)
        reader.start()
        reader.join(30)
        assert not reader.is_alive()
    is_full.clear()
    writer.close()


def test_a_record_that_can_never_be_written_holds_up_no_other(engine: Engine, reading: Engine) -> None:
    writer = Writer(engine)
    records = DatabaseRecords(writer)
    records.fault("nobody", FaultRecord(number=1, kind="server", t=1, text="x"))  # no such process
    model = job_model(JOB)
    writer.record("devices.configure", lambda session: session.merge(model))
    writer.submit("devices.configure", lambda session: None).result(60)
    with Session(reading) as session:
        assert session.get(Job, "j") is not None
    with pytest.raises(ZeroDivisionError):
        writer.submit("devices.configure", lambda session: 1 // 0).result(60)
    writer.close()
