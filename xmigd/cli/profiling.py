"""Where a job's time on its devices goes: its profile, and traces of all that its devices do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from xmigd.cli.common import JobArgument, connect, find_job
from xmigd.cli.exits import CommandError, Exit
from xmigd.cli.follow import OnInterrupt, OnInterruptOption, carry_out
from xmigd.cli.output import Output, OutputOption, console, escape, show, show_json, size
from xmigd.words import milliseconds


def register(app: typer.Typer) -> None:
    app.command()(profile)
    app.command()(trace)


def profile(
    job: JobArgument,
    limit: Annotated[int, typer.Option("--limit", min=1, max=1024, help="how many operations")] = 20,
    output: OutputOption = Output.table,
) -> None:
    """Where a job's time on its devices goes: kernels, copies, steps, memory. Estimates are marked with ~."""
    client = connect()
    found = client.get(f"/v1/jobs/{find_job(client, job)}/profile", limit=limit)
    if output is Output.json:
        show_json(found)
        return
    for process in found["processes"]:
        console.print(escape(process_line(process)), soft_wrap=True)
    console.print()
    columns = {
        "share": "SHARE", "total": "TOTAL", "calls": "CALLS", "median": "MEDIAN", "shape": "GRID × BLOCK",
        "occupancy": "OCCUPANCY", "compute": "COMPUTE", "bandwidth": "BANDWIDTH", "name": "WHAT",
    }  # fmt: skip
    rows = [shown(one) for one in found["operations"]]
    show(rows, output, columns, "its devices have done nothing yet", optional=("bandwidth", "compute", "occupancy"))
    if found["more"]:
        console.print(f"[dim]{found['more']} more: --limit[/dim]")
    if rows:
        console.print(f"[dim]at most one of {found['every']} operations is timed; ~: estimated, -o json says how[/dim]")


def trace(
    job: JobArgument,
    seconds: Annotated[float, typer.Option("--seconds", min=0.01, max=60, help="how long")] = 5.0,
    file: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="default: xmig-trace-JOB.json, here")
    ] = None,
    on_interrupt: OnInterruptOption = OnInterrupt.cancel,
) -> None:
    """Write down all that a job's devices do for some seconds, as a file for ui.perfetto.dev. The job goes on."""
    client = connect()
    id = find_job(client, job)
    target = file or Path(f"xmig-trace-{id[:12]}.json")
    if target.is_dir() or not target.absolute().parent.is_dir():
        raise CommandError(
            f"{target} cannot be written: it is a directory, or its directory does not exist",
            hint="name a file with --output", exit_code=Exit.USAGE,
        )  # fmt: skip
    operation = carry_out(
        client, f"/v1/jobs/{id}/traces", {"seconds": seconds}, wait=True, output=Output.table,
        on_interrupt=on_interrupt,
    )  # fmt: skip
    assert operation is not None
    result = operation["result"]
    try:
        target.write_bytes(client.get_bytes(f"/v1/traces/{result['trace']}"))
    except OSError as error:
        raise CommandError(
            f"{target} cannot be written: {error.strerror or error}",
            hint=f"the trace is kept: GET /v1/traces/{result['trace']}",
            exit_code=Exit.FAILED,
        ) from None
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(result["kinds"].items())) or "nothing"
    console.print(f"[bold]{escape(str(target))}[/bold]: {size(result['bytes'])}; {kinds}")
    if result["servers_lost"]:
        console.print(f"servers that were lost or left meanwhile: {result['servers_lost']}; the trace shows where")
    if result["dropped"]:
        console.print(f"[red]{result['dropped']} operations are missing: there was no room (trace_mib)[/red]")
    if result["servers_without_an_end"]:
        console.print(f"[red]servers that wrote no end: {result['servers_without_an_end']}[/red]")
    console.print("[dim]open it at https://ui.perfetto.dev[/dim]")


def process_line(process: dict[str, Any]) -> str:
    parts = [f"{process['process'][:12]} on {process['device']}"]
    if process["over"]:
        parts.append("over")
    if process["step_ms"] is not None:
        parts.append(f"a step takes {milliseconds(process['step_ms'])} ({process['launches_per_step']} launches)")
    elif not process["over"]:
        parts.append("no step known")
    if process["idle_share"] is not None:
        parts.append(f"idle ~{_percent(process['idle_share'])}")
    if process["live_bytes"] is not None:
        parts.append(f"memory {size(process['live_bytes'])}, peak {size(process['peak_bytes'])}")
    for name, text in (("link_bytes_per_s", "links"), ("host_bytes_per_s", "host")):
        if process[name]:
            parts.append(f"{text} {size(process[name])}/s")
    return "; ".join(parts)


def shown(one: dict[str, Any]) -> dict[str, Any]:
    """An operation as the table has it."""
    grid, block = one["grid"], one["block"]
    shape = "-" if grid is None else f"{_dimensions(grid)} × {_dimensions(block)}"
    return {
        "share": "-" if one["share"] is None else f"{100 * one['share']:.1f} %",
        "total": "-" if one["total_ms"] is None else milliseconds(one["total_ms"]), "calls": one["calls"],
        "median": "-" if one["median_us"] is None else f"{one['median_us']:.1f} µs", "shape": shape,
        "occupancy": _percent(one["occupancy"]), "compute": _estimate(one["compute"]),
        "bandwidth": _estimate(one["bandwidth"]), "name": one["name"],
    }  # fmt: skip


def _dimensions(three: list[int]) -> str:
    while len(three) > 1 and three[-1] == 1:
        three = three[:-1]
    return ",".join(map(str, three))


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"


def _estimate(estimate: dict[str, Any]) -> str:
    return "-" if estimate["share"] is None else f"~{_percent(estimate['share'])}"
