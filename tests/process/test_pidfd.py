"""Processes as the daemon sees them, while they end."""

from __future__ import annotations

import subprocess
import threading

from xmigd.ipc import pidfd


def test_whether_one_that_ends_still_runs() -> None:
    """Its folder in /proc goes while it is read: there is an answer at any moment."""
    for _ in range(100):
        child = subprocess.Popen(["/bin/true"])
        waiting = threading.Thread(target=child.wait)
        waiting.start()
        while waiting.is_alive():
            pidfd.runs_no_more(child.pid)
        waiting.join()
        assert pidfd.runs_no_more(child.pid)
        assert pidfd.is_exiting(child.pid)
