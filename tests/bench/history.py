"""A long history, written into a database that no daemon uses: what a node looks like after a year."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

JOBS = 200
PHASES = ("planned", "prepared", "copying", "handed_over", "switched", "done")


def write(database: Path, records: int) -> dict[str, str]:
    """`records` migrations, operations, recoveries, faults and events of JOBS jobs. Returns ids for path parameters."""
    now = time.time()
    jobs = [f"{number:032x}" for number in range(1, JOBS + 1)]
    processes = [f"{number:032x}" for number in range(1 << 20, (1 << 20) + JOBS)]
    with sqlite3.connect(database) as connection:
        _insert(connection, "jobs", (
            {"id": job, "name": f"job {n}", "command": "python train.py", "uid": 0, "registered": 1, "stopped": 0,
             "created_at": now - 3600 * n}
            for n, job in enumerate(jobs)
        ))  # fmt: skip
        _insert(connection, "processes", (
            {"id": process, "job_id": jobs[n], "pid": 1 << 22, "start_time": 1, "uid": 0, "gid": 0,
             "command": "python train.py", "device": f"cpu:{n % 8}", "state": "ended", "why": "the program has exited",
             "generation": 1, "started_at": now - 3600 * n, "ended_at": now - 3600 * n + 60}
            for n, process in enumerate(processes)
        ))  # fmt: skip
        numbers = range(records)
        _insert(connection, "faults", (
            {"process_id": processes[n % JOBS], "number": n // JOBS + 1, "kind": "server",
             "text": "the server was lost", "at": now - n}
            for n in numbers
        ))  # fmt: skip
        _insert(connection, "recoveries", (
            {"process_id": processes[n % JOBS], "number": n // JOBS + 1, "cause": "the server was lost",
             "fault": n // JOBS + 1, "outcome": "resumed", "attempts": 1, "standby": "warm", "snapshot": 5,
             "detected_ms": 1.0, "resumed_ms": 60.0, "records": 100, "compared": 10, "differing": 0,
             "story": "a line\nand another", "at": now - n}
            for n in numbers
        ))  # fmt: skip
        _insert(connection, "operations", (
            {"id": f"{n:032x}", "kind": "migration", "state": "succeeded", "phase": "done", "subject_type": "process",
             "subject_id": processes[n % JOBS], "job_id": jobs[n % JOBS], "owner": 0, "requestor": "user 0",
             "request": "{}", "created_at": now - n, "started_at": now - n, "ended_at": now - n + 1, "may_cancel": 0,
             "may_cancel_why": "it is over", "result": json.dumps({"downtime_ms": 50})}
            for n in numbers
        ))  # fmt: skip
        _insert(connection, "migrations", (
            {"id": f"{n:032x}", "operation_id": f"{n:032x}", "process_id": processes[n % JOBS], "kind": "move",
             "engine": "proxy", "source": "cpu:0", "target": "cpu:1", "state": "done", "phase": "done",
             "phases": json.dumps([{"name": p, "at": now - n, "ms": 10.0} for p in PHASES]),
             "iterations": json.dumps([{"n": i, "copied_bytes": 1 << 30, "dirty_bytes": 1 << 20, "ms": 5.0}
                                       for i in range(5)]),
             "total_bytes": 1 << 30, "processed_bytes": 1 << 30, "downtime_ms": 50.0, "setup_ms": 100.0,
             "process_location": "target", "started_at": now - n, "ended_at": now - n + 1}
            for n in numbers
        ))  # fmt: skip
        _insert(connection, "events", (
            {"type": "operation.ended", "subject_type": "operation", "subject_id": f"{n:032x}",
             "job_id": jobs[n % JOBS], "owner": 0, "at": now - n, "data": "{}"}
            for n in numbers
        ))  # fmt: skip
        _insert(connection, "journal_segments", (
            {"process_id": processes[0], "number": n, "position": n * 1000, "sequence": n * 10, "journal_bytes": 1000,
             "live_bytes": 1 << 30, "copied_bytes": 1 << 20, "chunks": 512, "objects": 20, "ms": 1.5, "reason": "time",
             "at": now - records + n}
            for n in range(1, 1001)
        ))  # fmt: skip
    connection.close()
    return {
        "job": jobs[0], "process": processes[0], "operation": f"{0:032x}", "migration": f"{0:032x}", "device": "cpu:0",
        "fault": "1", "recovery": "1",
    }  # fmt: skip


def pages(known: dict[str, str]) -> list[str]:
    """The dashboard's."""
    return [
        "/", "/devices", "/jobs", f"/jobs/{known['job']}", f"/processes/{known['process']}", "/migrations",
        f"/migrations/{known['migration']}", "/faults", "/operations", f"/operations/{known['operation']}", "/audit",
    ]  # fmt: skip


def _insert(connection: sqlite3.Connection, table: str, rows: Iterable[dict[str, Any]]) -> None:
    """What a row does not name, and may not be null, gets the column's plainest value."""
    about = connection.execute(f"pragma table_info({table})").fetchall()
    needed = {
        name: "" if "CHAR" in type or "TEXT" in type else 0
        for _, name, type, not_null, default, key in about
        if not_null and default is None and not key
    }
    for row in rows:
        full = needed | row
        names, marks = ",".join(full), ",".join("?" * len(full))
        connection.execute(f"insert into {table} ({names}) values ({marks})", tuple(full.values()))
