"""How long what happened is remembered: bounded by age and by number, and never what is still going on.

Kept whatever its age: processes that live, with their faults and recoveries (whose numbers go on from there),
operations and migrations under way, jobs that a process may still join. Rows go in small transactions, so nobody waits
for long.

The audit is append-only, and the database refuses to change it. What is too old is written to
`audit-FIRST-LAST.jsonl.zst` beside the database first, and only what is on the disk there leaves the table.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zstandard
from sqlalchemy import ColumnElement, Table, delete, exists, func, select, text
from sqlalchemy.orm import Session

from xmigd import log
from xmigd.database.models import Base, Fault, Finding, Job, LogLine, Migration, Operation, Process, Recovery
from xmigd.database.writer import Writer
from xmigd.errors import Unavailable
from xmigd.settings import Settings
from xmigd.store.objects import write_durably

logger = log.get("retention")

SLICE = 500  # rows of a transaction
DAY = 86400.0
FIRST_AFTER = 60.0  # seconds after the start: first programs and servers find each other
EVERY = 3600.0
FINAL = ("lost", "ended")
ACTIVE = ("pending", "running")

Step = Callable[[Session], int]  # removes at most SLICE rows, returns how many


def steps(settings: Settings, now: float, folder: Path) -> dict[str, Step]:
    """What to do again and again until nothing is left to do, by what it is about."""
    oldest, most = now - settings.history_days * DAY, settings.history_records
    found: dict[str, Step] = {
        "recoveries": _history(Recovery, Recovery.at, oldest, most),
        "faults": _history(Fault, Fault.at, oldest, most),
        "migrations": _numbered(Migration, Migration.ended_at.is_not(None), Migration.ended_at, oldest, most),
        "operations": _numbered(Operation, Operation.state.not_in(ACTIVE), Operation.ended_at, oldest, most),
        "findings": _remove(Finding, Finding.id, [Finding.closed_at.is_not(None)], Finding.closed_at, oldest, most),
        "log_lines": _remove(LogLine, LogLine.id, [], LogLine.at, oldest, most),
        "jobs": lambda session: _jobs(session, oldest, most),
    }
    audit = Base.metadata.tables.get("audit")
    if audit is not None:
        before = now - settings.audit_days * DAY
        found["audit"] = lambda session: rotate_audit(session, audit, before, settings.audit_records, folder)
    return found


def _history(model: type[Recovery] | type[Fault], at: Any, oldest: float, most: int) -> Step:
    """Those of processes that are over."""
    over = exists().where(Process.id == model.process_id, Process.state.in_(FINAL))
    return _remove(model, model.id, [over], at, oldest, most)


def _numbered(model: Any, over: ColumnElement[bool], at: Any, oldest: float, most: int) -> Step:
    return _remove(model, model.number, [over], at, oldest, most)


def _remove(model: Any, key: Any, over: list[ColumnElement[bool]], at: Any, oldest: float, most: int) -> Step:
    def step(session: Session) -> int:
        surplus = (session.scalar(select(func.count()).select_from(model)) or 0) - most
        ids = list(session.scalars(select(key).where(*over, at < oldest).order_by(key).limit(SLICE)))
        if not ids and surplus > 0:
            ids = list(session.scalars(select(key).where(*over).order_by(key).limit(min(SLICE, surplus))))
        if ids:
            session.execute(delete(model).where(key.in_(ids)))
        return len(ids)

    return step


def _jobs(session: Session, oldest: float, most: int) -> int:
    """Jobs with everything that belongs to them. One that has no process yet may still get some."""
    lives = exists().where(Process.job_id == Job.id, Process.state.not_in(FINAL))
    begun = exists().where(Process.job_id == Job.id)
    recent = exists().where(Process.job_id == Job.id, Process.ended_at >= oldest)
    over = (~lives, begun | Job.stopped | Job.ended_at.is_not(None) | (Job.created_at < oldest))
    query = select(Job.id).where(*over, ~recent, Job.created_at < oldest).order_by(Job.created_at).limit(SLICE)
    ids = list(session.scalars(query))
    surplus = (session.scalar(select(func.count()).select_from(Job)) or 0) - most
    if not ids and surplus > 0:
        ids = list(session.scalars(select(Job.id).where(*over).order_by(Job.created_at).limit(min(SLICE, surplus))))
    if ids:
        session.execute(delete(Job).where(Job.id.in_(ids)))
    return len(ids)


def rotate_audit(session: Session, audit: Table, before: float, most: int, folder: Path) -> int:
    """The oldest entries go into a file. Raises OSError: there is no room for it."""
    surplus = (session.scalar(select(func.count()).select_from(audit)) or 0) - most
    query = select(audit).order_by(audit.c.id).limit(SLICE)
    rows = session.execute(query.where(audit.c.at < before)).mappings().all()
    if not rows and surplus > 0:
        rows = session.execute(query.limit(min(SLICE, surplus))).mappings().all()
    if not rows:
        return 0
    first, last = rows[0]["id"], rows[-1]["id"]
    lines = "".join(json.dumps(dict(row), separators=(",", ":")) + "\n" for row in rows)
    write_durably(folder / f"audit-{first}-{last}.jsonl.zst", zstandard.compress(lines.encode()))
    # The triggers that refuse deletion are away for this transaction only: nobody else can write in it.
    triggers = session.execute(
        text("select name, sql from sqlite_master where type = 'trigger' and tbl_name = 'audit'")
    ).all()
    for name, _ in triggers:
        session.execute(text(f'drop trigger "{name}"'))
    session.execute(delete(audit).where(audit.c.id.between(first, last)))
    for _, definition in triggers:
        session.connection().exec_driver_sql(definition)
    return len(rows)


async def keep_tidy(writer: Writer, settings: Settings) -> None:
    """Until it is cancelled."""
    pause = FIRST_AFTER
    while True:
        await asyncio.sleep(pause)
        await tidy(writer, settings, time.time())
        pause = EVERY


async def tidy(writer: Writer, settings: Settings, now: float) -> dict[str, int]:
    """Once. Returns what was removed."""
    removed: dict[str, int] = {}
    for name, step in steps(settings, now, settings.database.parent).items():
        try:
            while count := await writer.write("history.tidy", step, alone=True):
                removed[name] = removed.get(name, 0) + count
        except (Unavailable, OSError) as error:
            logger.warning("the history stays as it is", about=name, why=str(error))
    if removed:
        logger.info("old records are removed", **removed)
    return removed
