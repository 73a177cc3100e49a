"""The ranks of a job: what each does, waits for and did; recoveries of all together."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from xmigd.cli.common import JobArgument, connect, find_job
from xmigd.cli.output import Output, OutputOption, console, escape, notes, show, show_json
from xmigd.timeline import draw
from xmigd.words import milliseconds


def register(app: typer.Typer) -> None:
    app.command()(ranks)


def ranks(
    job: JobArgument,
    from_rank: Annotated[int, typer.Option("--from-rank", min=0, help="those with this rank and higher ones")] = 0,
    limit: Annotated[int, typer.Option("--limit", min=1, max=1000, help="how many ranks")] = 32,
    output: OutputOption = Output.table,
) -> None:
    """A job's ranks: what each does and waits for, and a time line of what they did."""
    client = connect()
    id = find_job(client, job)
    found = client.get(f"/v1/jobs/{id}/ranks", from_rank=from_rank, limit=limit, spans=250)
    if output is Output.json:
        show_json(found)
        return
    columns = {
        "rank": "RANK", "process_id": "PROCESS", "pid": "PID", "device": "DEVICE", "state": "STATE",
        "activity": "DOES", "waits_for": "WAITS FOR",
    }  # fmt: skip
    show(found["ranks"], output, columns, "none of its processes has a communicator", optional=("pid", "process_id"))
    if not found["ranks"]:
        return
    console.print()
    for line in draw(found["ranks"], min(console.width, 120), time.time()):
        console.print(escape(line), soft_wrap=True)
    if found["recoveries"]:
        console.print()
        titles = {
            "at": "TIME", "lost": "LOST RANK", "outcome": "OUTCOME", "ranks": "RANKS", "together_ms": "ALL ENDED",
            "resumed_ms": "ALL RUN", "last_to_resume": "THE LAST", "cause": "CAUSE",
        }  # fmt: skip
        rows = [one | {"lost": lost_ranks(one), "cause": causes(one)} for one in found["recoveries"]]
        show(rows, output, titles, "", optional=("cause", "last_to_resume", "together_ms"))
    console.print()
    for difference in found.get("differences", []):  # which daemons of earlier versions do not find
        console.print(f"[red]{escape(difference['text'])}[/red]")
    console.print(snapshots_line(found["snapshots"]))
    if found["next_rank"] is not None:
        notes.print(f"[dim]{found['total']} ranks in all: --from-rank {found['next_rank']} has the next[/dim]")


def lost_ranks(recovery: Mapping[str, Any]) -> str:
    return ", ".join("?" if one["rank"] is None else str(one["rank"]) for one in recovery["lost"]) or "-"


def causes(recovery: Mapping[str, Any]) -> str:
    return "; ".join(dict.fromkeys(one["cause"] for one in recovery["lost"]))


def snapshots_line(snapshots: list[dict[str, Any]]) -> str:
    """The last group snapshots in a sentence."""
    taken = [one for one in snapshots if one["outcome"] == "taken" and one["committed_ms"] is not None]
    given_up = [one for one in snapshots if one["outcome"] == "given_up"]
    if not snapshots:
        return "no snapshot of all ranks yet"
    text = f"of the last {len(snapshots)} snapshots of all ranks {len(given_up)} were given up"
    if taken:
        middle = sorted(one["committed_ms"] for one in taken)[len(taken) // 2]
        text += f"; the others took {milliseconds(middle)} from the first stop to the last commit (median)"
    if given_up:
        text += f"; the last was given up: {given_up[0]['why']}"
    return escape(text)
