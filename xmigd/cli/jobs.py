"""Jobs and their processes: run, ps, stop."""

from __future__ import annotations

import os
import shlex
from typing import Annotated

import typer

from xmigd import log
from xmigd.cli import scope
from xmigd.cli.common import JobArgument, JobOption, LimitOption, connect, find_job, settings
from xmigd.cli.exits import CommandError, Exit
from xmigd.cli.output import Output, OutputOption, console, show, show_json
from xmigd.devices.visible import names_devices


def register(app: typer.Typer) -> None:
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
) -> None:  # fmt: skip
    """Run a program under xMIG. It takes this command's place: its exit code is the program's."""
    shown = shlex.join(command)[:4096]
    body = {"name": name, "command": shown, "device": device, "hang_timeout": hang_timeout}
    inherited = dict(os.environ)
    if device is not None:
        inherited.pop("CUDA_VISIBLE_DEVICES", None)
    elif names_devices(inherited.get("CUDA_VISIBLE_DEVICES", "")):
        body["visible_devices"] = inherited.pop("CUDA_VISIBLE_DEVICES")
    job = connect().post("/v1/jobs", body)
    preload = inherited.get("LD_PRELOAD")
    defaults = {} if inherited.get("XMIG_CACHED_BLOCKS") == "keep" else job["defaults"]
    environment = defaults | inherited | job["environment"]
    environment["LD_PRELOAD"] = f"{job['preload']}:{preload}" if preload else job["preload"]
    config = settings()
    if config.job_scopes:
        log.configure(config.log_level, json=config.log_json)
        scope.enter(f"xmig-job-{job['id'][:12]}.scope", f"{job['name']}, under xMIG")
    try:
        os.execvpe(command[0], command, environment)
    except FileNotFoundError:
        raise CommandError(f"there is no program {command[0]!r}", exit_code=Exit.NO_PROGRAM) from None
    except OSError as error:
        why = f"{command[0]!r} cannot be started: {error.strerror}"
        raise CommandError(why, exit_code=Exit.NOT_EXECUTABLE) from None


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
        "location": "WHERE", "server_pid": "SERVER", "standby": "STANDBY", "generation": "GENERATION",
        "expected_stall_ms": "STALL", "held_bytes": "HELD", "shadow_bytes": "SHADOW", "server_bytes": "SERVERS",
        "faults": "FAULTS", "recoveries": "RECOVERIES",
    }  # fmt: skip
    for name in ("location", "expected_stall_ms"):  # which daemons of earlier versions do not tell
        if rows and name not in rows[0]:
            del columns[name]
    show(rows, output, columns, "nothing runs under xMIG")


def stop(job: JobArgument, output: OutputOption = Output.table) -> None:
    """Stop a job's programs: SIGTERM, and SIGKILL after a grace."""
    client = connect()
    answer = client.delete(f"/v1/jobs/{find_job(client, job)}")
    if output is Output.json:
        show_json(answer)
    else:
        console.print(f"{answer['signalled']} program(s) were sent SIGTERM")
