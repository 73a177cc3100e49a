"""How long a job will still run, how much device memory it will have, and how its steps scale: predict, scaling."""

from __future__ import annotations

from typing import Annotated

import typer

from xmigd.cli.common import JobArgument, connect, find_job
from xmigd.cli.output import Output, OutputOption, console, escape, show, show_json, size
from xmigd.words import duration


def register(app: typer.Typer) -> None:
    app.command("predict")(predict)
    app.command("scaling")(scaling)


def predict(job: JobArgument, output: OutputOption = Output.table) -> None:
    """How long a job will still run, and its peak of device memory, from jobs of its user that have ended.

    P50: half of such jobs have at most this; P90: nine tenths. Where nothing can be predicted, the reason is shown."""
    client = connect()
    found = client.get(f"/v1/jobs/{find_job(client, job)}/prediction")
    if output is Output.json:
        show_json(found)
        return
    console.print(f"runs since        {duration(found['elapsed_s'])}")
    for title, key, form in (("still runs", "remaining_s", duration), ("peak of memory", "peak_bytes", size)):
        each = found[key]
        if each["unknown"]:
            console.print(f"{title:17} unknown: {escape(each['unknown'])}", soft_wrap=True)
        else:
            console.print(f"{title:17} {form(each['p50'])} (P50), {form(each['p90'])} (P90)")
    console.print(f"[dim]from {escape(found['basis'])}[/dim]", soft_wrap=True)


def scaling(
    job: JobArgument,
    devices: Annotated[str, typer.Option("--devices", metavar="N,N", help="numbers of devices")] = "1,2,4,8",
    output: OutputOption = Output.table,
) -> None:
    """How long a job's step would take on other numbers of devices, from jobs that differ only in that number.

    The range has the steps of all models that agree with what was measured."""
    client = connect()
    counts = [each.strip() for each in devices.split(",")]
    if not all(each.isdigit() for each in counts):
        raise typer.BadParameter("numbers of devices, separated by commas: 1,2,4", param_hint="--devices")
    found = client.get(f"/v1/jobs/{find_job(client, job)}/scaling", devices=counts)
    if output is Output.json:
        show_json(found)
        return
    measured = {each["devices"]: each for each in found["measured"]}
    rows = [
        {
            "devices": each["devices"], "jobs": measured.get(each["devices"], {}).get("jobs", 0),
            "measured": _ms(measured.get(each["devices"], {}).get("step_ms")), "step": _ms(each["step_ms"]),
            "range": "-" if each["unknown"] else f"{_ms(each['least_ms'])} to {_ms(each['most_ms'])}",
            "unknown": each["unknown"] or "-",
        }
        for each in found["steps"]
    ]  # fmt: skip
    columns = {
        "devices": "DEVICES", "jobs": "JOBS", "measured": "MEASURED", "step": "STEP", "range": "RANGE",
        "unknown": "UNKNOWN",
    }  # fmt: skip
    show(rows, output, columns, "no number of devices was requested")


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g} ms"
