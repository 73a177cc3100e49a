"""Jobs and their processes: run, ps, stop; job list, show."""

from __future__ import annotations

import contextlib
import enum
import os
import shlex
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xmigd.cli import scope
from xmigd.cli.common import (
    DeviceOption,
    ExternalIdOption,
    JobArgument,
    JobOption,
    LabelOption,
    LimitOption,
    SortOption,
    StateOption,
    UserOption,
    connect,
    find_job,
    labels_text,
    parse_labels,
    parse_size,
    parse_time,
    place,
)
from xmigd.cli.exits import CommandError, Exit
from xmigd.cli.output import Output, OutputOption, console, escape, exit_text, show, show_json, show_one, with_jobs
from xmigd.errors import XmigError
from xmigd.place import Place

if TYPE_CHECKING:
    from xmigd.published import Published

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


class Priority(enum.StrEnum):
    """xmigd.records.Priority"""

    critical = "critical"
    normal = "normal"
    best_effort = "best-effort"


class Policy(enum.StrEnum):
    """xmigd.records.ReplicaPolicy"""

    report = "report"
    restore = "restore"
    stop = "stop"


class Network(enum.StrEnum):
    """xmigd.cli.apart.Network"""

    private = "private"
    job = "job"
    host = "host"


class OnSignal(enum.StrEnum):
    """Those that mean nothing in particular."""

    usr1 = "USR1"
    usr2 = "USR2"


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
    label: Annotated[
        list[str] | None,
        typer.Option(
            "--label", envvar="XMIG_LABELS", metavar="KEY=VALUE",
            help="by which it is found again; may be given again; several in the variable are separated by spaces",
        ),
    ] = None,
    external_id: Annotated[
        str | None,
        typer.Option(
            "--external-id", envvar="XMIG_EXTERNAL_ID", metavar="ID", help="what its scheduler calls it: slurm:4711"
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory", metavar="SIZE",
            help="device memory that its processes have together, and each sees, of each device, 20GiB; refused where "
            "that is not free",
        ),
    ] = None,
    sm_share: Annotated[
        int | None,
        typer.Option(
            "--sm-share", min=1, max=100, metavar="PERCENT",
            help="of its device's multiprocessors, for each of its processes; the device is shared through MPS",
        ),
    ] = None,
    walltime: Annotated[
        str | None,
        typer.Option(
            "--walltime", envvar="XMIG_WALLTIME", metavar="TIME",
            help="that it takes at most, as you expect: 90s, 30m, 2h, 1d; predictions begin with it, nothing ends it",
        ),
    ] = None,
    priority: Annotated[
        Priority | None, typer.Option("--priority", help="its class where devices are shared; critical needs a grant")
    ] = None,
    checkpoint_on_signal: Annotated[
        OnSignal | None,
        typer.Option(
            "--checkpoint-on-signal",
            help="make a checkpoint when this command gets the signal; the program does not get it",
        ),
    ] = None,
    stop_after_checkpoint: Annotated[
        bool, typer.Option("--stop-after-checkpoint", help="end the program where that checkpoint was made")
    ] = False,
    lossy_optimizer_state: Annotated[
        str | None,
        typer.Option(
            "--lossy-optimizer-state", envvar="XMIG_LOSSY_OPTIMIZER_STATE", metavar="ENTRY,ENTRY",
            help="of the state of PyTorch's optimizers, such as exp_avg,exp_avg_sq: what checkpoint create --lossy may "
            "round; other checkpoints are exact",
        ),
    ] = None,
    movable: Annotated[
        bool,
        typer.Option(
            "--movable", envvar="XMIG_MOVABLE",
            help="in namespaces of its own, so that its checkpoints can be restored beside it; needs root",
        ),
    ] = False,
    network: Annotated[
        Network,
        typer.Option(
            "--network",
            help="with --movable: private has only the loopback device; job leads to the same job's parts on --nodes, "
            "too; host is the machine's",
        ),
    ] = Network.private,
    publish: Annotated[
        list[str] | None,
        typer.Option(
            "--publish", metavar="[[ADDRESS:]PORT:]INNER",
            help="with --movable: a port of its own network, to be reached from this machine, or at the address",
        ),
    ] = None,
) -> None:  # fmt: skip
    """Run a program under xMIG. This command ends as the program does, with its exit code or by its signal."""
    from xmigd.cli.launch import Reactions, become, end_as, tell, wait_for
    from xmigd.cli.starting import name_optimizer_state, readable, register_job

    if strict and checkpoint_on_signal is not None:
        raise CommandError("--checkpoint-on-signal is not possible with --strict", exit_code=Exit.USAGE,
                           hint="xmigctl checkpoint create makes one")  # fmt: skip
    if strict and movable:
        raise CommandError("--movable is not possible with --strict", exit_code=Exit.USAGE)
    if publish and (not movable or network is Network.host):
        raise CommandError("--publish is for --movable with a private network", exit_code=Exit.USAGE)
    if network is Network.job and not (movable and nodes):
        raise CommandError("--network job is for --movable with --nodes", exit_code=Exit.USAGE)
    shown = readable(shlex.join(command))[:4096]
    body: dict[str, Any] = {
        "name": None if name is None else readable(name), "command": shown,
        "device": None if device is None else readable(device),
        "hang_timeout": hang_timeout, "watch": True, "strict": strict,
        "nodes": [] if nodes is None else nodes.split(","),
    }  # fmt: skip
    # Daemons of earlier versions do not know these.
    if replica_policy is not None:
        body["replica_policy"] = replica_policy.value
    if label:
        body["labels"] = parse_labels(label)
    if external_id is not None:
        body["external_id"] = readable(external_id)
    if memory is not None:
        body["memory_quota"] = parse_size(memory)
    if sm_share is not None:
        body["sm_share"] = sm_share
    if walltime is not None:
        body["walltime_s"] = parse_time(walltime)
    if priority is not None:
        body["priority"] = priority.value
    if network is Network.job:
        body["network"] = True
    published: list[Published] = []
    if publish:
        from xmigd.published import listen

        published = listen(publish, uid=os.geteuid())
    client = connect()
    job, environment = register_job(client, body)
    if lossy_optimizer_state:
        name_optimizer_state(environment, lossy_optimizer_state)
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
        reacts: Reactions | None = None
        if checkpoint_on_signal is not None:
            from xmigd.cli.on_signal import reactions

            reacts = reactions(client, job["id"], checkpoint_on_signal.value, stop=stop_after_checkpoint)
        if movable:
            from xmigd.cli.apart import run_apart

            status = run_apart(command, environment, network.value, reacts, published, job.get("network"))
            tell(report, status)
            end_as(status)
        if reacts is not None:
            wait_for(command, environment, report, reacts)
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


def ps(
    every: Annotated[bool, typer.Option("--all", "-a", help="those that have ended, too")] = False,
    job: JobOption = None,
    state: StateOption = None,
    user: UserOption = None,
    label: LabelOption = None,
    external_id: ExternalIdOption = None,
    device: DeviceOption = None,
    sort: SortOption = None,
    wide: Annotated[bool, typer.Option("--wide", "-w", help="with the jobs' labels, external ids and shares")] = False,
    limit: LimitOption = 100,
    output: OutputOption = Output.table,
) -> None:
    """Programs that run under xMIG, by their jobs if these are chosen or sorted."""
    client = connect()
    chosen = _chosen(state=state, user=user, label=label, external_id=external_id, device=device, sort=sort)
    job_id = find_job(client, job) if job else None
    jobs: dict[str, dict[str, Any]] = {}
    if chosen or wide:
        listed = client.get("/v1/jobs", live=not every, limit=1000, **chosen)
        jobs = {each["id"]: each for each in listed}
    rows = client.get("/v1/processes", live=not every, job=job_id, limit=1000 if chosen else limit)
    if chosen:
        places = {id: place for place, id in enumerate(jobs)}
        rows = sorted((row for row in rows if row["job_id"] in places), key=lambda row: places[row["job_id"]])[:limit]
    columns = {
        "job": "JOB", "id": "PROCESS", "external_id": "EXTERNAL ID", "labels": "LABELS", "pid": "PID", "user": "USER",
        "device": "DEVICE", "sm_share": "SM SHARE", "state": "STATE", "expected_stall_ms": "STALL", "exit": "EXIT",
        "location": "WHERE", "live_bytes": "MEMORY", "held_bytes": "HELD", "shadow_bytes": "SHADOW",
        "server_bytes": "SERVERS", "standby": "STANDBY", "server_pid": "SERVER", "generation": "GENERATION",
        "faults": "FAULTS", "recoveries": "RECOVERIES", "started_at": "BEGAN",
    }  # fmt: skip
    if not every:
        del columns["exit"]
    if wide:
        rows = [row | {name: jobs.get(row["job_id"], {}).get(name) for name in ("external_id", "labels", "sm_share")}
                for row in rows]  # fmt: skip
    else:
        del columns["external_id"], columns["labels"], columns["sm_share"]
    for name in ("location", "expected_stall_ms"):  # which daemons of earlier versions do not tell
        if rows and name not in rows[0]:
            del columns[name]
    if output is Output.table:
        rows = [row | {"exit": exit_text(row), "state": _state(row)} for row in with_jobs(rows)]
        if wide:
            rows = [row | {"labels": labels_text(row["labels"] or {})} for row in rows]
    empty = "no such program runs under xMIG" if chosen else "no program that you may see runs under xMIG"
    show(rows, output, columns, empty, optional=LESS_REQUESTED)


def _state(row: dict[str, Any]) -> str:
    if row.get("protected", True):
        return str(row["state"])
    return "not protected" if row["state"] == "unprotected" else f"{row['state']}, not protected"


def _chosen(**options: Any) -> dict[str, Any]:
    """Parameters of the list of jobs: those that were given."""
    return {name: value for name, value in options.items() if value not in (None, [])}


@group.command("list")
def list_jobs(
    state: StateOption = None,
    user: UserOption = None,
    label: LabelOption = None,
    external_id: ExternalIdOption = None,
    device: DeviceOption = None,
    sort: SortOption = None,
    reverse: Annotated[bool, typer.Option("--reverse", help="the other way round")] = False,
    limit: LimitOption = 50,
    output: OutputOption = Output.table,
) -> None:
    """Jobs, newest first."""
    chosen = _chosen(
        state=state, user=user, label=label, external_id=external_id, device=device, sort=sort,
        reverse=True if reverse else None,
    )  # fmt: skip
    rows = connect().get("/v1/jobs", limit=limit, **chosen)
    columns = {
        "name": "JOB", "id": "ID", "state": "STATE", "exit": "EXIT", "user": "USER", "device": "DEVICE",
        "memory_bytes": "MEMORY", "created_at": "BEGAN", "duration_s": "TOOK", "faults": "FAULTS",
        "recoveries": "RECOVERIES", "external_id": "EXTERNAL ID", "labels": "LABELS", "command": "COMMAND",
    }  # fmt: skip
    for name in ("memory_bytes", "external_id", "labels"):
        if not any(row.get(name) for row in rows):
            del columns[name]
    if output is Output.table:
        rows = [
            row | {"exit": exit_text(row), "labels": labels_text(row.get("labels", {})),
                   "device": ", ".join(row.get("devices", ())) or row["device"]}
            for row in rows
        ]  # fmt: skip
    show(rows, output, columns, "no such job" if chosen else "no jobs yet: xmigctl run -- PROGRAM",
         optional=("command", "user", "recoveries", "faults", "device", "duration_s", "labels"))  # fmt: skip


@group.command("label")
def change_labels(
    job: JobArgument,
    labels: Annotated[list[str] | None, typer.Argument(help="KEY=VALUE sets one, KEY- removes one")] = None,
    external_id: Annotated[
        str | None, typer.Option("--external-id", help="what its scheduler calls it; empty: nothing")
    ] = None,
    output: OutputOption = Output.table,
) -> None:
    """Change a job's labels and its external id."""
    client = connect()
    path = f"/v1/jobs/{find_job(client, job)}"
    removed = [each for each in labels or [] if each.endswith("-") and "=" not in each]
    body: dict[str, Any] = {"labels": parse_labels(each for each in labels or [] if each not in removed)}
    body["labels"] |= {each[:-1]: None for each in removed}
    if external_id is not None:
        body["external_id"] = external_id or None
    row = client.patch(path, body, client.get_tagged(path)[1])
    if output is Output.json:
        show_json(row)
        return
    known_as = f", external id {escape(row['external_id'])}" if row["external_id"] else ""
    console.print(f"{escape(row['name'])}: {escape(labels_text(row['labels'])) or 'no labels'}{known_as}")


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
