"""This node and its peers in one view: fleet list, jobs, devices; packings over all of them: fleet plan, apply."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from xmigd.cli.common import YesOption, confirm, connect, find_by_prefix
from xmigd.cli.exits import CommandError, Exit
from xmigd.cli.follow import OnInterrupt, OnInterruptOption, WaitOption, carry_out
from xmigd.cli.output import Output, OutputOption, console, escape, notes, show, show_json
from xmigd.words import duration

group = typer.Typer(no_args_is_help=True, help="This node and its peers in one view, and jobs packed over all of them.")
ALL_THERE = "answered"
LISTED = 200  # nodes, with one request


class Objective(StrEnum):
    devices = "devices"
    nodes = "nodes"


NodeOption = Annotated[
    list[str] | None, typer.Option("--node", help="only these give and take processes; may be given again")
]
ExcludeNodeOption = Annotated[
    list[str] | None, typer.Option("--exclude-node", help="it neither gives nor takes; may be given again")
]
FreeOption = Annotated[Objective, typer.Option("--free", help="what is to get free")]
NameOption = Annotated[str | None, typer.Option("--name", help="only nodes with this in their names")]
StateOption = Annotated[
    str | None, typer.Option("--state", help="only nodes in this state: answered, silent, unreachable, …")
]
MaxMovesOption = Annotated[int | None, typer.Option("--max-moves", min=1, max=1000, help="at most (default 100)")]
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


def register(app: typer.Typer) -> None:
    app.add_typer(group, name="fleet")


@group.command("list")
def list_nodes(
    name: NameOption = None, state: StateOption = None, output: OutputOption = Output.table
) -> None:  # fmt: skip
    """The nodes: whether each has answered, and its devices and jobs in numbers, as far as you see them."""
    fleet = _fleet(name, None if state is None else state.replace(" ", "_"))
    if output is Output.json:
        show_json(fleet)
        return
    rows = [_row(node) for node in fleet["nodes"]]
    columns = {
        "name": "NODE", "state": "STATE", "age": "AGE", "devices": "DEVICES", "free": "FREE", "unhealthy": "UNHEALTHY",
        "jobs": "JOBS", "used_bytes": "MEMORY", "why": "WHY",
    }  # fmt: skip
    show(rows, output, columns, "no nodes", optional=("used_bytes", "unhealthy"))


@group.command("devices")
def list_devices(name: NameOption = None, output: OutputOption = Output.table) -> None:
    """The devices of all nodes."""
    fleet = _fleet(name)
    rows = [
        {"node": node["name"], "device": each["id"]} | {name: each[name] for name in each if name != "id"}
        | {"age_s": node["age_s"]}
        for node in fleet["nodes"] for each in (node["shown"] or {"devices": []})["devices"]
    ]  # fmt: skip
    columns = {
        "node": "NODE", "device": "DEVICE", "state": "STATE", "health": "HEALTH", "processes": "PROCESSES",
        "used_bytes": "USED", "memory_bytes": "MEMORY", "why": "WHY",
    }  # fmt: skip
    show(rows, output, columns, "no node has devices")
    _warn(fleet, output)


@group.command("jobs")
def list_jobs(name: NameOption = None, output: OutputOption = Output.table) -> None:
    """The jobs of all nodes that have processes, as far as you see them."""
    fleet = _fleet(name)
    rows = [
        {
            "node": node["name"], "job": job["id"] if output is Output.json else job["id"][:12], "name": job["name"],
            "user": job["user"], "state": job["state"], "created_at": job["created_at"],
            "devices": ", ".join(dict.fromkeys(one["device"] for one in job["processes"])),
            "memory_bytes": sum(one["memory_bytes"] for one in job["processes"]),
            "stays": next((one["stays"] for one in job["processes"] if one["stays"]), None), "age_s": node["age_s"],
        }
        for node in fleet["nodes"] for job in (node["shown"] or {"jobs": []})["jobs"]
    ]  # fmt: skip
    columns = {
        "node": "NODE", "job": "JOB", "name": "NAME", "user": "USER", "state": "STATE", "devices": "DEVICES",
        "memory_bytes": "MEMORY", "created_at": "CREATED", "stays": "STAYS BECAUSE",
    }  # fmt: skip
    show(rows, output, columns, "no jobs run", optional=("created_at", "stays"))
    _warn(fleet, output)


@group.command()
def plan(
    free: FreeOption = Objective.devices,
    node: NodeOption = None,
    exclude_node: ExcludeNodeOption = None,
    max_moves: MaxMovesOption = None,
    headroom: HeadroomOption = None,
    max_slow_down: SlowDownOption = None,
    assume_busy: BusyOption = None,
    output: OutputOption = Output.table,
) -> None:
    """How running jobs can be packed over nodes so that devices or whole nodes get free. Changes nothing."""
    body = {
        "objective": f"free_{free.value}", "nodes": node, "exclude_nodes": exclude_node, "max_moves": max_moves,
        "headroom": headroom, "max_slow_down": max_slow_down, "assumed_busy_share": assume_busy,
    }  # fmt: skip
    made = connect().post("/v1/fleet/plans", body)
    if output is Output.json:
        show_json(made)
        return
    _show(made)
    if made["moves"]:
        console.print(f"[dim]xmigctl fleet apply {made['id'][:12]}[/dim]")


@group.command()
def apply(
    plan: Annotated[str, typer.Argument(help="the plan: its id, or the beginning of it")],
    yes: YesOption = False,
    wait: WaitOption = True,
    on_interrupt: OnInterruptOption = OnInterrupt.cancel,
    output: OutputOption = Output.table,
) -> None:
    """Move the processes as a plan says, one after the other. It stops at the first that cannot be moved; those before
    it stay where they are then."""
    client = connect()
    found = find_by_prefix(client.get("/v1/fleet/plans", limit=1000), plan, "plan", "xmigctl fleet plan")
    if not found["moves"]:
        raise CommandError("the plan moves nothing", hint="its refusals say what stays, and why: xmigctl fleet plan",
                           code="plan_empty", exit_code=Exit.REFUSED)  # fmt: skip
    if output is not Output.json:
        _show(found)
    confirm(f"Move {sum(len(move['processes']) for move in found['moves'])} process(es)?", yes)
    path = f"/v1/fleet/plans/{found['id']}/apply"
    operation = carry_out(client, path, wait=wait, output=output, on_interrupt=on_interrupt)
    if operation is not None and output is not Output.json:
        result = operation["result"]
        freed = ", ".join(escape(each) for each in result["freed"]) or "none"
        console.print(f"{result['moved']} moved; free now: [bold]{freed}[/bold]")


def _fleet(name: str | None, state: str | None = None) -> dict[str, Any]:
    """All pages."""
    client = connect()
    wanted: dict[str, Any] = {"limit": LISTED, "name": name, "state": state}
    fleet: dict[str, Any] = client.get("/v1/fleet", **wanted)
    while fleet["after"] is not None:
        more = client.get("/v1/fleet", **wanted, after=fleet["after"])
        fleet = more | {"nodes": fleet["nodes"] + more["nodes"]}
    return fleet


def _row(node: dict[str, Any]) -> dict[str, Any]:
    shown = node["shown"]
    devices = [] if shown is None else [each for each in shown["devices"] if each["state"] != "not_configured"]
    used = [each["used_bytes"] for each in devices if each["used_bytes"] is not None]
    known = shown is not None
    return {
        "name": node["name"], "state": node["state"], "why": node["why"] or None,
        "age": None if node["age_s"] is None else duration(node["age_s"]) if node["age_s"] >= 1 else "now",
        "devices": len(devices) if known else None,
        "free": sum(each["state"] == "ready" and each["processes"] == 0 for each in devices) if known else None,
        "unhealthy": sum(each["state"] == "unhealthy" for each in devices) if known else None,
        "jobs": len(shown["jobs"]) + shown["left_out"] if known else None, "used_bytes": sum(used) if used else None,
    }  # fmt: skip


def _warn(fleet: dict[str, Any], output: Output) -> None:
    """Of nodes whose part is old or missing."""
    for node in fleet["nodes"] if output is Output.table else []:
        if node["state"] != ALL_THERE:
            age = (
                "nothing of it is known" if node["age_s"] is None else f"what is shown is {duration(node['age_s'])} old"
            )
            notes.print(f"[dim]{escape(node['name'])} is {node['state'].replace('_', ' ')}: "
                        f"{escape(node['why'])}; {age}[/dim]")  # fmt: skip


def _show(plan: dict[str, Any]) -> None:
    columns = {"job_name": "JOB", "process": "PROCESS", "source": "FROM", "target": "TO", "memory_bytes": "MEMORY",
               "expected_standstill_ms": "DOWNTIME", "takes": "TAKES", "basis": "AS"}  # fmt: skip
    moves = [
        move | {
            "process": ", ".join(one["process"][:12] for one in move["processes"]),
            "takes": None if move["expected_s"] is None else duration(move["expected_s"]),
        }
        for move in plan["moves"]
    ]  # fmt: skip
    show(moves, Output.table, columns, "nothing is gained by moving anything", optional=("basis", "takes"))
    if plan["refusals"]:
        console.print()
        refused = [each | {"process": each["process"][:12]} for each in plan["refusals"]]
        columns = {"job_name": "JOB", "process": "PROCESS", "source": "ON", "text": "WHY"}
        show(refused, Output.table, columns, "")
    for left in plan["left_out"]:
        console.print(f"[dim]{escape(left['node'])} takes no part: {escape(left['why'])}[/dim]")
    freed = ", ".join(escape(each) for each in plan["freed_nodes"]) or "none"
    devices = len(plan["freed_devices"])
    console.print(f"nodes freed: [bold]{freed}[/bold]; devices freed: {devices} of {plan['devices_used_before']}; "
                  f"moves: {len(plan['moves'])}")  # fmt: skip
