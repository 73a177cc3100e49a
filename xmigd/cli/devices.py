"""Devices: device list, show, findings, report, cordon, uncordon, lose."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from xmigd.cli.common import connect
from xmigd.cli.output import Output, OutputOption, console, show, show_json, show_one
from xmigd.client import Client

group = typer.Typer(no_args_is_help=True, help="Devices: their memory and use; whether they take new processes.")
DeviceArgument = Annotated[str, typer.Argument(help="for example cuda:0")]


def register(app: typer.Typer) -> None:
    app.add_typer(group, name="device")


@group.command("list")
def list_devices(output: OutputOption = Output.table) -> None:
    """The node's devices."""
    rows = connect().get("/v1/devices")
    columns = {
        "id": "DEVICE", "name": "NAME", "state": "STATE", "memory_bytes": "MEMORY", "used_bytes": "USED",
        "free_bytes": "FREE", "held_bytes": "HELD", "utilisation": "UTILISATION", "processes": "PROCESSES",
        "mps": "MPS", "health": "HEALTH", "why": "WHY",
    }  # fmt: skip
    if not any(row.get("mps", "off") != "off" for row in rows):
        del columns["mps"]
    show(rows, output, columns, "there are no devices",
         optional=("utilisation", "held_bytes", "free_bytes", "why", "processes"))  # fmt: skip


@group.command("show")
def show_device(device: DeviceArgument, output: OutputOption = Output.table) -> None:
    """One device, with the processes that are on it."""
    show_one(connect().get(f"/v1/devices/{device}"), output)


@group.command()
def findings(device: DeviceArgument, output: OutputOption = Output.table) -> None:
    """What was found wrong with a device, newest first, and what was done about it."""
    rows = connect().get(f"/v1/devices/{device}/findings")
    columns = {
        "first_at": "SINCE", "code": "CODE", "text": "WHAT", "count": "TIMES", "source": "SOURCE", "rung": "RUNG",
        "answer": "ANSWER", "closed_at": "CLOSED",
    }  # fmt: skip
    show(rows, output, columns, f"nothing was found wrong with {device}", optional=("source", "count", "closed_at"))


@group.command()
def report(
    device: DeviceArgument,
    xid: Annotated[int | None, typer.Option("--xid", min=1, help="an Xid of the driver; xMIG grades it")] = None,
    code: Annotated[str | None, typer.Option("--code", help="of a finding of your own, with --text and --rung")] = None,
    text: Annotated[str | None, typer.Option("--text", help="what is wrong; everybody sees it")] = None,
    rung: Annotated[str | None, typer.Option("--rung", help="of the answer: report, cordon, drain or lose")] = None,
    output: OutputOption = Output.table,
) -> None:
    """Report what another agent has found wrong with a device, or try out what xMIG does then."""
    body = {"xid": xid, "code": code, "text": text, "rung": rung}
    row = connect().post(f"/v1/devices/{device}/findings", body)
    _say(row, output, f"{row['text']}: {row['answer'] or 'it is reported already'}")


@group.command()
def cordon(
    device: DeviceArgument,
    reason: Annotated[str | None, typer.Option("--reason", help="why; everybody sees it")] = None,
    output: OutputOption = Output.table,
) -> None:
    """Give it no new process. What runs there stays; xmigctl drain moves it."""
    row = _change(connect(), device, {"cordoned": True} | ({} if reason is None else {"reason": reason}))
    _say(row, output, f"{row['id']} is cordoned; {row['processes']} process(es) stay")


@group.command()
def uncordon(device: DeviceArgument, output: OutputOption = Output.table) -> None:
    """Let it take new processes again."""
    row = _change(connect(), device, {"cordoned": False})
    _say(row, output, f"{row['id']} takes new processes")


@group.command()
def lose(
    device: DeviceArgument,
    reason: Annotated[str, typer.Option("--reason", help="why; everybody sees it")],
    output: OutputOption = Output.table,
) -> None:
    """Treat it as lost with its memory. Ranks go on elsewhere if others have their content; other programs are lost."""
    row = connect().post(f"/v1/devices/{device}:lose", {"reason": reason})
    _say(row, output, f"{row['id']} is given up")


def _change(client: Client, device: str, change: dict[str, Any]) -> dict[str, Any]:
    """As it was read: somebody who changes it in between is not overwritten."""
    _, tag = client.get_tagged(f"/v1/devices/{device}")
    return dict(client.patch(f"/v1/devices/{device}", change, tag))


def _say(row: dict[str, Any], output: Output, text: str) -> None:
    if output is Output.json:
        show_json(row)
    else:
        console.print(text)
