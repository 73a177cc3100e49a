"""One use of the command line: what was requested before and beside the command itself."""

from __future__ import annotations

from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum

COMPLETION = "_XMIGCTL_COMPLETE"  # the variable in which the scripts of a shell's completion ask


class Output(StrEnum):
    table = "table"
    json = "json"


@dataclass
class Invocation:
    """Which daemon is meant (the local one, or that at `url`), and the form of what is printed."""

    url: str | None = None
    token: str | None = None
    ca_file: str | None = None
    client_cert: str | None = None
    output: Output = Output.table
    to_close: ExitStack = field(default_factory=ExitStack)


invocation: ContextVar[Invocation] = ContextVar("invocation")
