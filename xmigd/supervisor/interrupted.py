"""A recovery in whose middle the daemon has ended: the next one writes down what it knows of it.

The database may have its record, begun; or that the process was being recovered, and no record; or neither, for what is
written goes to the disk behind what happens. Then the process has another server than the database says.
"""

from __future__ import annotations

from xmigd.process.events import RecoveryRecord
from xmigd.records import LiveProcess
from xmigd.supervisor.state import now


def interrupted(live: LiveProcess, server: int | None) -> RecoveryRecord | None:
    """What was written of it, or what can be found out. `server`: the pid of the one that has the process; None: it has
    none. None: no recovery was interrupted."""
    if live.recovery is not None:
        return live.recovery
    recorded = live.server_pid is not None and live.migration is None and live.state in ("running", "recovering")
    replaced = recorded and server is not None and server != live.server_pid
    if live.state != "recovering" and not replaced:
        return None
    cause = live.why if live.state == "recovering" else "its server was replaced, and nothing was written of that yet"
    found = now()
    return RecoveryRecord(
        number=live.recoveries + 1, cause=cause, fault=None, occurred=found, detected=found, story=[cause]
    )  # fmt: skip
