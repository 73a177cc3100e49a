"""Faults and what became of them: fault list, fault inject, recoveries."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from xmigd.cli.common import JobArgument, JobOption, LimitOption, connect, find_job
from xmigd.cli.output import Output, OutputOption, console, escape, show, show_json, with_jobs
from xmigd.users import requestor_name


class Kind(StrEnum):
    """xmigd.process.events.InjectKind"""

    kill = "kill"
    fault = "fault"
    hang = "hang"
    flip = "flip"


class Point(StrEnum):
    """xmigd.process.events.InjectPoint"""

    record = "record"
    kernel = "kernel"
    copy = "copy"
    snapshot = "snapshot"
    replay = "replay"
    import_ = "import"


group = typer.Typer(no_args_is_help=True, help="Faults: list, acknowledge, inject them.")


def register(app: typer.Typer) -> None:
    app.add_typer(group, name="fault")
    app.command()(recoveries)


@group.command("list")
def list_faults(
    job: JobOption = None,
    unacknowledged: Annotated[bool, typer.Option("--open", help="only those that nobody has acknowledged")] = False,
    limit: LimitOption = 50,
    output: OutputOption = Output.table,
) -> None:
    """Faults, newest first."""
    client = connect()
    rows = client.get(
        "/v1/faults", job=find_job(client, job) if job else None, acknowledged=False if unacknowledged else None,
        limit=limit,
    )  # fmt: skip
    columns = {
        "id": "FAULT", "at": "TIME", "job": "JOB", "kind": "KIND", "text": "WHAT", "op": "OPERATION", "error": "ERROR",
        "sequence": "RECORD", "process_id": "PROCESS", "acknowledged_by": "SEEN TO BY",
    }  # fmt: skip
    if output is Output.table:
        rows = with_jobs(rows)
        for row in rows:
            row["acknowledged_by"] = row["acknowledged_by"] and requestor_name(row["acknowledged_by"])
    show(rows, output, columns, "no faults",
         optional=("process_id", "sequence", "error", "op", "acknowledged_by", "kind"))  # fmt: skip


@group.command()
def ack(
    fault: Annotated[int, typer.Argument(min=0, help="its number, in the column FAULT of the list")],
    output: OutputOption = Output.table,
) -> None:
    """Say that you have seen to a fault. Nothing else changes."""
    row = connect().post(f"/v1/faults/{fault}:ack")
    if output is Output.json:
        show_json(row)
    else:
        console.print(f"fault {row['id']} was acknowledged by {escape(requestor_name(row['acknowledged_by']))}")


@group.command()
def inject(
    job: JobArgument,
    kind: Annotated[Kind, typer.Option(help="what is injected")] = Kind.kill,
    point: Annotated[Point, typer.Option(help="where it is injected")] = Point.record,
    sequence: Annotated[int, typer.Option(min=0, help="the first record it applies to")] = 0,
    error: Annotated[int, typer.Option(min=1, max=999, help="the CUresult of a fault")] = 700,
    process: Annotated[str | None, typer.Option(help="only this process of the job")] = None,
    address: Annotated[
        int | None,
        typer.Option(min=0, help="of a flip: device memory; default: where the process is compared with its replicas"),
    ] = None,
    output: OutputOption = Output.table,
) -> None:
    """Arm a fault that is injected once, to see the recovery."""
    client = connect()
    body = {"kind": kind, "point": point, "sequence": sequence, "error": error, "process": process}
    if address is not None:
        body["address"] = address
    armed = client.post(f"/v1/jobs/{find_job(client, job)}/faults:inject", body)
    if output is Output.json:
        show_json(armed)
    else:
        console.print(f"armed in {len(armed)} process(es)")


def recoveries(job: JobOption = None, limit: LimitOption = 50, output: OutputOption = Output.table) -> None:
    """Recoveries, newest first: the time from the fault to each phase."""
    client = connect()
    rows = client.get("/v1/recoveries", job=find_job(client, job) if job else None, limit=limit)
    columns = {
        "at": "TIME", "job": "JOB", "outcome": "OUTCOME", "expected_ms": "EXPECTED",
        "detected_ms": "DETECTED", "standby_ready_ms": "STANDBY",
        "mapped_ms": "MAPPED", "restored_ms": "RESTORED", "replayed_ms": "REPLAYED", "resumed_ms": "RESUMED",
        "records": "RECORDS", "compared": "COMPARED", "exact": "EXACT", "attempts": "ATTEMPTS", "cause": "CAUSE",
    }  # fmt: skip
    show(rows if output is Output.json else with_jobs(rows), output, columns, "no recoveries",
         optional=("compared", "mapped_ms", "standby_ready_ms", "restored_ms", "replayed_ms", "detected_ms", "attempts",
                   "records", "cause", "exact"))  # fmt: skip
