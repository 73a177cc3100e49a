"""What every request passes before its handler sees it, and every answer on its way out.

In this order: a request id (`reporting`), who calls, how often they may, and whether they may change anything
(`callers`), how long the body is (`bodies`), whether it was done before (`replays`), and, for what changes something,
the audit's intent (`auditing`). What is refused here has changed nothing.
"""

from __future__ import annotations

from starlette.types import ASGIApp

from xmigd.api.gate.auditing import Auditing
from xmigd.api.gate.bodies import Bodies
from xmigd.api.gate.callers import Callers
from xmigd.api.gate.idempotency import Idempotency
from xmigd.api.gate.replays import Replays
from xmigd.api.gate.reporting import Reporting
from xmigd.database.writer import Writer
from xmigd.metrics.requests import Requests
from xmigd.operations.service import Operations
from xmigd.security.audit import Audit
from xmigd.security.tokens import Tokens
from xmigd.settings import Settings


def make_gate(
    app: ASGIApp,
    *,
    settings: Settings,
    writer: Writer,
    operations: Operations,
    tokens: Tokens,
    audit: Audit,
    operators: int | None,
    requests: Requests,
) -> ASGIApp:
    """Before `app`. `operators`: the group of those who decide about the node."""
    app = Auditing(app, audit)
    app = Replays(app, Idempotency(writer, lambda operation: operations.get(operation)))
    app = Bodies(app)
    app = Callers(app, tokens, operators, rate=settings.request_rate, open_reading=settings.open_reading)
    return Reporting(app, requests)
