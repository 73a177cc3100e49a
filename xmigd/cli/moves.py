"""Moving programs between devices: migrate, suspend, resume, drain."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from xmigd.cli.common import (
    JobOption,
    LimitOption,
    ProcessOrJobArgument,
    YesOption,
    confirm,
    connect,
    find_job,
    find_process,
    find_processes,
    parse_time,
)
from xmigd.cli.exits import CommandError, Exit
from xmigd.cli.follow import OnInterrupt, OnInterruptOption, WaitOption, carry_out
from xmigd.cli.output import Output, OutputOption, console, escape, process_label, show, show_json, size, with_jobs
from xmigd.words import milliseconds


class Place(StrEnum):
    host = "host"
    file = "file"


class Engine(StrEnum):
    proxy = "proxy"
    driver = "driver"


LeaveAllocationOption = Annotated[
    bool,
    typer.Option(
        "--leave-allocation", help="also a job of Slurm's or Kubernetes', which may give that device to another job"
    ),
]


def register(app: typer.Typer) -> None:
    app.command()(migrate)
    app.command()(migrations)
    app.command()(suspend)
    app.command()(resume)
    app.command()(drain)


def migrate(
    process: ProcessOrJobArgument,
    target: Annotated[str | None, typer.Argument(help="the device, for example cuda:1")] = None,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="NODE[/DEVICES]",
            help="another node, a peer, for all processes of the job; and its devices, which these get in turn: "
            "cuda:0,cuda:1",
        ),
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="only say where it may go, and why not elsewhere")] = False,
    engine: Annotated[Engine, typer.Option("--engine", help="how")] = Engine.proxy,
    max_downtime: Annotated[
        float | None,
        typer.Option("--max-downtime", min=0.001, metavar="MS", help="give up rather than stand still for longer"),
    ] = None,
    leave_allocation: LeaveAllocationOption = False,
    publish: Annotated[
        list[str] | None,
        typer.Option(
            "--publish", metavar="[[ADDRESS:]PORT:]INNER",
            help="with --to, after run --movable: a port there that leads to the job's private network",
        ),
    ] = None,
    wait: WaitOption = True,
    on_interrupt: OnInterruptOption = OnInterrupt.cancel,
    output: OutputOption = Output.table,
) -> None:  # fmt: skip
    """Move a running program to another device, or with --to its whole job to another node. It pauses for a moment;
    nothing else changes for it."""
    if target is not None and to is not None:
        raise CommandError("a device of this node and another node are named: name one of them", exit_code=Exit.USAGE)
    if leave_allocation and to is not None:
        raise CommandError("--leave-allocation is of devices of this node", exit_code=Exit.USAGE)
    client = connect()
    found = find_process(client, process) if to is None else find_processes(client, process)[1][0]
    if plan and to is not None:
        body = {"process": found["id"], "engine": engine.value, "node": to}
        answer = client.post("/v1/migration-plans", body)
        whole = len(answer["places"]) > 1
        if answer["becomes"] is not None and output is not Output.json:
            console.print(f"There it is {answer['becomes']}: that node gives the job's class to others only.")
        _show_plan(answer, to if "/" in to and not whole else None, output)
        if whole:
            _show_places(answer, output)
        return
    if plan:
        body = {"process": found["id"], "engine": engine.value, "leave_allocation": leave_allocation}
        _show_plan(client.post("/v1/migration-plans", body), target, output)
        return
    if to is not None:
        target = to if "/" in to else f"{to}/"
    if target is None:
        raise CommandError("name the device to which it is to go, or a node with --to",
                           hint="xmigctl migrate --plan PROCESS lists them", exit_code=Exit.USAGE)  # fmt: skip
    body = {
        "process": found["id"], "target": target, "engine": engine.value, "max_downtime_ms": max_downtime,
        "leave_allocation": leave_allocation,
    }  # fmt: skip
    if publish:  # daemons of earlier versions do not know it
        body["publish"] = publish
    operation = carry_out(client, "/v1/migrations", body, wait=wait, output=output, on_interrupt=on_interrupt)
    if operation is not None and output is not Output.json:
        result = operation["result"]
        count = len(result.get("processes") or [found])
        whose = process_label(found) if count == 1 else f"{escape(found['job_name'])}: {count} processes"
        verb = "is" if count == 1 else "are"
        console.print(f"{whose} {verb} on [bold]{escape(result['target'])}[/bold]{_figures(result, count)}")


def migrations(job: JobOption = None, limit: LimitOption = 50, output: OutputOption = Output.table) -> None:
    """Moves, suspensions and resumptions, newest first."""
    client = connect()
    rows = client.get("/v1/migrations", job=find_job(client, job) if job else None, limit=limit)
    columns = {
        "started_at": "TIME", "job": "JOB", "process_id": "PROCESS", "kind": "KIND", "source": "FROM", "target": "TO",
        "state": "STATE", "rounds": "ROUNDS", "total_bytes": "LIVE", "processed_bytes": "COPIED",
        "expected_downtime_ms": "EXPECTED", "downtime_ms": "DOWNTIME", "setup_ms": "SETUP", "error": "WHY",
    }  # fmt: skip
    shown = rows if output is Output.json else [row | {"rounds": len(row["iterations"])} for row in with_jobs(rows)]
    show(shown, output, columns, "nothing was moved",
         optional=("setup_ms", "expected_downtime_ms", "rounds", "processed_bytes", "total_bytes",
                   "process_id"))  # fmt: skip


def suspend(
    process: ProcessOrJobArgument,
    to: Annotated[Place, typer.Option("--to", help="where its state waits")] = Place.host,
    wait: WaitOption = True,
    on_interrupt: OnInterruptOption = OnInterrupt.cancel,
    output: OutputOption = Output.table,
) -> None:
    """Take a program's device away: its state goes to host memory or to files, it waits in its next call. Ranks that
    share communicators are suspended as one."""
    client = connect()
    path, found = find_processes(client, process)
    body = {"to": to.value}
    operation = carry_out(client, f"{path}:suspend", body, wait=wait, output=output, on_interrupt=on_interrupt)
    if operation is not None and output is not Output.json:
        place = "in host memory" if to is Place.host else "in files"
        whose = f"{_all_of(found, operation)} suspended, {'its' if _count(operation) == 1 else 'their'} state {place}"
        console.print(f"{whose}{_figures(operation['result'])}")
        console.print(f"[dim]xmigctl resume {escape(process)}[/dim]")


def resume(
    process: ProcessOrJobArgument,
    device: Annotated[
        list[str] | None,
        typer.Option(
            "--device", help="another one than it had; may be given again: a job's processes get these in turn"
        ),
    ] = None,
    leave_allocation: LeaveAllocationOption = False,
    wait: WaitOption = True,
    on_interrupt: OnInterruptOption = OnInterrupt.cancel,
    output: OutputOption = Output.table,
) -> None:
    """Let a suspended program go on, on its device or on another one. Ranks that were suspended as one go on as one."""
    client = connect()
    path, found = find_processes(client, process)
    body: dict[str, Any] = (
        {"devices": device} if device and len(device) > 1 else {"device": device[0]} if device else {}
    )
    if leave_allocation:
        body["leave_allocation"] = True
    operation = carry_out(client, f"{path}:resume", body, wait=wait, output=output, on_interrupt=on_interrupt)
    if operation is not None and output is not Output.json:
        ranks = operation["result"].get("ranks") or [operation["result"]]
        targets = ", ".join(dict.fromkeys(escape(rank["target"]) for rank in ranks))
        verb = "goes" if len(ranks) == 1 else "go"
        console.print(f"{_all_of(found, operation, '')} {verb} on, on [bold]{targets}[/bold]")


class Otherwise(StrEnum):
    stay = "stay"
    suspend = "suspend"
    checkpoint = "checkpoint"
    either = "either"


def drain(
    device: Annotated[str | None, typer.Argument(help="for example cuda:0")] = None,
    every: Annotated[bool, typer.Option("--all", help="all devices of this node, in the place of one")] = False,
    to: Annotated[
        list[str] | None,
        typer.Option(
            "--to", metavar="NODE", help="another node, a peer, for what no other device of this node takes; may be "
            "given again: the first that has a place; '*': all peers",
        ),
    ] = None,
    otherwise: Annotated[
        Otherwise, typer.Option("--otherwise", help="what becomes of a job that cannot move, or whose move fails")
    ] = Otherwise.stay,
    reason: Annotated[str, typer.Option("--reason", help="why, for others to read")] = "",
    within: Annotated[
        str | None, typer.Option("--within", metavar="TIME", help="5m, 1h, ...: what has not left by then stays")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="only say what would go where, and what would be stuck, and why")
    ] = False,
    yes: YesOption = False,
    wait: WaitOption = True,
    on_interrupt: OnInterruptOption = OnInterrupt.cancel,
    output: OutputOption = Output.table,
) -> None:  # fmt: skip
    """Move every program off a device, or with --all off all devices of this node. They are cordoned first, so that
    none comes."""
    if (device is None) is not every:
        raise CommandError("name a device, or all with --all", hint="xmigctl device list", exit_code=Exit.USAGE)
    ways = {"nodes": to or [], "otherwise": otherwise.value}
    if dry_run:
        is_bounded = not to and otherwise is Otherwise.stay
        hint = "--to NODE and --otherwise suspend let them go elsewhere" if is_bounded else ""
        client = connect()
        known = [each["id"] for each in client.get("/v1/devices") if each["configured"]] if device is None else [device]
        _show_drain_plan(client.post("/v1/drain-plans", {"devices": known} | ways), output, hint)
        return
    what = device or "all devices of this node"
    within_seconds = None if within is None else parse_time(within)
    client = connect()
    if device is not None and device not in (each["id"] for each in client.get("/v1/devices")):
        raise CommandError(f"this node has no device {device}", hint="xmigctl device list", exit_code=Exit.NOT_FOUND)
    confirm(f"Cordon {what} and move every program off {'it' if device else 'them'}?", yes)
    path = f"/v1/devices/{device}:drain" if device else "/v1/node:drain"
    body = {"reason": reason, "within_seconds": within_seconds} | ways
    operation = carry_out(client, path, body, wait=wait, output=output, on_interrupt=on_interrupt)
    if operation is not None and output is not Output.json:
        result = operation["result"]
        for part in result["parts"]:
            place = part["target"] or PLACES.get(part["how"], part["how"])
            console.print(f"{part['process'][:12]}  {escape(part['source'])} → {escape(place)}")
        rest = f", {result['preempted']} were preempted" if result["preempted"] else ""
        console.print(
            f"{result['moved']} program(s) were moved{rest}; {escape(what)} {'is' if device else 'are'} cordoned"
        )


PLACES = {"host": "host memory", "file": "files", "checkpoint": "a checkpoint"}  # of what was preempted


def _show_drain_plan(plan: dict[str, Any], output: Output, hint: str) -> None:
    steps = [
        step | {
            "job": step["job_name"], "target": step["target"] or PLACES.get(step["how"]),
            "why": "; ".join(reason["text"] for reason in step["reasons"]) or None,
        }
        for step in plan["steps"]
    ]  # fmt: skip
    columns = {"job": "JOB", "process": "PROCESS", "source": "FROM", "target": "TO", "needed_bytes": "MEMORY",
               "expected_downtime_ms": "DOWNTIME", "why": "WHY"}  # fmt: skip
    if output is Output.json:
        show_json(plan)
    else:
        show([step | {"process": step["process"][:12]} for step in steps], output, columns, "nothing runs there")
    if plan["stuck"]:
        raise CommandError(f"{plan['stuck']} program(s) would be stuck", hint=hint, exit_code=Exit.REFUSED)


def _show_plan(plan: dict[str, Any], target: str | None, output: Output) -> None:
    if output is Output.json:
        show_json(plan)
    else:
        live = "not known before its first snapshot" if plan["live_bytes"] is None else size(plan["live_bytes"])
        console.print(f"on {escape(plan['source'])}: holds {size(plan['held_bytes'])}, of that live: {live}")
        rows = [
            {
                "device": each["device"], "allowed": each["allowed"], "room": each["room_bytes"],
                "expected_downtime_ms": each["expected_downtime_ms"],
                "why": "; ".join(f"{reason['text']} ({reason['code']})" for reason in each["reasons"]) or None,
            }
            for each in plan["targets"]
            if target in (None, each["device"])
        ]  # fmt: skip
        for row in rows:
            row["room_bytes"] = row.pop("room")
        columns = {"device": "TARGET", "allowed": "ALLOWED", "room_bytes": "MEMORY",
                   "expected_downtime_ms": "DOWNTIME", "why": "WHY"}  # fmt: skip
        show(rows, output, columns, "this node has no other device")
    allowed = [each["device"] for each in plan["targets"] if each["allowed"]]
    if (target is not None and target not in allowed) or not allowed:
        raise CommandError("it cannot go there" if target else "it can go nowhere", exit_code=Exit.REFUSED)


def _show_places(plan: dict[str, Any], output: Output) -> None:
    """Where each process of a job would go, to another node."""
    if output is not Output.json:
        rows = [
            {"process": each["process"][:12], "source": each["source"], "device": each["device"],
             "why": "; ".join(f"{reason['text']} ({reason['code']})" for reason in each["reasons"]) or None}
            for each in plan["places"]
        ]  # fmt: skip
        show(rows, output, {"process": "PROCESS", "source": "FROM", "device": "TO", "why": "WHY"}, "")
    if any(each["reasons"] for each in plan["places"]):
        raise CommandError("the job cannot go there", exit_code=Exit.REFUSED)


def _count(operation: dict[str, Any]) -> int:
    """Of processes that it was about."""
    return len(operation["result"].get("ranks") or [None])


def _all_of(found: list[dict[str, Any]], operation: dict[str, Any], verb: str = " is") -> str:
    """Them, as a sentence begins."""
    count = _count(operation)
    if count == 1:
        return f"{process_label(found[0])}{verb}"
    return f"{escape(found[0]['job_name'])}: {count} processes{verb and ' are'}"


def _figures(result: dict[str, Any], count: int = 1) -> str:
    """What of its figures is known."""
    parts = []
    if result.get("downtime_ms") is not None:
        parts.append(f"{'it' if count == 1 else 'they'} stood still for {milliseconds(result['downtime_ms'])}")
    if result.get("processed_bytes") is not None:
        parts.append(f"{size(result['processed_bytes'])} copied")
    if result.get("rounds"):
        parts.append(f"in {result['rounds']} round(s)")
    return ": " + ", ".join(parts) if parts else ""
