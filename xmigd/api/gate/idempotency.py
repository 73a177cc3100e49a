"""Idempotency-Key: a request that is sent again is not done again, and gets the answer of the first time.

A key belongs to its caller and to one request (method, path, body). Answers that hold a secret are kept in memory only.
A request that the daemon's end interrupted is answered with the operation that it began: both were written together.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from sqlalchemy import delete, insert, update
from sqlalchemy.orm import Session

from xmigd.database.models import IdempotencyKey
from xmigd.database.writer import Writer
from xmigd.errors import Conflict, Invalid, NotFound, Unavailable
from xmigd.operations.repository import OperationRow

KEPT = 24 * 3600.0  # seconds
IN_MEMORY = 1000
HEADERS = ("location", "retry-after", "content-type", "etag")
AGAIN = frozenset({401, 403, 429})  # answers that another time may bring another of


@dataclass(frozen=True, slots=True)
class Stored:
    status: int
    headers: dict[str, str]
    body: bytes


@dataclass(slots=True)
class Claim:
    """A request that is being done."""

    caller: str
    key: str
    answered: bool = field(default=False)


class Idempotency:
    def __init__(self, writer: Writer, find: Callable[[str], OperationRow]) -> None:
        """`find` reads an operation. Raises NotFound."""
        self._writer = writer
        self._find = find
        self._running: set[tuple[str, str]] = set()
        self._memory: dict[tuple[str, str], Stored] = {}  # answers that are not in the database

    async def claim(self, caller: str, key: str, method: str, path: str, body: bytes) -> Claim | Stored:
        """A claim if the request is new, otherwise what it was answered. Raises Invalid, Conflict, Unavailable."""
        if not (1 <= len(key) <= 255 and all("!" <= c <= "~" for c in key)):
            what = "up to 255 printable characters of ASCII, no spaces"
            raise Invalid(f"Idempotency-Key: {what}", code="bad_idempotency_key")
        request = hashlib.sha256(b"\0".join((method.encode(), path.encode(), body))).hexdigest()
        row: IdempotencyKey | None = await self._writer.write(
            "keys.claim", lambda session: self._claim(session, caller, key, request)
        )
        if row is None:
            self._running.add((caller, key))
            return Claim(caller, key)
        if row.request != request:
            raise Invalid(
                "this Idempotency-Key was used for another request", code="idempotency_key_reused",
                hint="take a new key for every request that is meant to be another one",
            )  # fmt: skip
        if (caller, key) in self._running:
            raise Conflict(
                "the first request with this Idempotency-Key is still being done", code="still_running",
                hint="send it again later", retry_after=1,
            )  # fmt: skip
        if (kept := self._memory.get((caller, key))) is not None:
            return kept
        if row.status is None and row.operation_id is not None:
            with contextlib.suppress(NotFound):
                return _began(await asyncio.to_thread(self._find, row.operation_id))
        if row.status is None:
            raise Conflict(
                "xmigd ended while it did the first request with this Idempotency-Key", code="outcome_unknown",
                hint="look whether it was done; if not, send it with a new key",
            )  # fmt: skip
        if row.body is not None:
            return Stored(row.status, row.headers, row.body.encode())
        raise Conflict(
            "the request was done; its answer held a secret, which is not kept", code="answer_not_kept",
            hint="ask for a new one with a new key",
        )  # fmt: skip

    @staticmethod
    def _claim(session: Session, caller: str, key: str, request: str) -> IdempotencyKey | None:
        now = time.time()
        session.execute(delete(IdempotencyKey).where(IdempotencyKey.at < now - KEPT))
        row = session.get(IdempotencyKey, (caller, key))
        if row is not None:
            session.expunge(row)
            return row
        session.execute(
            insert(IdempotencyKey).values(
                caller=caller, key=key, request=request, status=None, headers={}, body=None, at=now
            )
        )
        return None

    async def answered(self, claim: Claim, answer: Stored, *, secret: bool) -> None:
        """Keep the answer, before it is sent. An error of ours is not kept: the request may be tried again."""
        claim.answered = True
        of_row = (IdempotencyKey.caller == claim.caller) & (IdempotencyKey.key == claim.key)
        if answer.status >= 500 or answer.status in AGAIN:
            await self.give_up(claim)
            return
        if secret:
            self._remember(claim, answer)
        statement = update(IdempotencyKey).where(of_row).values(
            status=answer.status, headers=answer.headers, body=None if secret else answer.body.decode()
        )  # fmt: skip
        try:
            await self._writer.write("keys.answer", lambda session: session.execute(statement))
        except Unavailable:
            self._remember(claim, answer)  # it was done, and is answered
        finally:
            self._running.discard((claim.caller, claim.key))

    def _remember(self, claim: Claim, answer: Stored) -> None:
        while len(self._memory) >= IN_MEMORY:
            self._memory.pop(next(iter(self._memory)))
        self._memory[claim.caller, claim.key] = answer

    async def give_up(self, claim: Claim) -> None:
        """Nothing was done."""
        of_row = (IdempotencyKey.caller == claim.caller) & (IdempotencyKey.key == claim.key)
        self._writer.record("keys.release", lambda session: session.execute(delete(IdempotencyKey).where(of_row)))
        self._running.discard((claim.caller, claim.key))


def _began(row: OperationRow) -> Stored:
    """What whoever began it would have been answered, as it is now."""
    headers = {"location": f"/v1/operations/{row.id}", "retry-after": "1", "content-type": "application/json"}
    return Stored(202, headers, json.dumps(row.as_dict()).encode())
