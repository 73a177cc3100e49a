"""How long a job will still run, and how much device memory it will have: predict."""

from __future__ import annotations

import typer

from xmigd.cli.common import JobArgument, connect, find_job
from xmigd.cli.output import Output, OutputOption, console, escape, show_json, size
from xmigd.words import duration


def register(app: typer.Typer) -> None:
    app.command("predict")(predict)


def predict(job: JobArgument, output: OutputOption = Output.table) -> None:
    """How long a job will still run, and its peak of device memory, from jobs of its user that have ended.

    P50: half of such jobs have at most this; P90: nine tenths. Where nothing can be predicted, the reason is shown."""
    client = connect()
    found = client.get(f"/v1/jobs/{find_job(client, job)}/prediction")
    if output is Output.json:
        show_json(found)
        return
    console.print(f"runs since        {duration(found['elapsed_s'])}")
    for title, key, form in (("still runs", "remaining_s", duration), ("peak of memory", "peak_bytes", size)):
        each = found[key]
        if each["unknown"]:
            console.print(f"{title:17} unknown: {escape(each['unknown'])}", soft_wrap=True)
        else:
            console.print(f"{title:17} {form(each['p50'])} (P50), {form(each['p90'])} (P90)")
    console.print(f"[dim]from {escape(found['basis'])}[/dim]", soft_wrap=True)
