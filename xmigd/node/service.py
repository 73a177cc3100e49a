"""The node: what it is, and whether it is ready."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from xmigd import __version__
from xmigd.database.writer import Writer
from xmigd.errors import NotReady
from xmigd.node.schemas import NodeInfo
from xmigd.settings import Settings
from xmigd.supervisor.supervisor import Supervisor

MIN_FREE = 8 << 20  # bytes of the database's disk


class Node:
    def __init__(
        self, *, settings: Settings, supervisor: Supervisor, writer: Writer, started_at: float,
        tcp_address: str | None, is_stopping: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._settings = settings
        self._supervisor = supervisor
        self._writer = writer
        self._started_at = started_at
        self._tcp_address = tcp_address
        self._is_stopping = is_stopping

    def info(self) -> NodeInfo:
        return NodeInfo(
            version=__version__,
            pid=os.getpid(),
            uid=os.geteuid(),
            started_at=self._started_at,
            runtime_dir=str(self._settings.runtime_dir),
            database=str(self._settings.database),
            tcp_address=self._tcp_address,
            devices=self._settings.device_names,
            processes=len(self._supervisor.processes),
            database_failure=self._writer.failure,
        )

    def check_ready(self) -> None:
        """Raises NotReady."""
        if why := self._writer.failure or ("xmigd is stopping" if self._is_stopping() else ""):
            raise NotReady(why)
        if why := _no_room(self._settings.database):
            raise NotReady(why, hint="make room on it")
        if expected := self._supervisor.expected:
            names = ", ".join(process[:12] for process in expected[:10])
            raise NotReady(f"the servers of {len(expected)} processes have not announced themselves yet: {names}",
                           hint="ask again", retry_after=1)  # fmt: skip


def _no_room(database: Path) -> str:
    """Reported before the first write fails."""
    try:
        free = shutil.disk_usage(database.parent).free
    except OSError as error:
        return f"the folder of the database is gone: {error.strerror}"
    return f"the database's disk is full: {free >> 10} KiB are free" if free < MIN_FREE else ""
