"""Which requests change something."""

from __future__ import annotations

from starlette.types import Scope

READING = frozenset({"GET", "HEAD", "OPTIONS"})
ASKING = frozenset(
    {"/v1/migration-plans", "/v1/drain-plans"}
)  # a POST because the question has a body: it changes nothing


def reads(scope: Scope) -> bool:
    """It has no body that anybody looks at."""
    return scope["method"] in READING


def changes(scope: Scope) -> bool:
    return not reads(scope) and not (scope["method"] == "POST" and scope["path"] in ASKING)
