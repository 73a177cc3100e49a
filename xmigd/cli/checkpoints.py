"""Jobs' whole states, kept apart from the jobs: checkpoint create, list, show, verify, rm, discard; restore."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from xmigd.cli import checkpoint_policy
from xmigd.cli.checkpoint_files import verify_offline
from xmigd.cli.common import (
    JobOption,
    LimitOption,
    ProcessOrJobArgument,
    YesOption,
    confirm,
    connect,
    find_by_prefix,
    find_job,
    find_processes,
)
from xmigd.cli.exits import CommandError, Exit
from xmigd.cli.follow import OnInterrupt, OnInterruptOption, WaitOption, carry_out
from xmigd.cli.output import Output, OutputOption, console, escape, show, show_json, show_one, size
from xmigd.client import Client
from xmigd.published import further
from xmigd.words import milliseconds

group = typer.Typer(no_args_is_help=True, help="Checkpoints: jobs' whole states, from which they can be restored.")
CheckpointArgument = Annotated[str, typer.Argument(help="the checkpoint: its id, or the beginning of it")]

KeyFileOption = Annotated[
    str | None,
    typer.Option(
        "--key-file", metavar="FILE",
        help="of the key, 32 bytes or 64 hexadecimal digits, on the machine of xmigd, which reads it; only root may be "
        "able to",
    ),
]  # fmt: skip


def register(app: typer.Typer) -> None:
    app.add_typer(group, name="checkpoint")
    group.add_typer(checkpoint_policy.group, name="policy")
    app.command()(restore)


@group.command()
def create(
    process: ProcessOrJobArgument,
    stop: Annotated[bool, typer.Option("--stop", help="end the program where it was written down")] = False,
    lossy: Annotated[
        int | None,
        typer.Option(
            "--lossy", min=1, max=51, metavar="BITS",
            help="round the optimizer state that its programs have named (run --lossy-optimizer-state) to so many bits "
            "of mantissa; default: all of it is exact",
        ),
    ] = None,
    wait: WaitOption = True,
    on_interrupt: OnInterruptOption = OnInterrupt.cancel,
    output: OutputOption = Output.table,
) -> None:  # fmt: skip
    """Write down all that a job is: device memory, the program, the positions in its files. It stands still meanwhile,
    and goes on."""
    client = connect()
    _, found = find_processes(client, process)
    body: dict[str, Any] = {"job": found[0]["job_id"], "stop": stop}
    if lossy is not None:  # daemons of earlier versions do not know it
        body["keep_bits"] = lossy
    operation = carry_out(client, "/v1/checkpoints", body, wait=wait, output=output, on_interrupt=on_interrupt)
    if operation is not None and output is not Output.json:
        result = operation["result"]
        took = (
            "" if result["standstill_ms"] is None else f"; it stood still for {milliseconds(result['standstill_ms'])}"
        )
        console.print(
            f"checkpoint [bold]{result['checkpoint']}[/bold]: {size(result['content_bytes'])}, "
            f"{size(result['stored_bytes'])} on disk{took}"
        )
        if result.get("lossy"):
            console.print(f"not exact: {rounding(result['lossy'])}")
        console.print(f"[dim]xmigctl restore {result['checkpoint'][:12]}[/dim]")


@group.command("list")
def list_checkpoints(
    job: JobOption = None,
    in_doubt: Annotated[
        bool,
        typer.Option(
            "--in-doubt", help="instead: parts of this node of which only the job's first node knows what they are"
        ),
    ] = False,
    limit: LimitOption = 50,
    output: OutputOption = Output.table,
) -> None:
    """Checkpoints, newest first."""
    client = connect()
    of_job = find_job(client, job) if job else None
    rows = client.get("/v1/checkpoints", job=of_job, limit=limit, in_doubt="true" if in_doubt else None)
    columns = {
        "created_at": "TIME", "id": "CHECKPOINT", "job_name": "JOB", "user": "USER", "device": "DEVICE",
        "content_bytes": "SIZE", "stored_bytes": "STORED", "standstill_ms": "STANDSTILL", "by": "BY",
        "places": "PLACES",
    }  # fmt: skip
    if output is Output.table:  # daemons of earlier versions do not tell all of it
        rows = [row | {"by": "policy" if row.get("by_policy") else "request"} for row in rows]
        rows = [row | {"places": ",".join(row["places"]) or "lost"} if "places" in row else row for row in rows]
        rows = [row | {"nodes": ",".join(row.get("nodes", []))} for row in rows]
        if any(row["nodes"] for row in rows):
            columns["nodes"] = "NODES"
    show(
        rows,
        output,
        columns,
        "no parts in doubt" if in_doubt else "no checkpoints",
        optional=("places", "by", "standstill_ms", "user"),
    )


@group.command("show")
def show_checkpoint(checkpoint: CheckpointArgument, output: OutputOption = Output.table) -> None:
    """One checkpoint: of what it was made, and when."""
    row = _find(connect(), checkpoint)
    if output is Output.table and row.get("lossy"):
        row = row | {"lossy": rounding(row["lossy"])}
    show_one(row, output)


@group.command()
def verify(
    checkpoint: Annotated[
        str,
        typer.Argument(
            help="the checkpoint: its id, or the beginning of it; with --offline an exported file, or the folder of "
            "checkpoints"
        ),
    ],
    offline: Annotated[bool, typer.Option("--offline", help="read a file or a folder here, without xmigd")] = False,
    key_file: Annotated[
        str | None, typer.Option("--key-file", metavar="FILE", help="with --offline: the key of an encrypted file")
    ] = None,
    wait: WaitOption = True,
    on_interrupt: OnInterruptOption = OnInterrupt.cancel,
    output: OutputOption = Output.table,
) -> None:
    """Read all of a checkpoint, and compare it with its hashes."""
    if offline:
        verify_offline(checkpoint, key_file, output)
        return
    if key_file is not None:
        raise CommandError("--key-file is for --offline: what xmigd keeps is not encrypted", exit_code=Exit.USAGE)
    client = connect()
    found = _find(client, checkpoint)
    path = f"/v1/checkpoints/{found['id']}:verify"
    operation = carry_out(client, path, wait=wait, output=output, on_interrupt=on_interrupt)
    if operation is not None and output is not Output.json:
        console.print(f"checkpoint {found['id'][:12]} is whole: {operation['result']['pieces']} pieces")


@group.command("export")
def export_checkpoint(
    checkpoint: CheckpointArgument, key_file: KeyFileOption = None, wait: WaitOption = True,
    on_interrupt: OnInterruptOption = OnInterrupt.detach, output: OutputOption = Output.table,
) -> None:  # fmt: skip
    """Write a checkpoint into one file, for another node. For operators."""
    client = connect()
    path = f"/v1/checkpoints/{_find(client, checkpoint)['id']}:export"
    operation = carry_out(client, path, _key(key_file), wait=wait, output=output, on_interrupt=on_interrupt)
    if operation is not None and output is not Output.json:
        result = operation["result"]
        encrypted = ", encrypted" if result.get("encrypted") else ""
        console.print(f"{escape(result['path'])}: {size(result['bytes'])}{encrypted}")


@group.command("import")
def import_checkpoint(
    file: Annotated[str, typer.Argument(help="its name in the folder `exported` beside the daemon's checkpoints")],
    key_file: KeyFileOption = None,
    wait: WaitOption = True,
    on_interrupt: OnInterruptOption = OnInterrupt.detach,
    output: OutputOption = Output.table,
) -> None:
    """Take a checkpoint out of a file that another node has exported. For operators."""
    client = connect()
    operation = carry_out(
        client, "/v1/checkpoints:import", {"file": file} | _key(key_file), wait=wait, output=output,
        on_interrupt=on_interrupt,
    )  # fmt: skip
    if operation is not None and output is not Output.json:
        result = operation["result"]
        console.print(f"checkpoint [bold]{result['checkpoint']}[/bold]: {size(result['content_bytes'])}")


@group.command("rm")
def remove(checkpoint: CheckpointArgument, yes: YesOption = False, output: OutputOption = Output.table) -> None:
    """Remove a checkpoint. What other checkpoints have, too, stays."""
    client = connect()
    found = _find(client, checkpoint)
    confirm(f"Remove checkpoint {found['id'][:12]} of {found['job_name']}?", yes)
    client.delete(f"/v1/checkpoints/{found['id']}")
    if output is Output.json:
        show_json({"id": found["id"], "removed": True})
    else:
        console.print(f"checkpoint {found['id'][:12]} is removed")


@group.command()
def discard(
    part: Annotated[str, typer.Argument(help="the checkpoint: its id, or the beginning of it")],
    yes: YesOption = False,
    output: OutputOption = Output.table,
) -> None:
    """Remove this node's part of a checkpoint that is in doubt, if the node that decides about it is gone for good.
    Look there first: if it comes back and has the checkpoint, nobody can restore it any more. For operators."""
    client = connect()
    rows = client.get("/v1/checkpoints", in_doubt="true", limit=1000)
    found = find_by_prefix(rows, part, "part in doubt", "xmigctl checkpoint list --in-doubt")
    confirm(
        f"Is {found['nodes'][0]} gone for good? This part of {found['job_name']} may be all that is missing there: "
        "without it the checkpoint is worth nothing.", yes,
    )  # fmt: skip
    client.post(f"/v1/checkpoints/{found['id']}:discard")
    if output is Output.json:
        show_json({"id": found["id"], "discarded": True})
    else:
        console.print(f"the part of checkpoint {found['id'][:12]} is removed")


def restore(
    checkpoint: CheckpointArgument,
    device: Annotated[
        list[str] | None,
        typer.Option("--device", help="another one than it had; as many as it had, or one for each copy in turn"),
    ] = None,
    copies: Annotated[
        int, typer.Option("--copies", min=1, max=64, help="so many jobs, each with its own files; after run --movable")
    ] = 1,
    own_files: Annotated[
        bool, typer.Option("--own-files", help="copy the files that the program writes to, and let it have the copies")
    ] = False,
    publish: Annotated[
        list[str] | None,
        typer.Option(
            "--publish",
            metavar="[[ADDRESS:]PORT:]INNER",
            help="a port of its private network, to be reached from outside; further copies get the ports after it",
        ),
    ] = None,
    node: Annotated[
        list[str] | None,
        typer.Option(
            "--node", metavar="OLD=NEW", help="of a job of several nodes: what node OLD had goes on on node NEW"
        ),
    ] = None,
    wait: WaitOption = True,
    on_interrupt: OnInterruptOption = OnInterrupt.cancel,
    output: OutputOption = Output.table,
) -> None:
    """Make the programs of a checkpoint again, in a job of their own. They go on where they were written down."""
    client = connect()
    # The part of a node that is gone for good may not be here yet.
    found = {"id": checkpoint, "job_name": "the job"} if node and len(checkpoint) == 32 else _find(client, checkpoint)
    path = f"/v1/checkpoints/{found['id']}:restore"
    body: dict[str, Any] = {"devices": device or []}
    if node:
        body["nodes"] = dict(_instead(each) for each in node)
    if own_files or copies > 1:  # daemons of earlier versions do not know it
        body["own_files"] = True
    for number in range(copies):
        if publish:
            body["publish"] = [further(each, number) for each in publish]
        if copies > 1 and device:
            body["devices"] = [device[number % len(device)]]
        operation = carry_out(client, path, body, wait=wait, output=output, on_interrupt=on_interrupt)
        if operation is not None and output is not Output.json:
            result = operation["result"]
            console.print(
                f"{escape(found['job_name'])} goes on as job [bold]{result['job'][:12]}[/bold], pid {result['pid']}, "
                f"on {escape(result['device'])}, after {milliseconds(result['ms'])}"
            )
            if result.get("lossy"):
                console.print(f"  its optimizer state is not exact: {rounding(result['lossy'])}")
            for path_before, copy in (result.get("files") or {}).items():
                console.print(f"  {escape(path_before)} is {escape(copy)}")


def rounding(lossy: dict[str, Any]) -> str:
    """What a lossy checkpoint has rounded, and by how much at most."""
    parts = [
        f"{size(each['bytes'])} of {each['type']}, each number by at most {each['largest_relative']:.1e} of it and "
        f"{each['largest_absolute']:.1e}"
        for each in lossy["rounded"]
    ]
    stored, before = lossy["stored_bytes"], size(lossy["piece_bytes"])
    takes = "" if stored is None else f"; the pieces with them take {size(stored)} instead of {before}"
    return f"{lossy['keep_bits']} bits of mantissas: {'; '.join(parts)}{takes}"


def _instead(text: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not (old and equals and new):
        raise CommandError(f"--node {text}: it is OLD=NEW, two names of nodes", exit_code=Exit.USAGE)
    return old, new


def _key(path: str | None) -> dict[str, Any]:
    """The daemon reads the file: what it contains is never sent."""
    return {} if path is None else {"key_file": os.path.abspath(path)}


def _find(client: Client, wanted: str) -> dict[str, Any]:
    return find_by_prefix(client.get("/v1/checkpoints", limit=1000), wanted, "checkpoint", "xmigctl checkpoint list")
