"""`xmigctl run --strict`: a job without the genuine driver, or none.

The devices' files are closed to the program and to all that it starts, as far as the kernel can (xmigd.cli.landlock).
xmigd looks after the rest: it ends the job when one of its processes is not protected. Somebody has to say so, with
an exit code of its own, so this command stays as the program's parent.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

from xmigd.cli import landlock
from xmigd.cli.exits import CommandError, Exit
from xmigd.cli.launch import Reactions, run
from xmigd.cli.output import notes
from xmigd.client import Client
from xmigd.errors import XmigError

PR_SET_CHILD_SUBREAPER = 36


def run_strictly(
    command: list[str], environment: Mapping[str, str], client: Client, job: str, reactions: Reactions | None = None
) -> int:  # fmt: skip
    """Run it and wait: the wait status. Raises CommandError, and OSError if it cannot be started."""
    # What loses its parent in the job stays below this process, and so does who belongs to it.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    closes = landlock.available()
    if not closes:
        notes.print(
            "xmigctl: this kernel cannot close the devices' files to a program (Landlock): the job is watched, and"
        )
        notes.print("  ends when one of its processes has loaded the driver itself")
    status = run(command, environment, landlock.close_devices if closes else None, reactions)
    if (found := _unprotected(client, job)) is not None:
        raise CommandError(
            f"process {found['pid']} ({found['command']}) was not protected: {found['unprotected']}",
            hint=f"the job is strict and was ended; xmigctl logs {job[:12]}", code="not_protected",
            exit_code=Exit.NOT_PROTECTED,
        )  # fmt: skip
    return status


def _unprotected(client: Client, job: str) -> dict[str, Any] | None:
    """The first of them. None, too, if the daemon is away: the program's own code is all that is known then."""
    try:
        rows = client.get("/v1/processes", job=job, limit=1000)
    except XmigError:
        return None
    found = [row for row in rows if row["unprotected"]]
    return dict(found[-1]) if found else None
