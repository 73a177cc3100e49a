"""The daemons of other nodes: peer show, add, list, rm."""

from __future__ import annotations

from typing import Annotated

import typer

from xmigd.cli.common import connect
from xmigd.cli.exits import CommandError, Exit
from xmigd.cli.output import Output, OutputOption, console, escape, show, show_json, show_one

group = typer.Typer(no_args_is_help=True, help="Peers: the daemons of other nodes that this one is connected with.")
NameArgument = Annotated[str, typer.Argument(help="the node's name")]


def register(app: typer.Typer) -> None:
    app.add_typer(group, name="peer")


@group.command("show")
def show_identity(output: OutputOption = Output.table) -> None:
    """This node's own name, address and fingerprint: what to enter on another node."""
    row = connect().get("/v1/identity")
    show_one(row, output, {"node": "node", "address": "address", "fingerprint": "fingerprint"})
    if output is Output.table and row["address"] is None:
        console.print("Peers cannot connect to it: peer_port is not set.")


@group.command()
def add(
    name: NameArgument,
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="where it listens for peers")],
    fingerprint: Annotated[str, typer.Argument(help="of its certificate, as its xmigctl peer show has it")],
    certificate: Annotated[
        str | None,
        typer.Option("--certificate", metavar="FILE", help="PEM file of a peer that listens nowhere and only connects"),
    ] = None,
    output: OutputOption = Output.table,
) -> None:
    """Make a node known. The other one has to know this one, too."""
    body = {"name": name, "address": address, "fingerprint": fingerprint.replace(":", "").lower()}
    if certificate is not None:
        body["certificate"] = _read(certificate)
    row = connect().post("/v1/peers", body)
    if output is Output.json:
        show_json(row)
    else:
        console.print(f"{escape(row['name'])} at {escape(row['address'])} is known")


@group.command("list")
def list_peers(output: OutputOption = Output.table) -> None:
    """The known nodes, whether they are connected, why not, and since when."""
    columns = {
        "name": "PEER", "address": "ADDRESS", "state": "STATE", "changed_at": "SINCE", "why": "WHY",
        "fingerprint": "FINGERPRINT",
    }  # fmt: skip
    show(connect().get("/v1/peers"), output, columns, "no peers", optional=("fingerprint", "changed_at", "address"))


@group.command("rm")
def remove(name: NameArgument, output: OutputOption = Output.table) -> None:
    """Know a node no more. Its connection ends."""
    connect().delete(f"/v1/peers/{name}")
    if output is Output.json:
        show_json({"name": name, "removed": True})
    else:
        console.print(f"{escape(name)} is removed")


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.read(1 << 16)
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"the certificate {path} cannot be read: {error}", exit_code=Exit.USAGE) from None
