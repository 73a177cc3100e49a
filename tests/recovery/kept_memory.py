"""Who holds a job's memory, and the death of those who do."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from tests import harness
from xmigd.demo.node import Node, Program


def stores(node: Node) -> list[int]:
    return harness.descriptor_stores(node.settings.runtime_dir)


def store(node: Node) -> int:
    """The one that there is."""
    harness.wait_until(lambda: len(stores(node)) == 1, "one descriptor store")
    return stores(node)[0]


def memory(pid: int) -> set[int]:
    """What it holds of jobs' memory: the files' inodes."""
    found = set()
    with contextlib.suppress(FileNotFoundError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                link = os.readlink(entry)
                if "memfd:xmig-" in link and "index" not in link and "module" not in link:
                    found.add(entry.stat().st_ino)
    return found


def settled(node: Node) -> bool:
    """Has the store everything that the daemon and the servers hold?"""
    assert node.process is not None
    kept = memory(store(node))
    servers = set().union(*map(memory, harness.server_pids(node)))
    return len(kept) >= 5 and memory(node.process.pid) == kept and servers <= kept


def kill_both(node: Node, program: Program, *more: int) -> None:
    """At the same moment, whatever they are doing: neither sees the other's end."""
    server = program.until("running")["server_pid"]
    assert node.process is not None
    victims = list(dict.fromkeys([node.process.pid, server, *more]))
    for victim in victims:
        with contextlib.suppress(ProcessLookupError):  # a standby that has been replaced
            harness.stop(victim)
    for victim in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
    node.process.wait()
