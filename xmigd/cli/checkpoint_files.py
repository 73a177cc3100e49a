"""Checkpoints without a daemon: `xmigctl checkpoint verify --offline`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from xmigd.cli.exits import CommandError, Exit
from xmigd.cli.output import Output, console, escape, notes, show_json, size
from xmigd.errors import XmigError


def verify_offline(name: str, key_file: str | None, output: Output) -> None:
    """Of an exported file or a folder of checkpoints. Raises CommandError: something is damaged."""
    from xmigd.checkpoints.archive import key_of
    from xmigd.checkpoints.offline import check

    path = Path(name)
    try:
        key = None if key_file is None else key_of(Path(key_file))
        report = check(path, key=key)
    except OSError as error:
        where = error.filename or name
        raise CommandError(f"{where} cannot be read: {error.strerror}", exit_code=Exit.NOT_FOUND,
                           hint="name an exported file, or the folder of checkpoints") from None  # fmt: skip
    except XmigError as error:
        raise CommandError(error.message, hint=error.hint, code=error.code, exit_code=Exit.USAGE) from None
    if output is Output.json:
        show_json(asdict(report) | {"whole": report.whole})
        if not report.whole:
            raise SystemExit(Exit.OPERATION_FAILED)
        return
    for note in report.notes:
        notes.print(f"[dim]{escape(note)}[/dim]")
    broken = {id for damage in report.damages for id in damage["checkpoints"]}
    for found in report.checkpoints:
        state = "[red]damaged[/red]" if found["id"] in broken else "whole"
        pieces = f"{found['pieces']} pieces, {size(found['content_bytes'])}"
        console.print(f"checkpoint {found['id'][:12]} of {escape(found['job_name'])}: {state}, {pieces}")
    if not report.checkpoints and report.whole:
        console.print("no checkpoints")
    for damage in report.damages:
        console.print(f"{escape(damage['where'])}: {escape(damage['what'])}")
    if not report.whole:
        raise CommandError(
            f"{len(report.damages)} places are damaged" if len(report.damages) > 1 else "1 place is damaged",
            hint="use another checkpoint, or another copy of the file", code="damaged",
            exit_code=Exit.OPERATION_FAILED,
        )  # fmt: skip
