"""Operations, followed to their end: a progress bar, Ctrl-C that cancels or detaches, and the right exit code.

For commands that start long work:

    operation = carry_out(client, "/v1/migrations", {...}, wait=wait, on_interrupt=on_interrupt, output=output)
    if operation is not None: ...  # it has succeeded: show operation["result"]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xmigd.cli.exits import CommandError, Exit
from xmigd.cli.output import PLACES, Output, console, escape, notes, show_json, size
from xmigd.client import RESTART_PATIENCE, Client, NoDaemon

if TYPE_CHECKING:
    from rich.progress import TaskID

OVER = frozenset({"succeeded", "failed", "cancelled"})
INTERVAL = 0.2  # seconds between two looks: what an eye can follow


class OnInterrupt(StrEnum):
    cancel = "cancel"
    detach = "detach"


WaitOption = Annotated[bool, typer.Option("--wait/--no-wait", help="follow it to its end, or only start it")]
OnInterruptOption = Annotated[
    OnInterrupt, typer.Option("--on-interrupt", help="what Ctrl-C does while waiting; a second one always detaches")
]


def carry_out(
    client: Client,
    path: str,
    body: dict[str, Any] | None = None,
    *,
    wait: bool,
    output: Output,
    on_interrupt: OnInterrupt = OnInterrupt.cancel,
) -> dict[str, Any] | None:
    """Start long work with a POST. With `wait`, the operation once it has succeeded (in JSON it is printed here, and
    otherwise the caller shows its result). Without, it is printed and None. Raises what `outcome` does."""
    operation = client.start(path, body)
    if not wait:
        if output is Output.json:
            show_json(operation)
        else:
            console.print(f"{operation['kind']} started: operation {operation['id']}")
            console.print(f"[dim]xmigctl op watch {operation['id']}[/dim]")
        return None
    operation = follow(client, operation, on_interrupt=on_interrupt, quiet=output is Output.json)
    if output is Output.json:
        show_json(operation)
        if operation["state"] != "succeeded":
            raise SystemExit(exit_code(operation))
        return operation
    outcome(operation)
    return operation


def outcome(operation: Mapping[str, Any]) -> None:
    """Raises CommandError unless it has succeeded: what failed, why, where the process is, what to do."""
    state = operation["state"]
    if state == "succeeded":
        return
    error = operation.get("error") or {}
    if state == "cancelled":
        raise CommandError(error.get("detail") or f"the {operation['kind']} was cancelled", code="cancelled",
                           hint=_where(error), exit_code=Exit.CANCELLED)  # fmt: skip
    phase = f" in phase {operation['phase']}" if operation.get("phase") else ""
    hint = "; ".join(part for part in (_where(error), str(error.get("hint") or "")) if part)
    raise CommandError(f"the {operation['kind']} failed{phase}: {error.get('detail') or 'no reason is known'}",
                       hint=hint, code=error.get("code"), exit_code=Exit.OPERATION_FAILED)  # fmt: skip


def follow(
    client: Client,
    operation: Mapping[str, Any],
    *,
    on_interrupt: OnInterrupt = OnInterrupt.detach,
    quiet: bool = False,
    timeout: float | None = None,
) -> dict[str, Any]:
    """Watch until it is over. `timeout`: seconds. Raises CommandError (NOT_OVER): time was up, or Ctrl-C detached."""
    watch = _Watch(client, dict(operation), None if timeout is None else time.monotonic() + timeout)
    draw = _silent if quiet else _bar if sys.stderr.isatty() else _lines
    while True:
        try:
            draw(watch)
            return watch.operation
        except KeyboardInterrupt:
            if on_interrupt is OnInterrupt.detach or watch.cancelling or not _cancel(watch):
                raise _still_going(watch.operation, "detached") from None


class _Watch:
    """The operation as it goes on, and the daemon that may be restarted meanwhile."""

    def __init__(self, client: Client, operation: dict[str, Any], end: float | None) -> None:
        self.client = client
        self.operation = operation
        self.cancelling = False
        self._end = end
        self._silent_since: float | None = None

    def look(self) -> bool:
        """Is it over? Looks again after INTERVAL otherwise."""
        try:
            self.operation = self.client.get(f"/v1/operations/{self.operation['id']}")
            self._silent_since = None
        except NoDaemon:
            # Restarting the daemon ends no operation without a word: it is resolved as the daemon starts.
            self._silent_since = self._silent_since or time.monotonic()
            if time.monotonic() - self._silent_since > RESTART_PATIENCE:
                raise
        if self.operation["state"] in OVER:
            return True
        if self._end is not None and time.monotonic() >= self._end:
            raise _still_going(self.operation, "time is up")
        time.sleep(INTERVAL)
        return False


def _cancel(watch: _Watch) -> bool:
    """Ask for its end. False: it cannot be cancelled any more; it is reported why."""
    watch.cancelling = True
    if watch.operation.get("may_cancel") is False and watch.operation["state"] not in OVER:
        why = watch.operation.get("may_cancel_why") or "it is past the point of no return"
        notes.print(f"cannot be cancelled any more: {escape(why)}")
        return False
    notes.print("cancelling; press Ctrl-C again to leave it to itself")
    watch.client.delete(f"/v1/operations/{watch.operation['id']}")
    return True


def _still_going(operation: Mapping[str, Any], why: str) -> CommandError:
    return CommandError(f"{why}; the {operation['kind']} goes on", hint=f"xmigctl op watch {operation['id']}",
                        code="not_over", exit_code=Exit.NOT_OVER)  # fmt: skip


def exit_code(operation: Mapping[str, Any]) -> Exit:
    """What a command ends with that followed this operation."""
    return {"succeeded": Exit.OK, "cancelled": Exit.CANCELLED}.get(operation["state"], Exit.OPERATION_FAILED)


def _where(error: Mapping[str, Any]) -> str:
    place = error.get("process_location")
    return PLACES.get(str(place), "") if place else ""


def _silent(watch: _Watch) -> None:
    while not watch.look():
        pass


def _lines(watch: _Watch) -> None:
    """Not a terminal: a line at each change of the phase."""
    reported = ""
    over = False
    while not over:
        over = watch.look()
        now = " ".join(str(watch.operation[k]) for k in ("kind", "state", "phase") if watch.operation.get(k))
        if now != reported:
            notes.print(f"{now}{_amount(watch.operation)}")
            reported = now


def _bar(watch: _Watch) -> None:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[amount]}"), TimeElapsedColumn())
    with Progress(*columns, console=notes, transient=True) as bars:
        task = bars.add_task(str(watch.operation["kind"]), total=None, amount="")
        over = False
        while not over:
            over = watch.look()
            _update(bars.update, task, watch.operation)


def _update(update: Callable[..., None], task: TaskID, operation: Mapping[str, Any]) -> None:
    progress = operation.get("progress") or {}
    total, done = progress.get("total_bytes"), progress.get("processed_bytes")
    phase = operation.get("phase") or operation["state"]
    update(task, description=f"{operation['kind']}  [bold]{phase}[/bold]", total=total, completed=done or 0,
           amount=_amount(operation).strip())  # fmt: skip


def _amount(operation: Mapping[str, Any]) -> str:
    """How far it is, of what is known."""
    progress = operation.get("progress") or {}
    parts = []
    total, done = progress.get("total_bytes"), progress.get("processed_bytes")
    if total is not None and done is not None:
        parts.append(f"{size(done)} of {size(total)}")
    if progress.get("bytes_per_s") is not None:
        parts.append(f"{size(progress['bytes_per_s'])}/s")
    if progress.get("dirty_bytes_per_s") is not None:
        parts.append(f"dirtied {size(progress['dirty_bytes_per_s'])}/s")
    if progress.get("iteration") is not None:
        parts.append(f"round {progress['iteration']}")
    return "  " + " · ".join(parts) if parts else ""
