"""What can go wrong, as one tree.

XmigError                     code, message, hint, HTTP status
├── StartError                the daemon cannot start
│   └── AlreadyRunning        another one has this runtime directory
├── Invalid                   422: an unknown field, a value out of its range
├── Unauthorized              401: nobody knows who calls
├── Forbidden                 403
├── NotFound                  404
├── Conflict                  409: not in this state
├── Cancelled                 409: an operation ended because somebody cancelled it
├── Gone                      410: it was there, and is not kept any more
├── Stale                     412: it has changed since it was read
├── TooLarge                  413
├── PreconditionRequired      428: a change without If-Match
├── TooManyRequests           429
├── Unavailable               503: the database does not take writes, no descriptors, ...
└── ProtocolError             a peer sent what the protocol does not allow; ends its connection
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, Literal

ProcessLocation = Literal["source", "target", "host", "file", "checkpoint", "lost"]


class XmigError(Exception):
    """An error with a stable `code`, a sentence for people, and a `hint` that says what to do. One about an operation
    says in which `phase` it failed, one about a process where the process lives now."""

    status = 500
    code = "internal"

    def __init__(
        self,
        message: str,
        *,
        hint: str = "",
        code: str | None = None,
        phase: str | None = None,
        operation: str | None = None,
        process_location: ProcessLocation | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.phase = phase
        self.operation = operation
        self.process_location = process_location
        self.retry_after = retry_after  # seconds
        if code is not None:
            self.code = code

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message


class StartError(XmigError):
    """The daemon cannot start. It has changed nothing."""

    code = "cannot_start"


class AlreadyRunning(StartError):
    """Another daemon has this runtime directory."""

    code = "already_running"


class Invalid(XmigError):
    """The request is understood and cannot be done as it is: an unknown field, a value out of its range."""

    status = 422
    code = "invalid"


class Unauthorized(XmigError):
    """Nobody knows who calls: there is no token, or one that is not valid any more."""

    status = 401
    code = "unauthorized"


class Forbidden(XmigError):
    """Whoever calls may not do this."""

    status = 403
    code = "forbidden"


class NotFound(XmigError):
    """There is no such thing, or it belongs to somebody else."""

    status = 404
    code = "not_found"


class NotHttp(XmigError):
    """What arrives is no request, or has more headers than anybody needs."""

    status = 400
    code = "not_http"


class RequestTimeout(XmigError):
    """A request was begun and not finished, or a connection opened for nothing."""

    status = 408
    code = "request_timeout"


class Conflict(XmigError):
    """Not in this state, or not beside what is under way."""

    status = 409
    code = "conflict"


class Cancelled(XmigError):
    """An operation ended because somebody cancelled it. It has changed nothing that lasts."""

    status = 409
    code = "cancelled"


class Gone(XmigError):
    """It was there, and is not kept any more."""

    status = 410
    code = "gone"


class Stale(XmigError):
    """What is to be changed has changed since it was read (If-Match)."""

    status = 412
    code = "stale"


class TooLarge(XmigError):
    """The body has more bytes than any request needs."""

    status = 413
    code = "too_large"


class PreconditionRequired(XmigError):
    """A change without If-Match: it could undo somebody else's."""

    status = 428
    code = "precondition_required"


class TooManyRequests(XmigError):
    """One caller asks more often than the daemon answers."""

    status = 429
    code = "too_many_requests"


class Unavailable(XmigError):
    """Not now: the database does not take writes, there are no descriptors, the daemon is stopping."""

    status = 503
    code = "unavailable"


class NotReady(Unavailable):
    """The daemon lives and does not take new work: it is starting, stopping, or cannot record anything."""

    code = "not_ready"


class ProtocolError(XmigError):
    """A peer sent what the protocol does not allow. Its connection ends."""

    status = 400
    code = "protocol"


def as_problem(error: Exception, *, phase: str | None = None, operation: str | None = None) -> dict[str, Any]:
    """The error as RFC 9457 has it. `phase` and `operation` where the error itself does not know them."""
    if not isinstance(error, XmigError):
        error = XmigError("the request failed inside xmigd", hint="its log says why")
    status = error.status if error.status != 500 or error.code == "internal" else 400
    found: dict[str, Any] = {
        "type": "about:blank", "title": HTTPStatus(status).phrase, "status": status, "code": error.code,
        "detail": error.message, "hint": error.hint,
    }  # fmt: skip
    where = {
        "phase": error.phase or phase, "operation": error.operation or operation,
        "process_location": error.process_location,
    }  # fmt: skip
    return found | {name: value for name, value in where.items() if value}
