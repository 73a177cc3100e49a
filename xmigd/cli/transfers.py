"""Jobs between nodes: transfer list, show, decide. They are begun with `migrate --to`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from xmigd.cli.common import JobOption, LimitOption, YesOption, confirm, connect, find_by_prefix, find_job
from xmigd.cli.output import Output, OutputOption, console, escape, show, show_one
from xmigd.words import milliseconds

group = typer.Typer(no_args_is_help=True, help="Transfers: jobs that move to another node, or come from one.")
TransferArgument = Annotated[str, typer.Argument(help="the transfer: its id, or the beginning of it")]


class Where(StrEnum):
    here = "here"
    there = "there"


def register(app: typer.Typer) -> None:
    app.add_typer(group, name="transfer")


@group.command("list")
def list_transfers(job: JobOption = None, limit: LimitOption = 50, output: OutputOption = Output.table) -> None:
    """The newest first. Each is listed on both nodes, with the same id."""
    client = connect()
    rows = client.get("/v1/transfers", job=find_job(client, job) if job else None, limit=limit)
    columns = {
        "created_at": "TIME", "id": "TRANSFER", "job_name": "JOB", "direction": "", "source": "FROM", "target": "TO",
        "state": "STATE", "standstill_ms": "DOWNTIME", "why": "WHY",
    }  # fmt: skip
    shown = rows if output is Output.json else [row | {"id": row["id"][:12]} for row in rows]
    show(shown, output, columns, "no job has moved between nodes", optional=("standstill_ms", "created_at"))


@group.command("show")
def show_transfer(transfer: TransferArgument, output: OutputOption = Output.table) -> None:
    """One of them, as this node has it."""
    client = connect()
    found = find_by_prefix(client.get("/v1/transfers", limit=1000), transfer, "transfer", "xmigctl transfer list")
    fields = {
        "id": "transfer", "direction": "direction", "peer": "peer", "state": "state", "why": "why", "job_name": "name",
        "job_id": "job here", "peer_job": "job there", "process_id": "process", "user": "user", "source": "from",
        "target": "to", "standstill_ms": "downtime", "took": "of that", "content_bytes": "content",
        "ahead_bytes": "ahead", "created_at": "began", "ended_at": "ended",
    }  # fmt: skip
    if output is not Output.json:
        each = (f"{name.removesuffix('_ms')} {milliseconds(ms)}" for name, ms in found["took"].items())
        found = found | {"took": ", ".join(each)}
    show_one(found, output, fields)


@group.command()
def decide(
    transfer: TransferArgument,
    goes_on: Annotated[Where, typer.Option("--goes-on", help="on this node or on the other one")],
    yes: YesOption = False,
    output: OutputOption = Output.table,
) -> None:
    """Decide by hand where a program goes on, if the other node is gone for good and cannot say. Look there first: if
    it is not gone, two copies of the program may run, or none."""
    client = connect()
    found = find_by_prefix(client.get("/v1/transfers", limit=1000), transfer, "transfer", "xmigctl transfer list")
    if goes_on is Where.here:
        question = f"Does no copy of {found['job_name'] or 'the program'} run on {found['peer']}, and never will?"
    else:
        question = f"Does {found['job_name'] or 'the program'} run on {found['peer']}? It ends here."
    confirm(question, yes)
    row = client.post(f"/v1/transfers/{found['id']}:decide", {"goes_on": goes_on.value})
    if output is Output.json:
        show_one(row, output, {})
    else:
        place = "on this node" if goes_on is Where.here else f"on {escape(row['peer'])}"
        console.print(f"{escape(row['job_name'])} goes on {place}")
