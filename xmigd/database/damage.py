"""A database that cannot be used: which file it is, what is wrong with it, and what to do."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from sqlalchemy.exc import DatabaseError

from xmigd.errors import StartError

LARGEST_CHECKED = 64 << 20  # bytes; a larger one is read when something is wanted of it, and not at each start
# sqlite3.h: what is no want of room or of rights.
DAMAGED = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT})
NOT_WRITABLE = frozenset({sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_AUTH})
LOST = (
    "what is lost with it: the history of jobs, faults and moves, tokens, changed policies, the audit; programs that "
    "run go on"
)


def unusable(path: Path, error: DatabaseError) -> StartError:
    """What to say of an error that the database made."""
    why = str(error.orig)
    code = getattr(error.orig, "sqlite_errorcode", 0) & 0xFF
    if code in DAMAGED or (not code and "malformed" in why):
        return damaged(path, why)
    if code in NOT_WRITABLE:
        return StartError(
            f"the database {path} cannot be written: {why}",
            hint="let xmigd's user write the file and its folder, on a disk that is mounted for writing, or choose "
            "another file with XMIG_DATABASE",
        )
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return StartError(f"the database {path} is in use: {why}", hint="end whatever has it open, then start again")
    return StartError(
        f"the database {path} cannot be written: {why}",
        hint="make room on its disk, or choose another file with XMIG_DATABASE",
    )


def damaged(path: Path, why: str) -> StartError:
    backups = sorted(path.parent.glob(f"{path.stem}.*.bak"), key=lambda each: each.stat().st_mtime)
    restore = f"put a backup in its place (there is {backups[-1]}), or " if backups else ""
    return StartError(
        f"the database {path} is damaged, or none of xmigd's: {why}",
        hint=f"{restore}move it away with its -wal and -shm files (mv {path} {path}.damaged), and xmigd begins a new "
        f"one; {LOST}",
    )


def check(path: Path, connection: sqlite3.Connection) -> None:
    """Raises StartError: a page is not what it should be. A daemon that found that out later would lose what it has to
    record."""
    if path.stat().st_size > LARGEST_CHECKED:
        return
    found = connection.execute("PRAGMA quick_check(1)").fetchone()
    if found is not None and found[0] != "ok":
        raise damaged(path, " ".join(str(found[0]).split()))
