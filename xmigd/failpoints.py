"""Places at which a test lets the daemon die as a crash does: at once, with nothing cleaned up.

Each write to the database has a name and two places: `write.begun NAME`, when the transaction is open and nothing is on
the disk, and `write.committed NAME`, when it is on the disk and nobody has been informed. The store and the mirror have
two each between what they write. `XMIG_FAILPOINT` names a file that is read at every place: the daemon kills itself
(SIGKILL) when it comes to the place that the file names. Without it a place is one comparison.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Literal, get_args

# Every write, by what it changes. tests/crash/test_intents.py lets the daemon die at each of them,
# tests/transfers at those of transfers.
Write = Literal[
    "audit.intent", "audit.outcome", "breaker.acted", "breaker.reset", "checkpoint_policies.remove",
    "checkpoint_policies.set", "checkpoints.add", "checkpoints.mirrored", "checkpoints.on_disk",
    "checkpoints.part_removed", "checkpoints.remove", "checkpoints.unmirrored", "checkpoints.whole", "devices.change",
    "devices.configure", "devices.cordon", "devices.learn", "events.add", "faults.acknowledge", "faults.add",
    "health.findings", "history.tidy", "jobs.add", "jobs.change", "jobs.end", "jobs.made", "jobs.stop", "keys.answer",
    "keys.claim", "keys.release", "logs.add", "migrations.intent", "migrations.save", "native.adopt", "native.forget",
    "operations.begin", "operations.decide", "operations.end", "operations.save", "policies.change",
    "prediction.profiles", "processes.assign", "processes.end", "processes.rebind", "processes.start",
    "processes.state", "processes.unprotected", "recoveries.save", "segments.add", "stored_snapshots.add",
    "stored_snapshots.remove", "tokens.create", "tokens.revoke", "tokens.used", "transfers.add", "transfers.committed",
    "transfers.done", "transfers.dropped", "transfers.failed", "transfers.going", "transfers.note",
    "transfers.prepared", "transfers.preparing", "transfers.running", "webhooks.add", "webhooks.change",
    "webhooks.progress", "webhooks.remove", "webhooks.retry",
]  # fmt: skip
Moment = Literal["write.begun", "write.committed"]
Between = Literal["store.objects", "store.manifest", "mirror.objects", "mirror.manifest"]
POINTS: tuple[str, ...] = (
    *(f"{moment} {write}" for write in get_args(Write) for moment in get_args(Moment)), *get_args(Between)
)  # fmt: skip
_file: Path | None = None


def arm(file: str) -> None:
    """The file that names the place; empty: none."""
    global _file
    _file = Path(file) if file else None


def hit(place: Between) -> None:
    """The daemon has come to this place."""
    if _file is not None:
        _inject({place})


def hit_write(moment: Moment, *writes: Write) -> None:
    """The same, in a transaction with these writes."""
    if _file is not None:
        _inject({f"{moment} {write}" for write in writes})


def _inject(places: set[str]) -> None:
    if _file is not None and _file.exists() and _file.read_text() in places:
        os.kill(os.getpid(), signal.SIGKILL)


arm(os.environ.get("XMIG_FAILPOINT", ""))
