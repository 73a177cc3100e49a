"""Servers and jobs in units of their own: a transient scope for each, in xmig.slice, made by a service manager that is
requested through D-Bus.

A server must outlive the daemon, so it must not be in the daemon's control group: what the manager does to the daemon's
unit it would do to the servers. Where the daemon is not a service, servers are plain processes. The scopes of jobs are
requested by `xmigctl run` (xmigd/cli/scope.py).
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from jeepney import DBusAddress, MessageType, new_method_call
from jeepney.io.asyncio import DBusRouter, open_dbus_connection
from jeepney.io.common import RouterClosed

from xmigd import log

SLICE = "xmig.slice"
PATIENCE = 5.0  # seconds for an answer of the manager
MANAGER = DBusAddress(
    "/org/freedesktop/systemd1", bus_name="org.freedesktop.systemd1", interface="org.freedesktop.systemd1.Manager"
)

logger = log.get("scopes")


class Scopes:
    """No manager: servers are plain processes."""

    async def place(self, pid: int, about: str) -> None:
        """Put a process that was just started into a scope of its own. Never raises: one that cannot be placed works,
        too."""

    async def close(self) -> None: ...


class ManagerScopes(Scopes):
    """Of the manager that listens on this bus, on one connection that is made when it is first needed, and again when
    it breaks."""

    def __init__(self, bus: str = "SYSTEM") -> None:
        """`bus`: SYSTEM, or an address as D-Bus writes it."""
        self._bus = bus
        self._router: DBusRouter | None = None
        self._connecting = asyncio.Lock()
        self._open = contextlib.AsyncExitStack()

    async def place(self, pid: int, about: str) -> None:
        why = await self.start(f"xmig-server-{pid}.scope", pid, about)
        if why is not None:
            logger.warning("a server stays in the daemon's control group", server_pid=pid, why=why)

    async def start(self, unit: str, pid: int, about: str) -> str | None:
        """Start a scope with this process in it. Returns why that cannot be; the process is where it was, then."""
        properties: list[tuple[str, tuple[str, Any]]] = [
            ("PIDs", ("au", [pid])),
            ("Slice", ("s", SLICE)),
            ("Description", ("s", about)),
            ("CollectMode", ("s", "inactive-or-failed")),
        ]
        call = new_method_call(MANAGER, "StartTransientUnit", "ssa(sv)a(sa(sv))", (unit, "fail", properties, []))
        for _ in range(2):
            try:
                async with asyncio.timeout(PATIENCE):
                    reply = await (await self._connected()).send_and_get_reply(call)
            except (OSError, EOFError, TimeoutError, ValueError, RouterClosed) as error:
                why = str(error) or type(error).__name__
                await self.close()
                continue
            if reply.header.message_type is not MessageType.error:
                return None
            return str(reply.body[0]) if reply.body else "an error without words"
        return why

    async def close(self) -> None:
        router, self._router = self._router, None
        if router is not None:
            with contextlib.suppress(OSError, EOFError):
                await self._open.aclose()

    async def _connected(self) -> DBusRouter:
        async with self._connecting:
            if self._router is None:
                connection = await open_dbus_connection(self._bus)
                self._open = contextlib.AsyncExitStack()
                self._open.push_async_callback(connection.close)
                self._router = await self._open.enter_async_context(DBusRouter(connection))
            return self._router
