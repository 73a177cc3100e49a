"""Jobs and their processes: run, ps, stop; job list, show."""

from __future__ import annotations

import contextlib
import enum
import os
import shlex
from typing import Annotated, Any

import typer

from xmigd.cli import scope
from xmigd.cli.common import JobArgument, JobOption, LimitOption, connect, find_job, place
from xmigd.cli.exits import CommandError, Exit
from xmigd.cli.output import Output, OutputOption, console, exit_text, show, show_json, show_one, with_jobs
from xmigd.devices.visible import names_devices
from xmigd.errors import XmigError
from xmigd.place import Place

# Columns of `ps` that a narrow terminal does without.
LESS_REQUESTED = (
    "generation",
    "server_pid",
    "server_bytes",
    "shadow_bytes",
    "held_bytes",
    "standby",
    "location",
    "user",
    "started_at",
    "faults",
    "recoveries",
    "live_bytes",
)


class Policy(enum.StrEnum):
    """xmigd.records.ReplicaPolicy"""

    report = "report"
    restore = "restore"
    stop = "stop"


group = typer.Typer(no_args_is_help=True, help="Jobs: what runs, what has ended, and with what.")


def register(app: typer.Typer) -> None:
    app.add_typer(group, name="job")
    app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})(run)
    app.command()(ps)
    app.command()(stop)


def run(
    command: Annotated[list[str], typer.Argument(help="the program and its arguments")],
    device: Annotated[
        str | None,
        typer.Option("--device", help="for example cuda:0,1; default: as CUDA_VISIBLE_DEVICES says, or the least used"),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="a name for the job; default: the program's")] = None,
    hang_timeout: Annotated[
        float | None,
        typer.Option(
            "--hang-timeout", envvar="XMIG_HANG_TIMEOUT", min=0, metavar="SECONDS",
            help="without progress for so long, its kernel counts as hung; 0: never; default: the daemon's setting",
        ),
    ] = None,
    replica_policy: Annotated[
        Policy | None,
        typer.Option(
            "--replica-policy", envvar="XMIG_REPLICA_POLICY",
            help="when the memory of a rank differs from that of its replicas; default: the daemon's setting",
        ),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="end the job, with exit code 10, when it gets at the genuine driver")
    ] = False,
    nodes: Annotated[
        str | None,
        typer.Option(
            "--nodes", envvar="XMIG_NODES", metavar="NAME,NAME",
            help="nodes that its ranks are on, the same on each of them; the first one coordinates",
        ),
    ] = None,
) -> None:  # fmt: skip
    """Run a program under xMIG. This command ends as the program does, with its exit code or by its signal."""
    from xmigd.cli.launch import become, tell, wait_for

    shown = _readable(shlex.join(command))[:4096]
    body: dict[str, Any] = {
        "name": None if name is None else _readable(name), "command": shown,
        "device": None if device is None else _readable(device),
        "hang_timeout": hang_timeout, "watch": True, "strict": strict,
        "nodes": [] if nodes is None else nodes.split(","),
    }  # fmt: skip
    if replica_policy is not None:  # daemons of earlier versions do not know it
        body["replica_policy"] = replica_policy.value
    inherited = dict(os.environ)
    inherited.pop("XMIG_STDERR", None)
    if device is not None:
        inherited.pop("CUDA_VISIBLE_DEVICES", None)
    elif names_devices(inherited.get("CUDA_VISIBLE_DEVICES", "")):
        body["visible_devices"] = _readable(inherited.pop("CUDA_VISIBLE_DEVICES"))
    client = connect()
    job = client.post("/v1/jobs", body)
    # Daemons of earlier versions do not tell everything.
    defaults = {} if inherited.get("XMIG_CACHED_BLOCKS") == "keep" else job.get("defaults", {})
    environment = defaults | inherited | job["environment"]
    for variable, ours in (("LD_PRELOAD", job["preload"]), ("LD_LIBRARY_PATH", job.get("library_path"))):
        theirs = inherited.get(variable)
        if ours is not None:
            environment[variable] = f"{ours}:{theirs}" if theirs else ours
    if (stderr := _own_stderr()) is not None:
        environment["XMIG_STDERR"] = stderr
    where = place()
    if where.is_on("job_scopes") and scope.has_a_bus():
        _configure_log(where)
        scope.enter(f"xmig-job-{job['id'][:12]}.scope", f"{job['name']}, under xMIG")
    path = f"/v1/jobs/{job['id']}:exited"

    def report(status: int) -> None:
        if os.WIFSIGNALED(status):
            client.post(path, {"exit_signal": os.WTERMSIG(status)})
        else:
            client.post(path, {"exit_code": os.WEXITSTATUS(status)})

    try:
        if strict:
            from xmigd.cli.strict import run_strictly

            status = run_strictly(command, environment, client, job["id"])
            tell(report, status)
            raise typer.Exit(code if (code := os.waitstatus_to_exitcode(status)) >= 0 else 128 - code)
        if job["watched"]:
            become(command, environment)
        wait_for(command, environment, report)
    except CommandError as failure:
        error = failure
    except FileNotFoundError:
        error = CommandError(f"there is no program {command[0]!r}", exit_code=Exit.NO_PROGRAM)
    except OSError as failure:
        why = f"{command[0]!r} cannot be started: {failure.strerror}"
        error = CommandError(why, exit_code=Exit.NOT_EXECUTABLE)
    with contextlib.suppress(XmigError):
        report(error.exit_code << 8)
    raise error


def _configure_log(where: Place) -> None:
    from xmigd import log

    level = str(where.values.get("log_level", "info"))
    log.configure(level if level in ("debug", "info", "warning", "error") else "info")


def _own_stderr() -> str | None:
    """The file that is this command's standard error, for the shim: is the program's descriptor 2 still the same?"""
    try:
        status = os.fstat(2)
    except OSError:
        return None
    return f"{status.st_dev}:{status.st_ino}"


def _readable(words: str) -> str:
    """Bytes of the command line that are not UTF-8, as \\xff and the like: the program gets them as they are."""
    return os.fsencode(words).decode(errors="backslashreplace")


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
        "job": "JOB", "id": "PROCESS", "pid": "PID", "user": "USER", "device": "DEVICE", "state": "STATE",
        "expected_stall_ms": "STALL", "exit": "EXIT",
        "location": "WHERE", "live_bytes": "MEMORY", "held_bytes": "HELD", "shadow_bytes": "SHADOW",
        "server_bytes": "SERVERS", "standby": "STANDBY", "server_pid": "SERVER", "generation": "GENERATION",
        "faults": "FAULTS", "recoveries": "RECOVERIES", "started_at": "BEGAN",
    }  # fmt: skip
    if not every:
        del columns["exit"]
    for name in ("location", "expected_stall_ms"):  # which daemons of earlier versions do not tell
        if rows and name not in rows[0]:
            del columns[name]
    if output is Output.table:
        rows = [row | {"exit": exit_text(row), "state": _state(row)} for row in with_jobs(rows)]
    show(rows, output, columns, "nothing runs under xMIG", optional=LESS_REQUESTED)


def _state(row: dict[str, Any]) -> str:
    if row.get("protected", True):
        return str(row["state"])
    return "not protected" if row["state"] == "unprotected" else f"{row['state']}, not protected"


@group.command("list")
def list_jobs(
    limit: LimitOption = 50,
    output: OutputOption = Output.table,
) -> None:
    """Jobs, newest first."""
    rows = connect().get("/v1/jobs", limit=limit)
    columns = {
        "name": "JOB", "id": "ID", "state": "STATE", "exit": "EXIT", "user": "USER", "device": "DEVICE",
        "created_at": "BEGAN", "duration_s": "TOOK", "faults": "FAULTS", "recoveries": "RECOVERIES",
        "command": "COMMAND",
    }  # fmt: skip
    if output is Output.table:
        rows = [row | {"exit": exit_text(row)} for row in rows]
    show(rows, output, columns, "no jobs yet: xmigctl run -- PROGRAM",
         optional=("command", "user", "recoveries", "faults", "device", "duration_s"))  # fmt: skip


@group.command("show")
def show_job(job: JobArgument, output: OutputOption = Output.table) -> None:
    """One job: its state, and with what it ended."""
    client = connect()
    row = client.get(f"/v1/jobs/{find_job(client, job)}")
    if output is Output.table:
        row = {"name": row["name"], "state": row["state"], "exit": exit_text(row)} | row
        for name in ("uid", "exit_code", "exit_signal"):
            del row[name]
    show_one(row, output)


def stop(job: JobArgument, output: OutputOption = Output.table) -> None:
    """Stop a job's programs: SIGTERM, and SIGKILL after a grace."""
    client = connect()
    answer = client.delete(f"/v1/jobs/{find_job(client, job)}")
    if output is Output.json:
        show_json(answer)
    else:
        console.print(f"{answer['signalled']} program(s) were sent SIGTERM")
