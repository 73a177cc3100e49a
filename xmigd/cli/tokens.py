"""Tokens for callers on the network: token create, list, revoke."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from xmigd.cli.common import connect, find_by_prefix, parse_time
from xmigd.cli.output import Output, OutputOption, console, escape, notes, show, show_json
from xmigd.users import requestor_name

group = typer.Typer(no_args_is_help=True, help="Tokens: who may use the daemon over the network.")


class Scope(StrEnum):
    """xmigd.security.callers.Scope"""

    read = "read"
    operate = "operate"
    admin = "admin"


def register(app: typer.Typer) -> None:
    app.add_typer(group, name="token")


@group.command()
def create(
    name: Annotated[str, typer.Argument(help="what it is for: it stands in the audit")],
    scope: Annotated[
        Scope, typer.Option("--scope", help="read looks, operate acts, admin does everything")
    ] = Scope.read,
    user: Annotated[
        int | None,
        typer.Option("--user", help="whose jobs it is for (a uid); default: yours, for operators the node's"),
    ] = None,
    lifetime: Annotated[str, typer.Option("--lifetime", help="30d, 12h, 90m, ... or never")] = "30d",
    output: OutputOption = Output.table,
) -> None:
    """Make a token. It is shown once, on standard output, and kept only as a hash."""
    body = {"name": name, "scope": scope.value, "uid": user}
    answer = connect().post(
        "/v1/tokens", body, keep_null={"lifetime": None if lifetime == "never" else parse_time(lifetime)}
    )
    if output is Output.json:
        show_json(answer)
        return
    notes.print(f"token {answer['id']} for {scope.value}; it is not shown again:")
    print(answer["token"])


@group.command("list")
def list_tokens(output: OutputOption = Output.table) -> None:
    """Tokens, newest first, without their secrets."""
    columns = {
        "name": "NAME", "id": "TOKEN", "scope": "SCOPE", "user": "USER", "created_at": "MADE",
        "last_used_at": "LAST USED", "expires_at": "EXPIRES", "revoked_at": "REVOKED", "created_by": "MADE BY",
    }  # fmt: skip
    rows = connect().get("/v1/tokens")
    if output is Output.table:
        rows = [
            row | {"user": row["user"] or "the node's", "created_by": requestor_name(row["created_by"])}
            | {name: "never" for name in ("last_used_at", "expires_at") if row[name] is None}
            for row in rows
        ]  # fmt: skip
    show(rows, output, columns, "no tokens", optional=("created_by", "revoked_at", "user"))


@group.command()
def revoke(
    token: Annotated[str, typer.Argument(help="the token: its id, or the beginning of it")],
    output: OutputOption = Output.table,
) -> None:
    """Revoke a token: from now on nobody gets in with it."""
    client = connect()
    found = find_by_prefix(client.get("/v1/tokens"), token, "token", "xmigctl token list")
    client.delete(f"/v1/tokens/{found['id']}")
    if output is Output.json:
        show_json({"id": found["id"], "revoked": True})
    else:
        console.print(f"token {found['id'][:12]} ({escape(found['name'])}) is revoked")
