"""How a job shares its devices with others: sharing."""

from __future__ import annotations

import typer

from xmigd.cli.common import JobArgument, connect, find_job
from xmigd.cli.output import Output, OutputOption, console, show, show_json, size
from xmigd.words import milliseconds


def register(app: typer.Typer) -> None:
    app.command("sharing")(sharing)


def sharing(job: JobArgument, output: OutputOption = Output.table) -> None:
    """A running job's class and memory quota, and how long its kernels have waited for other jobs.

    OVERDUE: kernels that waited as long as they may. Many of them: a critical job on the device never rests."""
    client = connect()
    found = client.get(f"/v1/jobs/{find_job(client, job)}/sharing")
    if output is Output.json:
        show_json(found)
        return
    quota = found["memory_quota"]
    console.print(f"class         {found['priority']}")
    console.print(f"memory quota  {'all' if quota is None else size(quota)} of each device")
    for device, used in found["quota_used"].items():
        console.print(f"    on {device}  {size(used)} of it")
    if found.get("sm_share") is not None:
        console.print(f"SM share      {found['sm_share']} % of its device, where that is shared through MPS")
    if found["waits_ms"] is not None:
        console.print(f"suspended for another job of the rotation for {milliseconds(found['waits_ms'])}")
    console.print()
    columns = {
        "process_id": "PROCESS", "device": "DEVICE", "shares": "SHARES", "held_kernels": "KERNELS THAT WAITED",
        "held_ms": "FOR", "overdue_kernels": "OVERDUE", "mps": "MPS",
    }  # fmt: skip
    rows = [one | {"process_id": one["process"]} for one in found["processes"]]
    show(rows, output, columns, "none of its programs runs")
