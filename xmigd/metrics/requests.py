"""What is counted about requests."""

from __future__ import annotations

from starlette.types import Scope


class Requests:
    """By method, the route's template (never the path: ids would make a series each) and status."""

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str, int], int] = {}
        self.seconds: dict[tuple[str, str], float] = {}

    def count(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "") or "other"
        method = scope["method"] if scope["method"] in METHODS else "other"
        self.counts[method, route, status] = self.counts.get((method, route, status), 0) + 1
        self.seconds[method, route] = self.seconds.get((method, route), 0.0) + seconds


METHODS = frozenset({"GET", "HEAD", "POST", "PATCH", "PUT", "DELETE", "OPTIONS"})
