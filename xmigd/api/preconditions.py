"""ETag and If-Match: who changes something says what they have seen of it."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Header

from xmigd.errors import PreconditionRequired, Stale


def etag(version: int) -> str:
    return f'"{version}"'


async def _if_match(
    if_match: Annotated[str | None, Header(max_length=255, description="the ETag of what is changed")] = None,
) -> str:
    if if_match is None:
        raise PreconditionRequired(
            "a change needs If-Match", hint="GET it first, and send its ETag as If-Match (or * for whatever it is)"
        )
    return if_match


IfMatch = Annotated[str, Depends(_if_match)]


def check(if_match: str, version: int) -> None:
    """Raises Stale. In the transaction that makes the change."""
    wanted = {each.strip() for each in if_match.split(",")}
    if "*" not in wanted and etag(version) not in wanted:
        raise Stale("it has changed since you read it", hint="GET it again, and decide again")
