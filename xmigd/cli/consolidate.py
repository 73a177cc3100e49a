"""Packing running jobs onto fewer devices: consolidate plan, consolidate apply."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from xmigd.cli.common import YesOption, confirm, connect, find_by_prefix, find_job
from xmigd.cli.exits import CommandError, Exit
from xmigd.cli.follow import OnInterrupt, OnInterruptOption, WaitOption, carry_out
from xmigd.cli.output import Output, OutputOption, console, escape, show, show_json, size
from xmigd.client import Client
from xmigd.words import duration, milliseconds

group = typer.Typer(no_args_is_help=True, help="Pack running jobs onto fewer devices while they run, or spread them.")

BalanceOption = Annotated[bool, typer.Option("--balance", help="even out the load instead of freeing devices")]
DeviceOption = Annotated[
    list[str] | None, typer.Option("--device", help="only these give and take processes; may be given again")
]
ExcludeDeviceOption = Annotated[
    list[str] | None, typer.Option("--exclude-device", help="it neither gives nor takes; may be given again")
]
JobsOption = Annotated[list[str] | None, typer.Option("--job", help="only these jobs move; may be given again")]
ExcludeJobOption = Annotated[
    list[str] | None, typer.Option("--exclude-job", help="it stays where it is; may be given again")
]
ApartOption = Annotated[
    list[str] | None,
    typer.Option("--apart", metavar="JOB,JOB", help="these share no device with each other; may be given again"),
]
AloneOption = Annotated[
    list[str] | None, typer.Option("--alone", help="this job shares no device with others; may be given again")
]
MaxJobsOption = Annotated[int | None, typer.Option("--max-jobs", min=1, help="on a device to which processes come")]
HeadroomOption = Annotated[
    float | None, typer.Option("--headroom", min=0, max=0.9, help="share of the memory that stays free (default 0.05)")
]
SlowDownOption = Annotated[
    float | None,
    typer.Option("--max-slow-down", min=1, help="how many times longer a job may take, as predicted (default 1.25)"),
]
BusyOption = Annotated[
    float | None,
    typer.Option("--assume-busy", min=0, max=1, help="busy share of processes whose share is unknown (default 1)"),
]
BusyOfOption = Annotated[
    list[str] | None,
    typer.Option("--busy", metavar="JOB=SHARE", help="of this job, whatever was measured; may be given again"),
]
EndsSoonOption = Annotated[
    float | None,
    typer.Option("--least-remaining", min=0, metavar="SECONDS", help="jobs that end earlier, as predicted, stay"),
]
SolverOption = Annotated[
    float | None,
    typer.Option("--solver-seconds", min=0, max=10, help="time limit of HiGHS (default 2); 0: heuristic only"),
]


def register(app: typer.Typer) -> None:
    app.add_typer(group, name="consolidate")


@group.command()
def plan(
    balance: BalanceOption = False,
    device: DeviceOption = None,
    exclude_device: ExcludeDeviceOption = None,
    job: JobsOption = None,
    exclude_job: ExcludeJobOption = None,
    apart: ApartOption = None,
    alone: AloneOption = None,
    max_jobs: MaxJobsOption = None,
    headroom: HeadroomOption = None,
    max_slow_down: SlowDownOption = None,
    assume_busy: BusyOption = None,
    busy: BusyOfOption = None,
    least_remaining: EndsSoonOption = None,
    solver_seconds: SolverOption = None,
    output: OutputOption = Output.table,
) -> None:
    """How running jobs can be packed: before and after, the moves, what stays and why. Changes nothing."""
    client = connect()
    groups = [each.split(",") for each in apart or []]
    body = {
        "objective": "balance" if balance else None, "devices": device, "exclude_devices": exclude_device,
        "jobs": _jobs(client, job), "exclude_jobs": _jobs(client, exclude_job), "alone": _jobs(client, alone),
        "apart": [_jobs(client, each) for each in groups] or None, "max_jobs_per_device": max_jobs,
        "headroom": headroom, "max_slow_down": max_slow_down, "assumed_busy_share": assume_busy,
        "busy_shares": _shares(client, busy), "solver_seconds": solver_seconds,
        "least_remaining_s": least_remaining,
    }  # fmt: skip
    made = client.post("/v1/consolidation-plans", body)
    if output is Output.json:
        show_json(made)
        return
    _show(made)
    if made["moves"]:
        console.print(f"[dim]xmigctl consolidate apply {made['id'][:12]}[/dim]")


@group.command()
def apply(
    plan: Annotated[str, typer.Argument(help="the plan: its id, or the beginning of it")],
    guard: Annotated[
        float,
        typer.Option("--guard", min=0, max=3600, metavar="SECONDS", help="watch jobs so long; 0: do not"),
    ] = 60.0,
    yes: YesOption = False,
    wait: WaitOption = True,
    on_interrupt: OnInterruptOption = OnInterrupt.cancel,
    output: OutputOption = Output.table,
) -> None:
    """Move the processes as a plan says. If one cannot be moved, or it is cancelled, all go back. Then jobs are
    watched: one that gets slower than the plan promises goes back, too."""
    client = connect()
    found = find_by_prefix(client.get("/v1/consolidation-plans", limit=1000), plan, "consolidation plan",
                           "xmigctl consolidate plan")  # fmt: skip
    if not found["moves"]:
        raise CommandError("the plan moves nothing", hint="its refusals say what stays, and why: xmigctl consolidate "
                           "plan", code="plan_empty", exit_code=Exit.REFUSED)  # fmt: skip
    if output is not Output.json:
        _show(found)
    confirm(f"Move {len(found['moves'])} process(es)?", yes)
    path = f"/v1/consolidation-plans/{found['id']}/apply"
    operation = carry_out(
        client, path, {"guard_seconds": guard}, wait=wait, output=output, on_interrupt=on_interrupt
    )  # fmt: skip
    if operation is not None and output is not Output.json:
        _show_result(operation["result"])


@group.command()
def undo(
    plan: Annotated[str, typer.Argument(help="the plan that was applied: its id, or the beginning of it")],
    yes: YesOption = False,
    wait: WaitOption = True,
    output: OutputOption = Output.table,
) -> None:
    """Move the processes of a plan that was applied back to where they were, those that live. After a restart of xmigd
    it needs the plan's whole id."""
    client = connect()
    kept = [each["id"] for each in client.get("/v1/consolidation-plans", limit=1000)]
    named = [each for each in kept if each.startswith(plan)]
    found = named[0] if len(named) == 1 else plan
    confirm(f"Undo plan {found[:12]}?", yes)
    path = f"/v1/consolidation-plans/{found}/undo"
    operation = carry_out(client, path, {}, wait=wait, output=output, on_interrupt=OnInterrupt.detach)
    if operation is not None and output is not Output.json:
        _show_result(operation["result"])


def _jobs(client: Client, names: list[str] | None) -> list[str] | None:
    return [find_job(client, name) for name in names] if names else None


def _shares(client: Client, given: list[str] | None) -> dict[str, float] | None:
    shares = {}
    for each in given or []:
        job, _, share = each.rpartition("=")
        try:
            shares[find_job(client, job)] = float(share)
        except ValueError:
            raise CommandError(
                f"{each!r} is no busy share", hint="write JOB=SHARE, as in trains=0.8", exit_code=Exit.USAGE
            ) from None
    return shares or None


def _show(plan: dict[str, Any]) -> None:
    before = {each["device"]: each for each in plan["before"]}
    rows = [
        {
            "device": after["device"], "before": _processes(before[after["device"]]),
            "before_bytes": before[after["device"]]["used_bytes"], "after": _processes(after),
            "after_bytes": after["used_bytes"], "why": after["why"] or None,
        }
        for after in plan["after"]
    ]  # fmt: skip
    columns = {"device": "DEVICE", "before": "BEFORE", "before_bytes": "MEMORY", "after": "AFTER",
               "after_bytes": "MEMORY", "why": "TAKES NONE"}  # fmt: skip
    if not any(row["why"] for row in rows):
        del columns["why"]
    show(rows, Output.table, columns, "this node has no devices")
    if plan["moves"]:
        console.print()
        columns = {"job_name": "JOB", "process": "PROCESS", "source": "FROM", "target": "TO", "memory_bytes": "MEMORY",
                   "expected_downtime_ms": "DOWNTIME", "slow_down": "SLOW-DOWN",
                   "ends_in": "ENDS IN (P90)"}  # fmt: skip
        jobs = {job["job_id"]: job for job in plan["jobs"]}
        moves = [
            move | {
                "process": move["process"][:12], "slow_down": _times(jobs[move["job_id"]]["predicted_slow_down"]),
                "ends_in": _seconds(jobs[move["job_id"]]["remaining_s_p90"]),
            }
            for move in plan["moves"]
        ]  # fmt: skip
        show(moves, Output.table, columns, "", optional=("ends_in",))
    if plan["refusals"]:
        console.print()
        refused = [each | {"process": each["process"][:12]} for each in plan["refusals"]]
        columns = {"job_name": "JOB", "process": "PROCESS", "device": "ON", "text": "WHY"}
        show(refused, Output.table, columns, "")
    console.print()
    freed = ", ".join(escape(device) for device in plan["freed"]) or "none"
    console.print(f"devices freed: [bold]{freed}[/bold]; moves: {len(plan['moves'])}{_solver(plan['solver'])}")


def _processes(device: dict[str, Any]) -> str | None:
    named = []
    for one in device["processes"]:
        step = one.get("step_ms")  # by which the guard judges it
        named.append(
            f"{one['job_name']} {size(one['memory_bytes'])}" + (f" (step {milliseconds(step)})" if step else "")
        )
    return ", ".join(named) or None


def _solver(solver: dict[str, Any]) -> str:
    if solver["why"]:
        return f"; by the heuristic: {escape(solver['why'])}"
    return "; proved to be the best" if solver["optimal"] else f"; by {solver['solver']}, and a better one may exist"


def _times(slow_down: float | None) -> str | None:
    """Of something that is unknown nothing."""
    return None if slow_down is None else f"{slow_down:.2f}x"


def _seconds(remaining: float | None) -> str | None:
    return None if remaining is None else duration(remaining)


def _show_result(result: dict[str, Any]) -> None:
    for part in result["parts"]:
        state = "" if part["state"] == "succeeded" else f"  {part['state'].replace('_', ' ')}"
        console.print(f"{escape(part['job_name'])}  {part['process'][:12]}  {escape(part['source'])} → "
                      f"{escape(part['target'])}{state}")  # fmt: skip
    freed = ", ".join(escape(device) for device in result["freed"]) or "none"
    console.print(f"{result['moved']} process(es) were moved; devices freed: {freed}")
    guard = result["guard"]
    if guard is None:
        return
    if guard["undone"]:
        names = {part["job"]: part["job_name"] for part in result["parts"]}
        jobs = ", ".join(escape(names[job]) for job in guard["undone"])
        console.print(f"[bold]moved back[/bold], because a job got slower than promised: {jobs}")
    else:
        console.print(f"no job got more than {guard['promised_slow_down']:g} times slower in {guard['seconds']:g} s")
    unknown = [one for one in guard["processes"] if one["why"]]
    for one in unknown:
        console.print(f"[dim]process {one['process'][:12]} was not judged: {escape(one['why'])}[/dim]")
