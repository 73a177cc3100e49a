"""Policies, and the circuit breaker: policy list, show, set; breaker show, reset."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from xmigd.cli.common import YesOption, confirm, connect
from xmigd.cli.exits import CommandError, Exit
from xmigd.cli.output import Output, OutputOption, console, escape, show, show_json
from xmigd.users import requestor_name

policies = typer.Typer(no_args_is_help=True, help="Policies: numbers that operators change while xmigd runs.")
breaker = typer.Typer(no_args_is_help=True, help="The circuit breaker, which stops xMIG's own decisions.")
COLUMNS = {
    "policy": "POLICY", "value": "VALUE", "now": "NOW", "default": "DEFAULT", "unit": "UNIT", "meaning": "MEANING",
    "updated_by": "CHANGED BY", "updated_at": "CHANGED",
}  # fmt: skip
NameArgument = Annotated[str, typer.Argument(help="for example recovery; xmigctl policy list names them")]


def register(app: typer.Typer) -> None:
    app.add_typer(policies, name="policy")
    app.add_typer(breaker, name="breaker")


@policies.command("list")
def list_policies(output: OutputOption = Output.table) -> None:
    """What applies, and what the settings say."""
    rows = connect().get("/v1/policies")
    show(rows if output is Output.json else _values(rows), output, COLUMNS, "there are no policies",
         optional=("meaning", "updated_at", "updated_by"))  # fmt: skip


def _values(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each value."""
    return [
        {"policy": row["name"], "value": name, "now": value, "default": row["defaults"].get(name),
         "unit": row.get("units", {}).get(name), "updated_at": row["updated_at"],
         "updated_by": row["updated_by"] and requestor_name(row["updated_by"]),
         "meaning": row.get("meanings", {}).get(name)}
        for row in rows for name, value in row["settings"].items()
    ]  # fmt: skip


@policies.command("show")
def show_policy(name: NameArgument, output: OutputOption = Output.table) -> None:
    """One policy."""
    row = connect().get(f"/v1/policies/{name}")
    if output is Output.json:
        show_json(row)
        return
    console.print(escape(row["description"]))
    show(_values([row]), output, COLUMNS, "it has no values", optional=("meaning", "updated_at", "updated_by"))


@policies.command("set")
def set_policy(
    name: NameArgument,
    values: Annotated[list[str], typer.Argument(help="VALUE=NUMBER, or VALUE=default: what the settings say")],
    output: OutputOption = Output.table,
) -> None:
    """Change values of a policy. They apply without a restart."""
    change = dict(_value(text) for text in values)
    client = connect()
    _, tag = client.get_tagged(f"/v1/policies/{name}")
    row = client.patch(f"/v1/policies/{name}", change, tag)
    if output is Output.json:
        show_json(row)
    else:
        for value in change:
            console.print(f"{escape(name)}: {escape(value)} is {row['settings'][value]}")


def _value(text: str) -> tuple[str, Any]:
    name, _, number = text.partition("=")
    if number == "default":
        return name, None
    try:
        return name, json.loads(number)
    except ValueError:
        raise CommandError(f"{text!r} is no VALUE=NUMBER", exit_code=Exit.USAGE) from None


@breaker.command("show")
def show_breaker(output: OutputOption = Output.table) -> None:
    """Whether xMIG acts by itself, and what it has done lately."""
    found = connect().get("/v1/circuit-breaker")
    if output is Output.json:
        show_json(found)
        return
    state = (
        "[red]open[/red]: xMIG does not act by itself" if found["state"] == "open" else "closed: xMIG acts by itself"
    )
    console.print(state + (f" ({escape(found['why'])})" if found["why"] else ""))
    window = found["window_seconds"]
    console.print(f"{len(found['actions'])} of at most {found['max_actions']} actions in {window:.0f} s")
    if found["actions"]:
        names = {name: name.removesuffix("_id").upper() for name in found["actions"][0]}
        show(found["actions"], output, names, "")


@breaker.command("reset")
def reset_breaker(yes: YesOption = False, output: OutputOption = Output.table) -> None:
    """Let xMIG act by itself again. Find out first why it had to be stopped."""
    confirm("Let xMIG act by itself again?", yes)
    found = connect().post("/v1/circuit-breaker:reset")
    if output is Output.json:
        show_json(found)
    else:
        console.print(f"the circuit breaker is {found['state']}")
