"""What commands share: the daemon that is meant, names of jobs and processes, common options."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xmigd.cli.exits import CommandError, Exit
from xmigd.cli.invocation import invocation
from xmigd.client import Client, Refused
from xmigd.place import Place, find_place, needs_every_rule

if TYPE_CHECKING:
    from xmigd.settings import Settings

TIMES = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}

JobArgument = Annotated[
    str, typer.Argument(help="the job: its id, the beginning of it, its name, or what its scheduler calls it")
]
ProcessArgument = Annotated[
    str,
    typer.Argument(
        help="the process: its id, the beginning of it, its pid, or the name of its job; pid:1234 if it was not "
        "started under xMIG"
    ),
]
ProcessOrJobArgument = Annotated[
    str,
    typer.Argument(
        help="the process: its id, the beginning of it, or its pid; or the name of its job, for all processes of that; "
        "pid:1234 if it was not started under xMIG"
    ),
]


class Sort(StrEnum):
    """xmigd.jobs.service.Sort"""

    created = "created"
    name = "name"
    memory = "memory"
    state = "state"


class JobState(StrEnum):
    """xmigd.jobs.schemas.JobState"""

    created = "created"
    running = "running"
    suspended = "suspended"
    ended = "ended"
    stopped = "stopped"
    lost = "lost"


StateOption = Annotated[list[JobState] | None, typer.Option("--state", help="only such jobs; may be given again")]
UserOption = Annotated[str | None, typer.Option("--user", help="only this user's: a name, or a number")]
LabelOption = Annotated[
    list[str] | None,
    typer.Option("--label", metavar="KEY[=VALUE]", help="only jobs with this label; given again: with all of them"),
]
ExternalIdOption = Annotated[
    str | None, typer.Option("--external-id", metavar="ID", help="only what its scheduler calls so")
]
DeviceOption = Annotated[str | None, typer.Option("--device", help="only jobs on this one, for example cuda:0")]
SortOption = Annotated[Sort | None, typer.Option("--sort", help="created: newest first; memory: most first")]
JobOption = Annotated[str | None, typer.Option("--job", help="only this job: its id, the beginning of it, or its name")]
LimitOption = Annotated[int, typer.Option("--limit", min=1, max=1000, help="how many, newest first")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="do not ask")]


def settings() -> Settings:
    """All of them. Raises CommandError: a setting is wrong, or its file cannot be read."""
    from pydantic import ValidationError

    from xmigd.configuration import what_is_wrong
    from xmigd.settings import Settings

    try:
        return Settings()
    except ValidationError as error:
        where, why = what_is_wrong(Settings, error.errors(include_url=False)[0])
        raise CommandError(f"{where}: {why}", exit_code=Exit.USAGE) from None
    except (OSError, ValueError) as error:
        raise CommandError(f"the settings cannot be read: {error}", exit_code=Exit.USAGE) from None


def place() -> Place:
    """Where the local daemon is. Raises CommandError as `settings` does."""
    if needs_every_rule():
        settings()
    try:
        return find_place()
    except (OSError, ValueError) as error:
        raise CommandError(f"the settings cannot be read: {error}", exit_code=Exit.USAGE) from None


def connect(timeout: float = 30.0) -> Client:
    """The daemon that the options before the command name."""
    requested = invocation.get()
    client = Client(
        place(), url=requested.url, token=requested.token, ca_file=requested.ca_file, client_cert=requested.client_cert,
        timeout=timeout,
    )  # fmt: skip
    requested.to_close.callback(client.close)
    return client


def read_token(value: str | None) -> str | None:
    """A token from --token or XMIG_TOKEN: itself, or @FILE. A file does not show in the list of processes."""
    value = value or os.environ.get("XMIG_TOKEN") or None
    if value is None or not value.startswith("@"):
        return value
    try:
        with open(value[1:], encoding="utf-8") as file:
            return file.read().strip()
    except OSError as error:
        raise CommandError(f"the token's file {value[1:]}: {error.strerror}", exit_code=Exit.USAGE) from None


def read_secret(value: str | None) -> str | None:
    """Of @FILE: as an argument, everybody on the machine could read it."""
    if value is not None and not value.startswith("@"):
        raise CommandError("a secret on the command line is none", hint="write it to a file, and name that: @FILE",
                           exit_code=Exit.USAGE)  # fmt: skip
    return read_token(value)


def find_job(client: Client, wanted: str) -> str:
    """A job's id, from the id, its beginning, or the job's name: the one that lives, otherwise the newest. At last from
    what its scheduler calls it: the newest."""
    jobs = client.get("/v1/jobs", limit=1000)
    by_id = [job["id"] for job in jobs if job["id"].startswith(wanted)]
    named = [job for job in jobs if job["name"] == wanted]
    live = [job for job in named if job["processes"]]
    if not by_id and len(live) > 1:
        ids = ", ".join(job["id"][:12] for job in live[:8])
        raise CommandError(f"{len(live)} jobs that live are called {wanted!r}: {ids}", hint="name one by its id",
                           exit_code=Exit.USAGE)  # fmt: skip
    by_name = [job["id"] for job in live or named]
    if len(by_id) > 1:
        raise CommandError(f"{wanted!r} begins {len(by_id)} jobs' ids", hint="write more of it", exit_code=Exit.USAGE)
    for found in (*by_id, *by_name):
        return str(found)
    with contextlib.suppress(Refused):  # a daemon of an earlier version
        for job in client.get("/v1/jobs", external_id=wanted, limit=1):
            return str(job["id"])
    raise CommandError(
        f"there is no job {wanted!r}", hint="xmigctl ps --all lists them", code="not_found", exit_code=Exit.NOT_FOUND
    )


def parse_labels(given: Iterable[str]) -> dict[str, str]:
    """Of KEY=VALUE. Raises CommandError."""
    found: dict[str, str] = {}
    for each in given:
        key, equals, value = each.partition("=")
        if not equals or not key:
            raise CommandError(f"{each!r} is no label", hint="write KEY=VALUE", exit_code=Exit.USAGE)
        if key in found:
            raise CommandError(f"the label {key!r} is given twice", hint="give it once", exit_code=Exit.USAGE)
        found[key] = value
    return found


def parse_size(text: str) -> int:
    """Bytes of 20GiB, 512M, ...: units of 1024. Raises CommandError."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,6})?) ?([KMGT]?)(?:iB|B)?", text)
    if found is None or not (bytes := int(float(found[1]) * (1 << 10 * " KMGT".index(found[2] or " ")))):
        raise CommandError(f"{text!r} is no size", hint="write 20GiB or 512MiB", exit_code=Exit.USAGE)
    return bytes


def parse_time(text: str) -> float:
    """Seconds of 90, 90s, 30m, 2h, 1.5d, 4w. Raises CommandError."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,6})?)([smhdw]?)", text)
    if found is None:
        raise CommandError(f"{text!r} is no time", hint="write 30d, 12h, 90m or 10s", exit_code=Exit.USAGE)
    return float(found[1]) * TIMES[found[2] or "s"]


def labels_text(labels: Mapping[str, str]) -> str:
    return " ".join(f"{key}={value}" for key, value in labels.items())


def find_process(client: Client, wanted: str, *, live: bool = True) -> dict[str, Any]:
    """A process, from its id, the beginning of it, its pid, or its job's id or name if the job has one process.
    pid:1234 is a program that was not started under xMIG, as it is."""
    if re.fullmatch(r"pid:\d+", wanted):
        return {"id": wanted}
    rows = client.get("/v1/processes", live=live, limit=1000)
    kinds = (
        [row for row in rows if row["id"] == wanted],
        [row for row in rows if str(row["pid"]) == wanted],
        [row for row in rows if row["id"].startswith(wanted)],
        [row for row in rows if row["job_name"] == wanted or row["job_id"].startswith(wanted)],
    )
    for found in kinds:
        if len(found) == 1:
            return dict(found[0])
        if found:
            ids = ", ".join(row["id"][:12] for row in found[:8])
            raise CommandError(f"{wanted!r} means {len(found)} processes: {ids}", hint="name one by its id",
                               exit_code=Exit.USAGE)  # fmt: skip
    kind = "running process" if live else "process"
    raise CommandError(
        f"there is no {kind} {wanted!r}", hint="xmigctl ps lists them", code="not_found", exit_code=Exit.NOT_FOUND
    )


def find_processes(client: Client, wanted: str) -> tuple[str, list[dict[str, Any]]]:
    """As find_process, or all of a job that has several: their path in the API, and the processes."""
    if not re.fullmatch(r"pid:\d+", wanted):
        rows = client.get("/v1/processes", live=True, limit=1000)
        named = [row for row in rows if wanted in (row["id"], str(row["pid"])) or row["id"].startswith(wanted)]
        of_job = [row for row in rows if row["job_name"] == wanted or row["job_id"].startswith(wanted)]
        jobs = {row["job_id"] for row in of_job}
        if not named and len(of_job) > 1 and len(jobs) == 1:
            return f"/v1/jobs/{jobs.pop()}", of_job
    found = find_process(client, wanted)
    return f"/v1/processes/{found['id']}", [found]


def find_by_prefix(rows: list[dict[str, Any]], wanted: str, what: str, command: str) -> dict[str, Any]:
    """The row whose id is `wanted`, or the only one whose id begins with it."""
    found = [row for row in rows if row["id"] == wanted] or [r for r in rows if str(r["id"]).startswith(wanted)]
    if len(found) == 1:
        return found[0]
    if found:
        raise CommandError(f"{wanted!r} begins {len(found)} {what}s' ids", hint="write more of it",
                           exit_code=Exit.USAGE)  # fmt: skip
    raise CommandError(f"there is no {what} {wanted!r}", hint=f"{command} lists them", code="not_found",
                       exit_code=Exit.NOT_FOUND)  # fmt: skip


def confirm(question: str, yes: bool) -> None:
    """Ask a person; a program has to say --yes."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise CommandError(f"{question} There is no terminal to answer at.", hint="say --yes", exit_code=Exit.USAGE)
    if not typer.confirm(question):
        raise CommandError("nothing was changed", exit_code=Exit.CANCELLED)
