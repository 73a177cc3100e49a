"""`xmigctl`, the command line.

Exit codes: 0 done · 1 refused or failed · 2 wrong usage · 3 no daemon · of `run`: the program's own, 126 or 127 if it
cannot be started.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from enum import StrEnum
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from xmigd.client import Client, NoDaemon
from xmigd.errors import XmigError
from xmigd.settings import Settings

EXIT_FAILED, EXIT_NO_DAEMON, EXIT_NOT_EXECUTABLE, EXIT_NOT_FOUND = 1, 3, 126, 127

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Run and watch programs under xMIG.")
faults_app = typer.Typer(help="Faults: list them, inject them.")
app.add_typer(faults_app, name="faults", invoke_without_command=True)
console = Console(width=None if sys.stdout.isatty() else 240)


class Output(StrEnum):
    table = "table"
    json = "json"


OutputOption = Annotated[Output, typer.Option("--output", "-o", help="table or json")]
JobOption = Annotated[str | None, typer.Option("--job", help="only this job: its id, the beginning of it, or its name")]
LimitOption = Annotated[int, typer.Option("--limit", min=1, max=1000, help="how many, newest first")]


def connect() -> Client:
    return Client(Settings())


def find_job(client: Client, wanted: str) -> str:
    """A job's id, from the id, its beginning, or the job's name (the newest with it)."""
    jobs = client.get("/v1/jobs", limit=1000)
    by_id = [job["id"] for job in jobs if job["id"].startswith(wanted)]
    by_name = [job["id"] for job in jobs if job["name"] == wanted]
    if len(by_id) > 1:
        raise XmigError(f"{wanted!r} begins {len(by_id)} jobs' ids", hint="write more of it")
    for found in (*by_id, *by_name):
        return str(found)
    raise XmigError(f"there is no job {wanted!r}", hint="xmigctl ps --all lists them")


def show(rows: list[dict[str, Any]], output: Output, columns: dict[str, str], empty: str) -> None:
    if output is Output.json:
        print(json.dumps(rows, indent=2))
        return
    if not rows:
        console.print(empty)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in columns.values():
        free_text = title in ("WHAT", "CAUSE", "NAME")
        table.add_column(title, justify="right" if title.endswith("ms") else "left", no_wrap=not free_text)
    for row in rows:
        table.add_row(*(cell(name, row[name]) for name in columns))
    console.print(table)


def cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name in ("id", "job_id", "process_id"):
        return str(value)[:12]
    if name == "at" or name.endswith("_at"):
        return time.strftime("%H:%M:%S", time.localtime(value)) + f".{int(value % 1 * 1000):03d}"
    if name.endswith("_ms"):
        return f"{value:.1f}"
    if name.endswith("_bytes"):
        return f"{value / (1 << 20):.1f} MiB"
    if isinstance(value, bool):
        return "yes" if value else "[red]no[/red]"
    return escape(str(value))


@app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def run(
    command: Annotated[list[str], typer.Argument(help="the program and its arguments")],
    device: Annotated[str | None, typer.Option("--device", help="for example cpu:0; default: the least used")] = None,
    name: Annotated[str | None, typer.Option("--name", help="a name for the job; default: the program's")] = None,
    hang_timeout: Annotated[
        float | None,
        typer.Option(
            "--hang-timeout", envvar="XMIG_HANG_TIMEOUT", min=0, metavar="SECONDS",
            help="without progress for so long, its kernel counts as hung; 0: never; default: the daemon's setting",
        ),
    ] = None,
) -> None:  # fmt: skip
    """Run a program under xMIG. It takes this command's place: its exit code is the program's."""
    shown = shlex.join(command)[:4096]
    limits = {} if hang_timeout is None else {"hang_timeout": hang_timeout}
    job = connect().post("/v1/jobs", {"name": name, "command": shown, "device": device} | limits)
    preload = os.environ.get("LD_PRELOAD")
    environment = os.environ | job["environment"]
    environment["LD_PRELOAD"] = f"{job['preload']}:{preload}" if preload else job["preload"]
    try:
        os.execvpe(command[0], command, environment)
    except FileNotFoundError:
        fail(f"there is no program {command[0]!r}", EXIT_NOT_FOUND)
    except OSError as error:
        fail(f"{command[0]!r} cannot be started: {error.strerror}", EXIT_NOT_EXECUTABLE)


@app.command()
def ps(
    every: Annotated[bool, typer.Option("--all", "-a", help="those that have ended, too")] = False,
    job: JobOption = None,
    limit: LimitOption = 100,
    output: OutputOption = Output.table,
) -> None:
    """Programs that run under xMIG."""
    client = connect()
    job_id = find_job(client, job) if job else None
    rows = client.get("/v1/processes", live=not every, job=job_id, limit=limit)
    columns = {
        "id": "PROCESS", "job_id": "JOB", "job_name": "NAME", "pid": "PID", "device": "DEVICE", "state": "STATE",
        "server_pid": "SERVER", "standby": "STANDBY", "generation": "GENERATION", "held_bytes": "HELD",
        "shadow_bytes": "SHADOW", "server_bytes": "SERVERS",
        "faults": "FAULTS", "recoveries": "RECOVERIES",
    }  # fmt: skip
    show(rows, output, columns, "nothing runs under xMIG")


@app.command()
def stop(job: Annotated[str, typer.Argument(help="the job: its id, the beginning of it, or its name")]) -> None:
    """Stop a job's programs."""
    client = connect()
    answer = client.delete(f"/v1/jobs/{find_job(client, job)}")
    console.print(f"{answer['signalled']} program(s) were sent SIGTERM")


@faults_app.callback()
def faults(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        list_faults()


@faults_app.command("list")
def list_faults(job: JobOption = None, limit: LimitOption = 50, output: OutputOption = Output.table) -> None:
    """Faults, newest first."""
    client = connect()
    rows = client.get("/v1/faults", job=find_job(client, job) if job else None, limit=limit)
    columns = {
        "at": "TIME", "job_id": "JOB", "process_id": "PROCESS", "kind": "KIND", "sequence": "RECORD", "op": "OPERATION",
        "error": "ERROR", "text": "WHAT",
    }  # fmt: skip
    show(rows, output, columns, "no faults")


@faults_app.command()
def inject(
    job: Annotated[str, typer.Argument(help="the job: its id, the beginning of it, or its name")],
    kind: Annotated[str, typer.Option(help="kill, fault or hang")] = "kill",
    point: Annotated[str, typer.Option(help="where: record, kernel, copy, cut or redo")] = "record",
    sequence: Annotated[int, typer.Option(help="the first record it applies to")] = 0,
    error: Annotated[int, typer.Option(help="the CUresult of a fault")] = 700,
    process: Annotated[str | None, typer.Option(help="only this process of the job")] = None,
) -> None:
    """Arm a fault that strikes once, to see the recovery."""
    client = connect()
    body = {"kind": kind, "point": point, "sequence": sequence, "error": error, "process": process}
    armed = client.post(f"/v1/jobs/{find_job(client, job)}/faults:inject", body)
    console.print(f"armed in {len(armed)} process(es)")


@app.command()
def recoveries(job: JobOption = None, limit: LimitOption = 50, output: OutputOption = Output.table) -> None:
    """Recoveries, newest first: milliseconds from the fault to each phase."""
    client = connect()
    rows = client.get("/v1/recoveries", job=find_job(client, job) if job else None, limit=limit)
    columns = {
        "at": "TIME", "job_id": "JOB", "outcome": "OUTCOME", "detected_ms": "DETECTED ms",
        "standby_ready_ms": "STANDBY ms", "mapped_ms": "MAPPED ms", "restored_ms": "RESTORED ms",
        "redone_ms": "REDONE ms", "resumed_ms": "RESUMED ms", "records": "RECORDS", "compared": "COMPARED",
        "exact": "EXACT", "attempts": "ATTEMPTS", "cause": "CAUSE",
    }  # fmt: skip
    show(rows, output, columns, "no recoveries")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False)
def demo(context: typer.Context) -> None:
    """Train on this machine while its server is killed: what make demo does."""
    from xmigd.demo.main import run as run_demo

    raise typer.Exit(run_demo(context.args))


def fail(message: str, code: int) -> NoReturn:
    print(f"xmigctl: {message}", file=sys.stderr)
    raise typer.Exit(code)


def main() -> None:
    try:
        app()
    except NoDaemon as error:
        print(f"xmigctl: {error}", file=sys.stderr)
        sys.exit(EXIT_NO_DAEMON)
    except XmigError as error:
        print(f"xmigctl: {error}", file=sys.stderr)
        sys.exit(EXIT_FAILED)


if __name__ == "__main__":
    main()
