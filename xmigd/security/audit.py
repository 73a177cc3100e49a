"""The audit: who requested what, before it has an effect, and how it went.

An intent is on the disk before anything is done; if it cannot be written nothing is done. Its outcome follows in a row
of its own, because rows are never changed. An intent without an outcome was interrupted by the end of the daemon.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Engine, insert, select
from sqlalchemy.orm import Session

from xmigd.database.models import AuditEntry, Base
from xmigd.database.writer import Writer
from xmigd.events.bus import Bus
from xmigd.security.callers import Caller

XMIGD = Caller("xmigd", "admin", None, None, "xmigd")
# Made once: SQLAlchemy takes longer to make a statement than to execute it, and each request has two entries.
ENTRY = insert(Base.metadata.tables["audit"])
INTENT = ENTRY.returning(AuditEntry.id)


class Audit:
    def __init__(self, writer: Writer, readers: Engine, bus: Bus) -> None:
        self._writer = writer
        self._readers = readers
        self._bus = bus

    async def intent(
        self, caller: Caller, action: str, *, request_id: str = "", detail: dict[str, Any] | None = None
    ) -> int:
        """Raises Unavailable: it cannot be written, so nothing may be done. Returns its id, for `outcome`."""
        values = self._values(caller, action, request_id) | {"entry": "intent", "detail": detail or {}}

        def write(session: Session) -> int:
            return int(session.execute(INTENT, values).scalar_one())

        number: int = await self._writer.write("audit.intent", write)
        shown = {"entry": "intent", "requestor": caller.name, "action": action}
        self._bus.publish("audit", "audit", str(number), None, shown)
        return number

    def outcome(
        self, intent: int, caller: Caller, action: str, outcome: str, *, status: int | None = None,
        request_id: str = "", detail: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """`outcome`: "done", or an error's code."""
        values = self._values(caller, action, request_id) | {
            "entry": "outcome", "intent_id": intent, "outcome": outcome, "status": status, "detail": detail or {},
        }  # fmt: skip
        self._writer.record("audit.outcome", lambda session: session.execute(ENTRY, values))

    def page(self, *, before: int | None, limit: int, requestor: str | None = None) -> Sequence[AuditEntry]:
        """Newest first."""
        query = select(AuditEntry).order_by(AuditEntry.id.desc()).limit(limit)
        if before is not None:
            query = query.where(AuditEntry.id < before)
        if requestor is not None:
            query = query.where(AuditEntry.requestor == requestor)
        with Session(self._readers, expire_on_commit=False) as session:
            return session.scalars(query).all()

    @staticmethod
    def _values(caller: Caller, action: str, request_id: str) -> dict[str, Any]:
        return {
            "at": time.time(), "request_id": request_id, "requestor": caller.name[:255], "uid": caller.uid,
            "via": caller.via, "action": action[:255],
        }  # fmt: skip
