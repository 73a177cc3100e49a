"""What schedulers request: preempt, continue, bulk."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from xmigd.cli.common import JobArgument, connect, find_job, parse_time
from xmigd.cli.exits import CommandError, Exit
from xmigd.cli.follow import OnInterrupt, OnInterruptOption, WaitOption, carry_out
from xmigd.cli.output import Output, OutputOption, console, escape, show
from xmigd.words import milliseconds


class Prefer(StrEnum):
    """xmigd.scheduling.schemas.Prefer"""

    suspend = "suspend"
    checkpoint = "checkpoint"
    either = "either"


class Action(StrEnum):
    """xmigd.scheduling.schemas.Action"""

    suspend = "suspend"
    resume = "resume"
    preempt = "preempt"
    continue_ = "continue"
    migrate = "migrate"
    end = "end"


class Place(StrEnum):
    host = "host"
    file = "file"


DeadlineOption = Annotated[
    str, typer.Option("--deadline", metavar="TIME", help="30s, 2m, ...: not done then, it is taken back")
]
PreferOption = Annotated[
    Prefer, typer.Option("--prefer", help="either: suspended to host memory or files, or as a checkpoint")
]
DevicesOption = Annotated[
    list[str] | None, typer.Option("--device", help="another one than it had; may be given again: in turn")
]


def register(app: typer.Typer) -> None:
    app.command()(preempt)
    app.command("continue")(continue_job)
    app.command()(bulk)


def preempt(
    job: JobArgument,
    deadline: DeadlineOption = "30s",
    prefer: PreferOption = Prefer.either,
    wait: WaitOption = True,
    on_interrupt: OnInterruptOption = OnInterrupt.cancel,
    output: OutputOption = Output.table,
) -> None:
    """Give a job's devices back within a deadline: suspended, or as a checkpoint. If that is not done then, or not
    possible, the job goes on running."""
    client = connect()
    path = f"/v1/jobs/{find_job(client, job)}:preempt"
    body = {"deadline_seconds": parse_time(deadline), "prefer": prefer.value}
    operation = carry_out(client, path, body, wait=wait, output=output, on_interrupt=on_interrupt)
    if operation is not None and output is not Output.json:
        result = operation["result"]
        after = "" if result["ms"] is None else f", after {milliseconds(result['ms'])}"
        if result["how"] == "checkpoint":
            console.print(f"{escape(job)} is checkpoint [bold]{result['checkpoint']}[/bold], and has ended{after}")
        else:
            place = "host memory" if result["process_location"] == "host" else "files"
            console.print(f"{escape(job)} is suspended, its state in {place}{after}")
        console.print(f"[dim]xmigctl continue {escape(job)}[/dim]")


def continue_job(
    job: JobArgument,
    device: DevicesOption = None,
    wait: WaitOption = True,
    on_interrupt: OnInterruptOption = OnInterrupt.cancel,
    output: OutputOption = Output.table,
) -> None:
    """Let a job go on that was preempted: from host memory or files, or from its checkpoint as a new job."""
    client = connect()
    path = f"/v1/jobs/{find_job(client, job)}:continue"
    body = {"devices": device or []}
    operation = carry_out(client, path, body, wait=wait, output=output, on_interrupt=on_interrupt)
    if operation is not None and output is not Output.json:
        result = operation["result"]
        if "checkpoint" in result:
            console.print(
                f"{escape(job)} goes on as job [bold]{result['job'][:12]}[/bold], on {escape(result['device'])}"
            )
        else:
            ranks = result.get("ranks") or [result]
            console.print(
                f"{escape(job)} goes on, on {', '.join(dict.fromkeys(escape(each['target']) for each in ranks))}"
            )


def bulk(
    action: Annotated[Action, typer.Argument(help="what is done to each job")],
    jobs: Annotated[list[str] | None, typer.Argument(help="the jobs: ids, beginnings of them, names")] = None,
    label: Annotated[
        list[str] | None,
        typer.Option("--label", metavar="KEY[=VALUE]", help="in the place of jobs: those with all of these labels"),
    ] = None,
    to: Annotated[Place, typer.Option("--to", help="of suspend: where their state waits")] = Place.host,
    device: Annotated[list[str] | None, typer.Option("--device", help="of resume and continue; in turn")] = None,
    target: Annotated[str | None, typer.Option("--target", help="of migrate: the device")] = None,
    deadline: DeadlineOption = "30s",
    prefer: PreferOption = Prefer.either,
    wait: WaitOption = True,
    on_interrupt: OnInterruptOption = OnInterrupt.cancel,
    output: OutputOption = Output.table,
) -> None:
    """Do the same to many jobs. Each has an outcome of its own; the exit code is 6 if not all of them succeeded."""
    client = connect()
    if bool(jobs) == bool(label):
        raise CommandError("name either jobs or labels", exit_code=Exit.USAGE)
    body: dict[str, Any] = {
        "action": action.value, "jobs": [find_job(client, job) for job in jobs or []] or None, "labels": label or None,
        "to": to.value, "devices": device or [], "target": target, "deadline_seconds": parse_time(deadline),
        "prefer": prefer.value,
    }  # fmt: skip
    operation = carry_out(client, "/v1/jobs:bulk", body, wait=wait, output=output, on_interrupt=on_interrupt)
    if operation is None:
        return
    result = operation["result"]
    if output is not Output.json:
        columns = {"job": "JOB", "state": "OUTCOME", "code": "CODE", "why": "WHY"}
        show([each | {"job": each["job"][:12]} for each in result["outcomes"]], output, columns, "no jobs")
    if result["failed"]:
        raise SystemExit(Exit.OPERATION_FAILED)
