"""Bearer tokens: shown once, kept as a hash, expiring.

A token is 256 random bits, so its plain SHA-256 cannot be guessed backwards and needs no salt. It begins with `xmig_`,
so that scanners for leaked secrets recognise it.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Sequence

from sqlalchemy import Engine, select, update
from sqlalchemy.orm import Session

from xmigd.database.models import Token
from xmigd.database.writer import Writer
from xmigd.errors import Conflict, NotFound, Unauthorized
from xmigd.ids import new_id
from xmigd.security.callers import Caller, Scope, Via

PREFIX = "xmig_"
USED_EVERY = 60.0  # seconds between two notes of a token's use
MAX_TOKENS = 1000  # that are valid at the same time


def hash_of(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


class Tokens:
    """All valid tokens are kept in memory, too: looking one up costs nothing, and a full disk locks nobody out."""

    def __init__(self, writer: Writer, readers: Engine) -> None:
        self._writer = writer
        self._readers = readers
        with Session(readers, expire_on_commit=False) as session:
            valid = session.scalars(select(Token).where(Token.revoked_at.is_(None))).all()
            session.expunge_all()
        self._valid = {token.hash: token for token in valid}
        self._used = {token.id: token.last_used_at for token in valid if token.last_used_at is not None}

    async def create(
        self, *, name: str, scope: Scope, uid: int | None, lifetime: float | None, creator: Caller
    ) -> tuple[Token, str]:
        """A token that is on the disk, and what its holder has to say. `lifetime` in seconds; None: for ever."""
        now = time.time()
        self._valid = {h: t for h, t in self._valid.items() if t.expires_at is None or t.expires_at > now}
        if len(self._valid) >= MAX_TOKENS:
            raise Conflict("there are too many valid tokens", code="too_many_tokens", hint="revoke some")
        secret = PREFIX + secrets.token_urlsafe(32)
        values = {
            "id": new_id(), "name": name, "hash": hash_of(secret), "scope": scope, "uid": uid,
            "created_by": creator.name, "created_at": now, "revoked_at": None,
            "expires_at": None if lifetime is None else now + lifetime, "last_used_at": None,
        }  # fmt: skip
        await self._writer.write("tokens.create", lambda session: session.add(Token(**values)))
        token = Token(**values)
        self._valid[token.hash] = token
        return token, secret

    def find(self, *, owner: int | None) -> Sequence[Token]:
        """Newest first. `owner`: this user's; None: all."""
        query = select(Token).order_by(Token.created_at.desc(), Token.id)
        if owner is not None:
            query = query.where(Token.uid == owner)
        with Session(self._readers, expire_on_commit=False) as session:
            return session.scalars(query).all()

    async def revoke(self, token: str, *, owner: int | None) -> None:
        """Raises NotFound. From its return on, nobody gets in with it."""
        found = next((each for each in self._valid.values() if each.id == token), None)
        if found is None or (owner is not None and found.uid != owner):
            raise NotFound(f"there is no valid token {token[:40]!r}", hint="xmigctl token list lists them")
        statement = update(Token).where(Token.id == token).values(revoked_at=time.time())
        await self._writer.write("tokens.revoke", lambda session: session.execute(statement))
        self._valid.pop(found.hash, None)

    def caller(self, secret: str, via: Via) -> Caller:
        """Whose token it is. Raises Unauthorized."""
        token = self._valid.get(hash_of(secret))
        if token is None:
            raise Unauthorized("the token is not valid", code="bad_token", hint="it may have been revoked")
        if token.expires_at is not None and token.expires_at <= time.time():
            raise Unauthorized("the token has expired", code="token_expired", hint="ask for another one")
        self._note_use(token.id)
        return Caller(f"token {token.name} ({token.id[:8]})", _scope(token.scope), token.uid, token.uid, via, token.id)

    def last_used(self, token: Token) -> float | None:
        """Time of day; None: never."""
        return self._used.get(token.id, token.last_used_at)

    def _note_use(self, token: str) -> None:
        """Now and then, and never waited for: a full disk or a busy one keeps nobody out."""
        now = time.time()
        if now - self._used.get(token, 0.0) < USED_EVERY:
            return
        self._used[token] = now
        statement = update(Token).where(Token.id == token).values(last_used_at=now)
        self._writer.record("tokens.used", lambda session: session.execute(statement))

    def is_valid(self, caller: Caller) -> bool:
        """May whoever was let in go on listening?"""
        if caller.token is None:
            return True
        now = time.time()
        return any(t.id == caller.token and (t.expires_at or now + 1) > now for t in self._valid.values())


def _scope(value: str) -> Scope:
    match value:
        case "admin" | "operate":
            return value
        case _:
            return "read"
