"""The audit: who requested what, and how it went."""

from __future__ import annotations

from typing import Annotated

import typer

from xmigd.cli.common import LimitOption, connect
from xmigd.cli.output import Output, OutputOption, show
from xmigd.users import requestor_name, requestor_of


def register(app: typer.Typer) -> None:
    app.command()(audit)


def audit(
    requestor: Annotated[
        str | None,
        typer.Option("--requestor", help="only of this one: a user, by name or number; `token ci`; `node two`"),
    ] = None,
    before: Annotated[int | None, typer.Option("--before", help="entries before this id")] = None,
    limit: LimitOption = 50,
    output: OutputOption = Output.table,
) -> None:
    """Who requested what, and how it went, newest first: each intent, and its outcome. For operators."""
    if requestor is not None:
        requestor = requestor_of(requestor)
    rows = connect().get("/v1/audit", requestor=requestor, before=before, limit=limit)
    if output is Output.table:
        rows = [row | {"requestor": requestor_name(row["requestor"])} for row in rows]
    columns = {
        "id": "ENTRY", "at": "TIME", "entry": "KIND", "intent_id": "OF", "requestor": "REQUESTOR", "via": "VIA",
        "action": "ACTION", "outcome": "OUTCOME", "status": "STATUS", "detail": "DATA",
    }  # fmt: skip
    show(rows, output, columns, "nothing was requested")
