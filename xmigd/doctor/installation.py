"""xMIG's own parts: native programs, directories, database, daemon; do their versions agree?"""

from __future__ import annotations

import socket
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from alembic.script import ScriptDirectory

from xmigd import __version__
from xmigd import native as native_programs
from xmigd.client import Client, NoDaemon
from xmigd.database.migrate import alembic_config
from xmigd.doctor.system import Finding, State, System
from xmigd.errors import XmigError
from xmigd.settings import Settings

ROOM, LITTLE_ROOM = 1 << 30, 64 << 20  # bytes on the disk of the database


def native(system: System, settings: Settings) -> Iterator[Finding]:
    """The server runs and shares its layout with this daemon; the shims are beside it."""
    try:
        folder = native_programs.find_native_dir(settings.native_dir)
        layout = native_programs.read_layout(folder)
        shims = native_programs.find_shims(folder)
    except XmigError as error:
        yield Finding("native part", "failing", error.message, error.hint)
        return
    if missing := [shim.name for shim in shims if not shim.is_file()]:
        yield Finding("native part", "failing", f"{', '.join(missing)} is not in {shims[0].parent}",
                      "install it again (make build)")  # fmt: skip
        return
    closed = [path for path in (folder / native_programs.SERVER, *shims) if not path.stat().st_mode & stat.S_IROTH]
    if closed and system.uid() == 0:
        yield Finding("native part", "warning", f"other users may not read {closed[0]}: their programs do not start",
                      f"chmod o+rX {closed[0]} and the folders above")  # fmt: skip
        return
    yield Finding("native part", "ok", f"{folder}, layout {layout.layout_version}")


def runtime_directory(system: System, settings: Settings) -> Iterator[Finding]:
    """Sockets that nobody else can put in place of ours."""
    folder = settings.runtime_dir
    try:
        about = folder.stat()
    except FileNotFoundError:
        yield Finding("sockets", "note", f"{folder} is not there yet", "xmigd makes it")
        return
    except OSError as error:
        yield Finding("sockets", "failing", f"{folder}: {error.strerror}", "let the daemon's users pass through it")
        return
    if about.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not about.st_mode & stat.S_ISVTX:
        yield Finding("sockets", "failing", f"others may write in {folder}, and put their sockets in place of xmigd's",
                      f"chmod go-w {folder}")  # fmt: skip
    elif about.st_uid not in (0, system.uid()):
        yield Finding("sockets", "warning", f"{folder} belongs to user {about.st_uid}",
                      "set XMIG_RUNTIME_DIR to the folder of the daemon that is meant")  # fmt: skip
    else:
        yield Finding("sockets", "ok", str(folder))


def database(system: System, settings: Settings) -> Iterator[Finding]:
    """For the daemon's user alone, whole, and of this version."""
    path = settings.database
    try:
        about, above = path.stat(), path.parent.stat()
    except FileNotFoundError:
        yield Finding("database", "note", f"{path} is not there yet", "xmigd makes it")
        return
    except PermissionError:
        yield Finding("database", "note", f"user {system.uid()} may not look at {path}",
                      "run xmigctl doctor as the daemon's user")  # fmt: skip
        return
    if about.st_mode & 0o077 and above.st_mode & 0o077:
        yield Finding("database", "warning", f"others may read {path}: commands and tokens' hashes are in it",
                      f"chmod 600 {path}; chmod 700 {path.parent}")  # fmt: skip
    yield _inside(path)


def _inside(path: Path) -> Finding:
    try:
        connection = sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, timeout=5)
        try:
            reported = str(connection.execute("PRAGMA quick_check(1)").fetchone()[0])
            rows = connection.execute("SELECT version_num FROM alembic_version").fetchall()
        finally:
            connection.close()
    except sqlite3.OperationalError as error:
        if "unable to open" in str(error):
            return Finding("database", "note", f"{path} cannot be opened: {error}",
                           "run xmigctl doctor as the daemon's user")  # fmt: skip
        return Finding("database", "failing", f"{path}: {error}", "see the hints of `xmigd` as it starts")
    except sqlite3.DatabaseError as error:
        return Finding("database", "failing", f"{path} is damaged: {error}", _BACKUP)
    if reported != "ok":
        return Finding("database", "failing", f"{path} is damaged: {reported}", _BACKUP)
    revision = rows[0][0] if rows else None
    scripts = ScriptDirectory.from_config(alembic_config())
    if revision == scripts.get_current_head():
        return Finding("database", "ok", f"{path}, revision {revision}")
    if revision in {script.revision for script in scripts.walk_revisions()}:
        return Finding("database", "note", f"{path} is of an older version (revision {revision})",
                       "xmigd upgrades it as it starts, and keeps a copy")  # fmt: skip
    return Finding("database", "failing", f"{path} is of a newer version (revision {revision})",
                   "install the version of xMIG that wrote it, or choose another XMIG_DATABASE")  # fmt: skip


_BACKUP = "stop xmigd, put a backup in its place (docs/operations.md), start it again"


def disk(system: System, settings: Settings) -> Iterator[Finding]:
    """What is acknowledged has to be written; a full disk refuses new work."""
    free = system.free_bytes(settings.database.parent)
    place = settings.database.parent
    if free is None:
        yield Finding("disk", "warning", f"the room at {place} is not known", f"mount the file system of {place}")
    elif free < ROOM:
        state: State = "failing" if free < LITTLE_ROOM else "warning"
        yield Finding("disk", state, f"{free >> 20} MiB free at {place}",
                      "make room: without it xmigd refuses new work (jobs that run go on)")  # fmt: skip
    else:
        yield Finding("disk", "ok", f"{free / (1 << 30):.1f} GiB free at {place}")


def daemon(system: System, settings: Settings) -> Iterator[Finding]:
    """It answers, is ready, and is of this version."""
    if not settings.api_socket.exists():
        yield Finding("daemon", "warning", f"no xmigd runs at {settings.runtime_dir}", "systemctl start xmigd")
        return
    with socket.socket(socket.AF_UNIX) as probe:
        if probe.connect_ex(str(settings.api_socket)) != 0:
            yield Finding("daemon", "failing", f"nobody listens at {settings.api_socket}: xmigd has ended",
                          "systemctl start xmigd; its log says why: journalctl -u xmigd")  # fmt: skip
            return
    client = Client(settings, timeout=10)
    try:
        node: dict[str, Any] = client.get("/v1/node")
        client.get("/readyz")
    except NoDaemon as error:
        yield Finding("daemon", "failing", error.message, "see its log: journalctl -u xmigd")
        return
    except XmigError as error:
        yield Finding("daemon", "failing", f"it is not ready: {error.message}", error.hint or "see its log")
        return
    finally:
        client.close()
    if node["version"] != __version__:
        yield Finding("daemon", "warning", f"xmigd is {node['version']}, xmigctl {__version__}",
                      "restart xmigd: jobs go on meanwhile")  # fmt: skip
    else:
        yield Finding("daemon", "ok", f"xmigd {node['version']}, pid {node['pid']}, {node['processes']} programs")
