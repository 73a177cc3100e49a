"""What would stop a job's programs from being dumped and restored elsewhere: check-movable."""

from __future__ import annotations

from typing import Any

import typer

from xmigd.cli.common import JobArgument, connect, find_job
from xmigd.cli.exits import Exit
from xmigd.cli.output import Output, OutputOption, console, escape, show, show_json

STOPS = {"here": "the dump", "elsewhere": "moving"}


def register(app: typer.Typer) -> None:
    app.command("check-movable")(check_movable)


def check_movable(job: JobArgument, output: OutputOption = Output.table) -> None:
    """What would stop a job's programs from being dumped with CRIU and restored on another node. Does nothing to them.

    If something does, the exit code is that with which the attempt would end."""
    client = connect()
    found = client.get(f"/v1/jobs/{find_job(client, job)}/movable")
    if output is Output.json:
        show_json(found)
    else:
        _show(found)
    if not found["movable"]:
        raise typer.Exit(Exit.REFUSED)


def _show(found: dict[str, Any]) -> None:
    rows = [
        each | {"process_id": program["process_id"]} for program in found["programs"] for each in program["obstacles"]
    ]
    in_the_way = [row | {"stops": STOPS[row["stops"]]} for row in rows if row["stops"] in STOPS]
    columns = {
        "process_id": "PROCESS", "pid": "PID", "stops": "STOPS", "what": "WHAT", "why": "WHY", "hint": "HINT",
    }  # fmt: skip
    show(in_the_way, Output.table, columns, "nothing stands in the way", optional=("process_id",))
    needed = list(dict.fromkeys((row["what"], row["hint"]) for row in rows if row["stops"] == "depends"))
    if needed:
        console.print("\nthe other node needs the same:")
        for what, hint in needed:
            console.print(f"  {escape(what)}; {escape(hint)}", soft_wrap=True)
