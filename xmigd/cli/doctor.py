"""doctor: does this node have what xMIG needs?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from xmigd.cli.common import settings
from xmigd.cli.exits import Exit
from xmigd.cli.output import Output, OutputOption, console, escape, show_json

if TYPE_CHECKING:
    from xmigd.doctor import Finding

MARKS = {"ok": "[green]✓[/green]", "note": "[dim]·[/dim]", "warning": "[yellow]![/yellow]", "failing": "[red]✗[/red]"}


def register(app: typer.Typer) -> None:
    app.command()(doctor)


def doctor(
    trial: Annotated[
        bool, typer.Option("--try", help="run a small program under xMIG, too: memory and copies")
    ] = False,
    output: OutputOption = Output.table,
) -> None:
    """Check this node, and say what to do. Exit code 1: something that the settings ask for does not work."""
    from xmigd.doctor import System, examine, try_program

    chosen = settings()
    findings = examine(System(), chosen)
    if trial:
        findings += try_program(chosen)
    if output is Output.json:
        show_json([finding.as_json() for finding in findings])
    else:
        _show(findings)
    if any(finding.state == "failing" for finding in findings):
        raise typer.Exit(Exit.FAILED)


def _show(findings: list[Finding]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(no_wrap=True)
    table.add_column()
    for finding in findings:
        text = escape(finding.text) + (f"\n[dim]→ {escape(finding.hint)}[/dim]" if finding.hint else "")
        table.add_row(f"{MARKS[finding.state]} {finding.state}", finding.check, text)
    console.print(table)
    counts = {state: sum(finding.state == state for finding in findings) for state in MARKS}
    console.print(", ".join(f"{count} {state}" for state, count in counts.items() if count))
