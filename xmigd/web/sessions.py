"""Who has logged in. A session is a cookie with a random number, and here, in memory, the token that it stands for."""

from __future__ import annotations

import hmac
import secrets
import time
from dataclasses import dataclass, field
from typing import Any

MOST = 1000  # sessions; the one that was away the longest makes room


@dataclass(frozen=True, slots=True)
class Note:
    """What is shown once, on the next page."""

    text: str = ""
    secret: str = ""
    problem: dict[str, Any] | None = None


@dataclass(slots=True)
class Session:
    token: str | None  # None: a local visitor, for whom the API decides by xmig-web's own user
    id: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    csrf: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    seen: float = field(default_factory=time.monotonic)
    notes: list[Note] = field(default_factory=list)


class Sessions:
    def __init__(self, hours: float) -> None:
        self._seconds = hours * 3600
        self._by_id: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def begin(self, token: str | None) -> Session:
        if len(self._by_id) >= MOST:
            del self._by_id[min(self._by_id.values(), key=lambda session: session.seen).id]
        session = Session(token)
        self._by_id[session.id] = session
        return session

    def find(self, number: str | None) -> Session | None:
        session = self._by_id.get(number or "")
        if session is None:
            return None
        now = time.monotonic()
        if now - session.seen > self._seconds:
            self.end(session)
            return None
        session.seen = now
        return session

    def end(self, session: Session) -> None:
        self._by_id.pop(session.id, None)


def same(expected: str, given: str) -> bool:
    return hmac.compare_digest(expected.encode(), given.encode())
