"""What commands print: tables for people, `-o json` for programs, and errors as what, why and what to do."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich import markup
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from xmigd.cli.invocation import Output as Output
from xmigd.cli.invocation import invocation
from xmigd.client import Refused
from xmigd.errors import XmigError
from xmigd.text import harmless, harmless_json
from xmigd.words import duration, milliseconds
from xmigd.words import exit_text as exit_text

# A terminal's width, or enough that no line of a file is broken.
NUMBERS = (
    "UTILISATION", "RECORDS", "PID", "SERVER", "FAULTS", "RECOVERIES", "PROCESSES", "GENERATION", "STALL", "RANK",
    "RANKS", "THE LAST", "SLOW-DOWN", "KERNELS THAT WAITED", "OVERDUE",
)  # fmt: skip
FREE_TEXT = ("WHAT", "CAUSE", "WHY", "MEANING", "DATA", "COMMAND", "HINT", "BEFORE", "AFTER")
LEAST = 16  # characters of a free text's column
console = Console(width=None if sys.stdout.isatty() else 240, highlight=False)
notes = Console(stderr=True, width=None if sys.stderr.isatty() else 240, highlight=False)


def _remember(value: Output) -> Output:
    """Errors come in the form that was requested, too."""
    invocation.get().output = value
    return value


OutputOption = Annotated[Output, typer.Option("--output", "-o", help="table or json", callback=_remember)]


def show(
    rows: Sequence[Mapping[str, Any]], output: Output, columns: Mapping[str, str], empty: str, *,
    optional: Sequence[str] = (),
) -> None:  # fmt: skip
    """A list. `columns`: field → title. `optional`: fields that a narrow terminal does without, these first."""
    if output is Output.json:
        show_json(rows)
        return
    if not rows:
        console.print(empty)
        return
    shown, left_out = dict(columns), []
    for name in optional:
        if name in shown and _width(rows, shown) > console.width:
            left_out.append(shown.pop(name))
    console.print(_table(rows, shown))
    if left_out:
        notes.print(f"[dim]no room for {', '.join(left_out)}: a wider terminal, or -o json, has them[/dim]")


def _width(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> int:
    """Characters that the columns need, where free text is broken into lines."""
    anything = console.options.update(max_width=1 << 16)
    widths = (
        min(LEAST, width) if title in FREE_TEXT else width
        for title, width in (
            (title, Measurement.get(console, anything, _table(rows, {name: title})).maximum)
            for name, title in columns.items()
        )
    )
    return sum(widths) + 2 * (len(columns) - 1)


def _table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name, title in columns.items():
        number = name.endswith(("_ms", "_bytes", "_s")) or title in NUMBERS
        free_text = title in FREE_TEXT
        table.add_column(
            title,
            justify="right" if number else "left",
            no_wrap=not free_text,
            overflow="fold" if free_text else "ellipsis",
        )
    for row in rows:
        table.add_row(*(cell(name, row.get(name)) for name in columns))
    return table


def show_one(row: Mapping[str, Any], output: Output, names: Mapping[str, str] | None = None) -> None:
    """One thing, a line for each field that is known."""
    if output is Output.json:
        show_json(row)
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name in names or row:
        table.add_row((names or {}).get(name, name), cell(name, row.get(name), whole=True))
    console.print(table)


def escape(text: str) -> str:
    """Words that are not ours, as a part of what is printed: neither Rich nor the terminal acts upon them."""
    return markup.escape(harmless(text, None))


def show_json(value: Any) -> None:
    print(harmless_json(value, 2))


def show_json_line(value: Any) -> None:
    print(harmless_json(value), flush=True)


def cell(name: str, value: Any, *, whole: bool = False) -> str:
    """A value for people; the field's name says what it is. `whole`: identifiers are not shortened."""
    if value is None:
        return "-"
    if name in ("id", "job_id", "process_id", "operation_id") and isinstance(value, str):
        return escape(value if whole else value[:12])
    if isinstance(value, bool):
        return "yes" if value else "[red]no[/red]" if name == "exact" else "no"
    if name in ("duration_s",):
        return duration(value)
    if isinstance(value, (int, float)) and (name in ("at", "time") or name.endswith("_at")):
        local = time.localtime(value)
        if whole:
            return time.strftime("%Y-%m-%d %H:%M:%S", local) + f".{int(value % 1 * 1000):03d}"
        today = time.strftime("%Y-%m-%d", local) == time.strftime("%Y-%m-%d")
        return time.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M", local)
    if name == "utilisation":
        return f"{100 * value:.0f} %"
    if name.endswith("_ms"):
        return milliseconds(value)
    if name.endswith("_bytes"):
        return size(value)
    if isinstance(value, dict):
        return escape(json.dumps(value, ensure_ascii=False)) if value else "-"
    if isinstance(value, list):
        return escape(", ".join(str(item) for item in value)) or "-"
    return escape(str(value))


def job_label(name: str, id: str, among: Mapping[str, set[str]] | None = None) -> str:
    """A job as people call it, with its id where the name alone would not say which. `among`: ids by name."""
    several = among is None or len(among.get(name, ())) > 1
    return f"{name} ({id[:12]})" if several else name


def with_jobs(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows with `job`: what their job is called."""
    among: dict[str, set[str]] = {}
    for row in rows:
        among.setdefault(str(row["job_name"]), set()).add(str(row["job_id"]))
    return [dict(row) | {"job": job_label(str(row["job_name"]), str(row["job_id"]), among)} for row in rows]


def process_label(process: Mapping[str, Any]) -> str:
    """What a message calls a process: its job's name first."""
    name, id = process.get("job_name"), str(process["id"])[:12]
    return escape(f"{name} · {id}" if name else id)


def size(value: float) -> str:
    """Bytes for people: the unit that leaves one to four digits before the point."""
    if value < 1 << 10:
        return f"{value:.0f} B"
    for unit, shift in (("KiB", 10), ("MiB", 20), ("GiB", 30)):
        if value < 1 << (shift + 10) or unit == "GiB":
            return f"{value / (1 << shift):.1f} {unit}"
    raise AssertionError("unreachable")


def show_error(error: XmigError, output: Output) -> None:
    """On standard error: what and why, where the process is if that is known, what to do."""
    if output is Output.json:
        document = error.problem if isinstance(error, Refused) else None
        found = document or {"code": error.code, "detail": error.message, "hint": error.hint}
        print(harmless_json(found), file=sys.stderr)
        return
    print(f"xmigctl: {harmless(error.message, None)}", file=sys.stderr)
    if isinstance(error, Refused):
        for line in _more(error.problem):
            print(f"  {harmless(line, None)}", file=sys.stderr)
    if error.hint:
        print(f"  {harmless(error.hint, None)}", file=sys.stderr)


def _more(problem: Mapping[str, Any]) -> list[str]:
    lines = []
    if phase := problem.get("phase"):
        lines.append(f"in phase {phase}")
    if where := problem.get("process_location"):
        lines.append(PLACES.get(str(where), f"the process is: {where}"))
    if operation := problem.get("operation"):
        lines.append(f"operation {operation}: xmigctl op show {operation}")
    return lines


PLACES = {
    "source": "the process is where it was",
    "target": "the process is on the target",
    "host": "the process is suspended in host memory",
    "file": "the process is suspended in a file",
    "checkpoint": "the process is in its checkpoint",
    "lost": "the process is lost",
}
