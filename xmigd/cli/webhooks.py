"""Where events are sent to: webhook add, list, show, set, rm, test, letters, retry."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from xmigd.cli.common import YesOption, confirm, connect, find_by_prefix, read_secret
from xmigd.cli.exits import CommandError, Exit
from xmigd.cli.output import Output, OutputOption, console, escape, notes, show, show_json, show_one
from xmigd.client import Client
from xmigd.words import milliseconds

group = typer.Typer(no_args_is_help=True, help="Webhooks: events are sent to an address, signed, at least once.")
WebhookArgument = Annotated[str, typer.Argument(help="the webhook: its id, or the beginning of it")]
TypeOption = Annotated[
    list[str] | None, typer.Option("--type", help="only such events, for example job.ended; may be given again")
]
SecretOption = Annotated[
    str | None, typer.Option("--secret", metavar="@FILE", help="with which deliveries are signed: a file with it")
]


def register(app: typer.Typer) -> None:
    app.add_typer(group, name="webhook")


@group.command()
def add(
    url: Annotated[str, typer.Argument(help="http or https")],
    type: TypeOption = None,
    secret: SecretOption = None,
    disabled: Annotated[bool, typer.Option("--disabled", help="send nothing yet")] = False,
    output: OutputOption = Output.table,
) -> None:
    """Send events to this address from now on. Without --secret one is made, and shown once, on standard output."""
    body = {"url": url, "types": type or [], "secret": read_secret(secret), "enabled": not disabled}
    answer = connect().post("/v1/webhooks", body)
    if output is Output.json:
        show_json(answer)
        return
    notes.print(f"webhook {answer['id']}: {escape(answer['url'])}")
    if secret is None:
        notes.print("its secret is not shown again:")
        print(answer["secret"])


@group.command("list")
def list_webhooks(output: OutputOption = Output.table) -> None:
    """Webhooks, newest first, and how far each is."""
    rows = connect().get("/v1/webhooks")
    columns = {
        "id": "WEBHOOK", "url": "URL", "state": "STATE", "types": "EVENTS", "delivered": "DELIVERED",
        "behind": "BEHIND", "dead_letters": "DEAD LETTERS", "last_error": "WHY",
    }  # fmt: skip
    if output is Output.table:
        rows = [row | {"state": _state(row), "types": row["types"] or ["all"]} for row in rows]
    show(rows, output, columns, "no webhooks", optional=("types", "behind", "delivered"))


@group.command("show")
def show_webhook(webhook: WebhookArgument, output: OutputOption = Output.table) -> None:
    """One webhook, without its secret."""
    show_one(_find(connect(), webhook), output)


@group.command("set")
def change(
    webhook: WebhookArgument,
    url: Annotated[str | None, typer.Option("--url", help="another address")] = None,
    type: TypeOption = None,
    every_type: Annotated[bool, typer.Option("--all-types", help="all events but the audit's")] = False,
    secret: SecretOption = None,
    enable: Annotated[
        bool | None, typer.Option("--enable/--disable", help="go on where it was; or send nothing")
    ] = None,
    output: OutputOption = Output.table,
) -> None:
    """Change a webhook. What is not named stays."""
    client = connect()
    path = f"/v1/webhooks/{_find(client, webhook)['id']}"
    wanted: dict[str, Any] = {"url": url, "types": type or ([] if every_type else None), "enabled": enable}
    body = {name: value for name, value in wanted.items() if value is not None}
    if secret is not None:
        body["secret"] = read_secret(secret)
    row = client.patch(path, body, client.get_tagged(path)[1])
    if output is Output.json:
        show_json(row)
    else:
        console.print(f"webhook {row['id'][:12]}: {escape(row['url'])}, {_state(row)}")


@group.command("rm")
def remove(webhook: WebhookArgument, yes: YesOption = False, output: OutputOption = Output.table) -> None:
    """Remove a webhook with its dead letters."""
    client = connect()
    found = _find(client, webhook)
    confirm(f"Remove the webhook to {found['url']}?", yes)
    client.delete(f"/v1/webhooks/{found['id']}")
    if output is Output.json:
        show_json({"id": found["id"], "removed": True})
    else:
        console.print(f"webhook {found['id'][:12]} is removed")


@group.command("test")
def try_webhook(webhook: WebhookArgument, output: OutputOption = Output.table) -> None:
    """Send an event `webhook.test` now, and say what the target answered."""
    client = connect(timeout=90.0)
    answer = client.post(f"/v1/webhooks/{_find(client, webhook)['id']}:test")
    if output is Output.json:
        show_json(answer)
    elif answer["delivered"]:
        console.print(f"it was taken: {answer['status']}, after {milliseconds(answer['ms'])}")
    if not answer["delivered"]:
        raise CommandError(f"the target did not take it: {answer['error']}", exit_code=Exit.FAILED)


@group.command()
def letters(
    webhook: WebhookArgument,
    limit: Annotated[int, typer.Option("--limit", min=1, max=1000, help="how many, newest first")] = 50,
    output: OutputOption = Output.table,
) -> None:
    """Dead letters: events that the target has not taken."""
    client = connect()
    rows = client.get(f"/v1/webhooks/{_find(client, webhook)['id']}/dead-letters", limit=limit)
    columns = {"number": "LETTER", "at": "TIME", "event_id": "EVENT", "type": "TYPE", "attempts": "ATTEMPTS",
               "queued": "QUEUED", "error": "WHY"}  # fmt: skip
    show(rows, output, columns, "no dead letters", optional=("attempts", "queued"))


@group.command()
def retry(
    webhook: WebhookArgument,
    letter: Annotated[
        list[int] | None, typer.Option("--letter", min=0, help="only this dead letter; may be given again")
    ] = None,
    output: OutputOption = Output.table,
) -> None:
    """Send dead letters again, the oldest first."""
    client = connect()
    answer = client.post(f"/v1/webhooks/{_find(client, webhook)['id']}:retry", {"letters": letter})
    if output is Output.json:
        show_json(answer)
    else:
        console.print(f"{answer['queued']} dead letter(s) are sent again")


def _find(client: Client, wanted: str) -> dict[str, Any]:
    return find_by_prefix(client.get("/v1/webhooks"), wanted, "webhook", "xmigctl webhook list")


def _state(row: dict[str, Any]) -> str:
    if not row["enabled"]:
        return "disabled"
    return "ready" if row["failing_since"] is None else f"failing ({row['attempts']})"
