"""What an exit code of `xmigctl` means, and which error ends with which. `docs/reference-cli.md` shows this table."""

from __future__ import annotations

from enum import IntEnum

from xmigd.client import NoDaemon, Refused
from xmigd.errors import XmigError


class Exit(IntEnum):
    """Exit codes. `xmigctl run` takes the program's place: its exit code is the program's own."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NO_DAEMON = 3
    NOT_FOUND = 4
    REFUSED = 5
    OPERATION_FAILED = 6
    CANCELLED = 7
    NOT_OVER = 8
    NOT_ALLOWED = 9
    NOT_PROTECTED = 10
    NOT_EXECUTABLE = 126
    NO_PROGRAM = 127


MEANINGS = {
    Exit.OK: "done",
    Exit.FAILED: "failed, in a way that has no code of its own; `doctor`: something does not work",
    Exit.USAGE: "wrong usage, a wrong setting, or a request that xmigd does not understand",
    Exit.NO_DAEMON: "no xmigd answers",
    Exit.NOT_FOUND: "there is no such job, process, device, operation, ...",
    Exit.REFUSED: "refused as things stand: not in this state, no room, cordoned, out of date; nothing was changed; "
    "`check-movable`: something is in the way",
    Exit.OPERATION_FAILED: "the operation failed; what is printed says where the process is",
    Exit.CANCELLED: "the operation was cancelled",
    Exit.NOT_OVER: "the operation goes on: time was up, or Ctrl-C detached from it",
    Exit.NOT_ALLOWED: "not permitted: another user's job, a token without this scope, no token",
    Exit.NOT_PROTECTED: "`run --strict`: a process of the job had the genuine driver; the job was ended",
    Exit.NOT_EXECUTABLE: "`run`: the program cannot be started",
    Exit.NO_PROGRAM: "`run`: there is no such program",
}

_BY_STATUS = {
    400: Exit.REFUSED, 401: Exit.NOT_ALLOWED, 403: Exit.NOT_ALLOWED, 404: Exit.NOT_FOUND, 408: Exit.REFUSED,
    409: Exit.REFUSED, 410: Exit.NOT_FOUND, 412: Exit.REFUSED, 422: Exit.USAGE, 428: Exit.REFUSED, 429: Exit.REFUSED,
    503: Exit.REFUSED,
}  # fmt: skip


class CommandError(XmigError):
    """An error of the command line's own, with the code to exit with."""

    def __init__(self, message: str, *, exit_code: Exit, hint: str = "", code: str | None = None) -> None:
        super().__init__(message, hint=hint, code=code)
        self.exit_code = exit_code


def exit_code_of(error: XmigError) -> Exit:
    """The code with which a command ends that met this error."""
    if isinstance(error, CommandError):
        return error.exit_code
    if isinstance(error, NoDaemon):
        return Exit.NO_DAEMON
    if isinstance(error, Refused):
        return _BY_STATUS.get(error.status, Exit.FAILED)
    return Exit.FAILED
