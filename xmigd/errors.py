"""What can go wrong, as one tree.

XmigError                     code, message, hint, HTTP status
├── StartError                the daemon cannot start
│   └── AlreadyRunning        another one has this runtime directory
├── NotFound                  404
├── Forbidden                 403
├── Conflict                  409: not in this state
├── Unavailable               503: the database does not take writes, no descriptors, ...
└── ProtocolError             a peer sent what the protocol does not allow; ends its connection
"""

from __future__ import annotations


class XmigError(Exception):
    """An error with a stable `code`, a sentence for people, and a `hint` that says what to do."""

    status = 500
    code = "internal"

    def __init__(self, message: str, *, hint: str = "", code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if code is not None:
            self.code = code

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message


class StartError(XmigError):
    code = "cannot_start"


class AlreadyRunning(StartError):
    code = "already_running"


class NotFound(XmigError):
    status = 404
    code = "not_found"


class Forbidden(XmigError):
    status = 403
    code = "forbidden"


class Conflict(XmigError):
    status = 409
    code = "conflict"


class Unavailable(XmigError):
    status = 503
    code = "unavailable"


class ProtocolError(XmigError):
    status = 400
    code = "protocol"
