"""When checkpoints of a job are made without a request: checkpoint policy show, set, rm."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from xmigd.cli.common import JobArgument, connect, find_job
from xmigd.cli.output import Output, OutputOption, console, escape, show_json, show_one

group = typer.Typer(
    no_args_is_help=True, help="When checkpoints of a job are made without a request, and how many are kept."
)


@group.command("show")
def show_policy(job: JobArgument, output: OutputOption = Output.table) -> None:
    """What applies to a job: its own policy or the settings, when the next checkpoint is due, and what went wrong."""
    client = connect()
    show_one(client.get(_path(find_job(client, job))), output)


@group.command("set")
def set_policy(
    job: JobArgument,
    every: Annotated[
        float | None, typer.Option("--every", min=0, metavar="MINUTES", help="between two checkpoints; 0: none")
    ] = None,
    keep: Annotated[int | None, typer.Option("--keep", min=1, max=1000, help="how many of them are kept")] = None,
    before_drain: Annotated[
        bool | None,
        typer.Option("--before-drain/--no-before-drain", help="make one before a drain moves the job off its device"),
    ] = None,
    lossy: Annotated[
        int | None,
        typer.Option(
            "--lossy", min=0, max=51, metavar="BITS",
            help="round named optimizer state to so many bits of mantissa (checkpoint create); 0: all of it is exact",
        ),
    ] = None,
    output: OutputOption = Output.table,
) -> None:  # fmt: skip
    """Give a job a policy of its own. What is not named stays as it is."""
    client = connect()
    path = _path(find_job(client, job))
    now, tag = client.get_tagged(path)
    body = {name: now[name] for name in ("every_minutes", "keep", "before_drain")}
    if every is not None:
        body["every_minutes"] = every or None
    body |= {"keep": body["keep"] if keep is None else keep}
    body |= {"before_drain": body["before_drain"] if before_drain is None else before_drain}
    bits = now.get("keep_bits") if lossy is None else lossy or None
    if bits is not None or "keep_bits" in now:  # daemons of earlier versions do not know it
        body["keep_bits"] = bits
    row = client.put(path, body, tag)
    if output is Output.json:
        show_json(row)
    else:
        console.print(f"{escape(job)}: {sentence(row)}")


@group.command("rm")
def remove_policy(job: JobArgument, output: OutputOption = Output.table) -> None:
    """Take a job's policy away: it has what the settings say. Checkpoints that were made stay."""
    client = connect()
    path = _path(find_job(client, job))
    _, tag = client.get_tagged(path)
    client.delete(path, tag)
    row = client.get(path)
    if output is Output.json:
        show_json(row)
    else:
        console.print(f"{escape(job)}, by the settings: {sentence(row)}")


def sentence(row: dict[str, Any]) -> str:
    parts = []
    if row["every_minutes"] is not None:
        parts.append(f"a checkpoint every {row['every_minutes']:g} minutes")
    if row["before_drain"]:
        parts.append("one before a drain")
    kept = f"; the newest {row['keep']} are kept" if parts else ""
    if parts and row.get("keep_bits"):
        kept += f"; optimizer state has {row['keep_bits']} bits of mantissas"
    return (" and ".join(parts) or "no checkpoints without a request") + kept


def _path(job: str) -> str:
    return f"/v1/jobs/{job}/checkpoint-policy"
