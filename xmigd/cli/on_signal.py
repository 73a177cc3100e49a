"""A checkpoint at a signal, for schedulers that send one before they end a job: `xmigctl run --checkpoint-on-signal`.

The command stays beside its program for that, and makes the same request as `xmigctl checkpoint create` would. A
failure goes to standard error. A success writes nothing: standard error may be the program's log, which has to be as it
was when the program is restored.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time

from xmigd.cli.launch import Reactions
from xmigd.client import RESTART_PATIENCE, Client, NoDaemon
from xmigd.errors import XmigError

OVER = frozenset({"succeeded", "failed", "cancelled"})
INTERVAL = 0.2  # seconds between two looks


def reactions(client: Client, job: str, name: str, *, stop: bool) -> Reactions:
    """`name`: of the signal, without SIG. `stop`: the program ends where it was written down."""
    busy = threading.Lock()

    def work() -> None:
        try:
            _make(client, job, stop=stop)
        except XmigError as error:
            with contextlib.suppress(OSError, ValueError):
                print(f"xmigctl: no checkpoint was made at SIG{name}: {error}", file=sys.stderr, flush=True)
        finally:
            busy.release()

    def react() -> None:
        if not busy.acquire(blocking=False):
            return  # one is being made already
        threading.Thread(target=work, name="checkpoint", daemon=True).start()

    return {signal.Signals[f"SIG{name}"]: react}


def _make(client: Client, job: str, *, stop: bool) -> None:
    """Raises XmigError: none was made."""
    operation = client.start("/v1/checkpoints", {"job": job, "stop": stop})
    silent_since = time.monotonic()
    while operation["state"] not in OVER:
        time.sleep(INTERVAL)
        try:
            operation = client.get(f"/v1/operations/{operation['id']}")
            silent_since = time.monotonic()
        except NoDaemon:  # it is being restarted
            if time.monotonic() - silent_since > RESTART_PATIENCE:
                raise
    if operation["state"] != "succeeded":
        raise XmigError((operation["error"] or {}).get("detail") or f"the operation has {operation['state']}")
