"""A job's log."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from xmigd.cli.common import JobArgument, connect, find_job
from xmigd.cli.output import Output, OutputOption, cell, console, escape, show_json, show_json_line
from xmigd.client import RESTART_PATIENCE, Client, NoDaemon

PAUSE = 0.5  # seconds between two looks at the log
PAGE = 1000
STYLES = {"error": "red", "warning": "yellow"}


def register(app: typer.Typer) -> None:
    app.command()(logs)


def logs(
    job: JobArgument,
    following: Annotated[
        bool, typer.Option("--follow", "-f", help="go on with what comes, until the job is over or Ctrl-C")
    ] = False,
    limit: Annotated[int, typer.Option("--limit", min=1, max=PAGE, help="how many of the last")] = 200,
    output: OutputOption = Output.table,
) -> None:
    """What xMIG has to say about a job: calls that it refuses, why its program was not let in, what was lost. With
    --follow in JSON a line each."""
    client = connect()
    id = find_job(client, job)
    rows = client.get(f"/v1/jobs/{id}/logs", limit=limit)
    if not following:
        if output is Output.json:
            show_json(rows)
        elif not rows:
            console.print("nothing was reported about this job")
        else:
            for row in rows:
                _line(row, output)
        return
    for row in rows:
        _line(row, output)
    try:
        _follow(client, id, rows[-1]["id"] if rows else 0, output)
    except KeyboardInterrupt:
        raise typer.Exit from None


def _follow(client: Client, job: str, last: int, output: Output) -> None:
    """Across restarts of the daemon."""
    silent_since: float | None = None
    while True:
        try:
            over = client.get(f"/v1/jobs/{job}")["state"] not in ("created", "running")
            rows = client.get(f"/v1/jobs/{job}/logs", after=last, limit=PAGE)
            silent_since = None
        except NoDaemon:
            silent_since = silent_since or time.monotonic()
            if time.monotonic() - silent_since > RESTART_PATIENCE:
                raise
            time.sleep(PAUSE)
            continue
        for row in rows:
            _line(row, output)
            last = row["id"]
        if over and not rows:
            return
        if not rows:
            time.sleep(PAUSE)


def _line(row: dict[str, Any], output: Output) -> None:
    if output is Output.json:
        show_json_line(row)
        return
    style = STYLES.get(row["level"])
    text = escape(row["text"])
    parts = (cell("at", row["at"]), f"{row['source']:7}", f"[{style}]{text}[/{style}]" if style else text)
    console.print("  ".join(parts), soft_wrap=True)
