"""A session's numbers and what is kept of it: no I/O.

Invariants: `acknowledged` ≤ `sent`; `kept` has exactly the messages behind `acknowledged` up to `sent`, in order;
`received` only grows. Messages count from 1 in each direction.
"""

from __future__ import annotations

from xmigd.errors import ProtocolError

MOST_KEPT = 64 << 20  # bytes: a minute of a slow network; who is behind for longer is to begin anew
EACH = 128  # bytes that a message takes beside its content


class Session:
    """With one peer. Without `id` there is none."""

    def __init__(self) -> None:
        self.id: str | None = None
        self.sent = 0
        self.acknowledged = 0
        self.received = 0
        self.kept: dict[int, bytes] = {}
        self.kept_bytes = 0

    def begin(self, id: str) -> None:
        """Another one. What was kept is gone."""
        self.end()
        self.id = id

    def end(self) -> None:
        self.id = None
        self.sent = self.acknowledged = self.received = self.kept_bytes = 0
        self.kept = {}

    def keep(self, content: bytes) -> int | None:
        """The number of one more message. None: there is no room."""
        if self.kept_bytes + len(content) + EACH > MOST_KEPT:
            return None
        self.sent += 1
        self.kept[self.sent] = content
        self.kept_bytes += len(content) + EACH
        return self.sent

    def acknowledge(self, number: int) -> None:
        """The peer has received so many. It may have reported that before it reported more. Raises ProtocolError."""
        if number > self.sent:
            raise ProtocolError(f"it has received {number} messages of {self.sent}")
        for gone in range(self.acknowledged + 1, number + 1):
            self.kept_bytes -= len(self.kept.pop(gone)) + EACH
        self.acknowledged = max(self.acknowledged, number)

    def accept(self, number: int) -> bool:
        """Is a message that has come the next one? False: it was received before. Raises ProtocolError: others are
        missing between."""
        if number > self.received + 1 or number == 0:
            raise ProtocolError(f"message {number} after {self.received}")
        if number <= self.received:
            return False
        self.received = number
        return True
