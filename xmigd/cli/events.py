"""Events: what happened, and what happens."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from xmigd.cli.common import JobOption, connect, find_job
from xmigd.cli.output import Output, OutputOption, cell, console, escape, notes, show, show_json_line
from xmigd.client import RESTART_PATIENCE, Client, NoDaemon

PAUSE = 0.5  # seconds before a stream that ended is opened again


def register(app: typer.Typer) -> None:
    app.command()(events)


def events(
    following: Annotated[bool, typer.Option("--follow", "-f", help="go on as they happen, until Ctrl-C")] = False,
    job: JobOption = None,
    kinds: Annotated[
        list[str] | None,
        typer.Option("--type", help="only these: fault, process.state, ...; operation for all of its"),
    ] = None,
    after: Annotated[int | None, typer.Option("--after", min=0, help="what came after this id")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=1000, help="how many of the past")] = 50,
    output: OutputOption = Output.table,
) -> None:
    """Events, oldest first: the last ones, or with --follow also those to come (in JSON a line each)."""
    client = connect()
    job_id = find_job(client, job) if job else None
    rows = client.get("/v1/events", after=after, limit=limit)
    if after is None:
        rows.reverse()
    last = rows[-1]["id"] if rows else after or 0  # from the first on: one may come before the daemon is listened to
    shown = [row for row in rows if _wanted(row, job_id, kinds)]
    if not following:
        columns = {"id": "EVENT", "at": "TIME", "type": "TYPE", "about": "SUBJECT", "job": "JOB", "data": "DATA"}
        more = shown
        if output is Output.table:
            names = {each["id"]: each["name"] for each in client.get("/v1/jobs", limit=1000)}
            more = [row | {"about": _about(row), "job": names.get(row["job_id"]) or row["job_id"]} for row in shown]
        show(more, output, columns, "no events")
        return
    for row in shown:
        _line(row, output)
    try:
        _follow(client, last, job_id, kinds, output)
    except KeyboardInterrupt:
        raise typer.Exit from None


def _follow(client: Client, last: int | None, job: str | None, kinds: list[str] | None, output: Output) -> None:
    """Across restarts of the daemon: it goes on after the last event that was seen."""
    silent_since: float | None = None
    while True:
        try:
            for event in client.events(after=last):
                silent_since = None
                if event["id"]:
                    last = int(event["id"])
                if event["event"] == "reset":
                    notes.print("[yellow]some events are not kept any more; what follows is complete again[/yellow]")
                elif _wanted(event["data"], job, kinds):
                    _line(event["data"], output)
        except NoDaemon:
            silent_since = silent_since or time.monotonic()
            if time.monotonic() - silent_since > RESTART_PATIENCE:
                raise
        time.sleep(PAUSE)


def _wanted(event: dict[str, Any], job: str | None, kinds: list[str] | None) -> bool:
    fits = not kinds or any(event["type"] == kind or event["type"].startswith(kind.rstrip(".") + ".") for kind in kinds)
    return fits and job in (None, event["job_id"])


def _about(event: dict[str, Any]) -> str:
    return f"{event['subject']['type']} {str(event['subject']['id'])[:12]}"


def _line(event: dict[str, Any], output: Output) -> None:
    if output is Output.json:
        show_json_line(event)
        return
    number = "-" if event["id"] is None else str(event["id"])
    parts = (f"{number:>6}", cell("at", event["at"]), f"[bold]{escape(event['type']):18}[/bold]",
             f"{escape(_about(event)):22}", cell("data", event["data"]))  # fmt: skip
    console.print("  ".join(parts), soft_wrap=True)
