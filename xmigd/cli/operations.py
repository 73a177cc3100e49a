"""Operations, what takes longer than a request: op list, show, watch, wait, cancel."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from xmigd.cli.common import JobOption, LimitOption, connect, find_by_prefix, find_job
from xmigd.cli.follow import OVER, OnInterrupt, exit_code, follow, outcome
from xmigd.cli.output import Output, OutputOption, console, show, show_json, show_one
from xmigd.client import Client, Refused
from xmigd.users import requestor_name

group = typer.Typer(no_args_is_help=True, help="Operations: migrations, suspensions, drains, ...")
OperationArgument = Annotated[str, typer.Argument(help="the operation: its id, or the beginning of it")]


class State(StrEnum):
    pending = "pending"
    running = "running"
    succeeded = "succeeded"
    failed = "failed"
    cancelled = "cancelled"


def register(app: typer.Typer) -> None:
    app.add_typer(group, name="op")


@group.command("list")
def list_operations(
    state: Annotated[State | None, typer.Option("--state", help="only in this state")] = None,
    kind: Annotated[str | None, typer.Option("--kind", help="only of this kind, for example migration")] = None,
    job: JobOption = None,
    limit: LimitOption = 50,
    output: OutputOption = Output.table,
) -> None:
    """Operations, newest first."""
    client = connect()
    rows = client.get("/v1/operations", state=state.value if state else None, kind=kind,
                      job=find_job(client, job) if job else None, limit=limit)  # fmt: skip
    if output is Output.table:
        names = {each["id"]: each["name"] for each in client.get("/v1/jobs", limit=1000)}
        rows = [row | {"about": subject(row, names), "requestor": requestor_name(row["requestor"])} for row in rows]
    columns = {
        "created_at": "TIME", "id": "OPERATION", "kind": "KIND", "about": "SUBJECT", "state": "STATE", "phase": "PHASE",
        "may_cancel": "CANCELLABLE", "requestor": "REQUESTOR", "ended_at": "ENDED",
    }  # fmt: skip
    show(rows, output, columns, "no operations",
         optional=("may_cancel", "phase", "ended_at", "requestor", "kind"))  # fmt: skip


@group.command("show")
def show_operation(operation: OperationArgument, output: OutputOption = Output.table) -> None:
    """One operation: how far it is, what came of it."""
    client = connect()
    show_one(find_operation(client, operation), output)


@group.command()
def watch(operation: OperationArgument, output: OutputOption = Output.table) -> None:
    """Follow an operation to its end; Ctrl-C leaves it to itself. The exit code says how it ended."""
    client = connect()
    _end(follow(client, find_operation(client, operation), quiet=output is Output.json), output)


@group.command()
def wait(
    operation: OperationArgument,
    timeout: Annotated[
        float | None, typer.Option("--timeout", min=0, metavar="SECONDS", help="default: for ever")
    ] = None,
    output: OutputOption = Output.table,
) -> None:
    """Wait for an operation's end without a bar. The exit code says how it ended."""
    client = connect()
    _end(follow(client, find_operation(client, operation), quiet=True, timeout=timeout), output)


@group.command()
def cancel(
    operation: OperationArgument,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="until it has ended, or only ask")] = True,
    output: OutputOption = Output.table,
) -> None:
    """Cancel an operation: what it is about stays as it was. Refused past the point of no return."""
    client = connect()
    found = find_operation(client, operation)
    answer = client.delete(f"/v1/operations/{found['id']}")
    if wait:
        answer = follow(client, answer, on_interrupt=OnInterrupt.detach, quiet=output is Output.json)
    if output is Output.json:
        show_json(answer)
    elif answer["state"] == "cancelled":
        console.print(f"the {answer['kind']} was cancelled")
    elif answer["state"] in OVER:
        console.print(f"the {answer['kind']} had {answer['state']} before it could be cancelled")
    else:
        console.print(f"the {answer['kind']} was requested to end")


def subject(row: dict[str, Any], names: dict[str, str]) -> str:
    """What it is about, with its job's name where that is known. `names`: of jobs, by id."""
    job = names.get(row["job_id"] or "")
    about = f"{row['subject']['type']} {row['subject']['id'][:12]}"
    return about if job is None else f"{job} · {about}"


def find_operation(client: Client, wanted: str) -> dict[str, Any]:
    try:
        return dict(client.get(f"/v1/operations/{wanted}"))
    except Refused as error:
        if error.status != 404:
            raise
    return find_by_prefix(client.get("/v1/operations", limit=1000), wanted, "operation", "xmigctl op list")


def _end(operation: dict[str, Any], output: Output) -> None:
    if output is Output.json:
        show_json(operation)
        raise typer.Exit(exit_code(operation))
    outcome(operation)
    console.print(f"the {operation['kind']} succeeded")
