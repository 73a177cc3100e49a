"""What the xmigd behind us can do, from its own OpenAPI document: the dashboard shows no page and no button for more.

The two need not be of the same version."""

from __future__ import annotations

import time

from xmigd.web.upstream import Api

LASTS = 60.0  # seconds

PATHS = {
    "audit": "/v1/audit",
    "breaker": "/v1/circuit-breaker",
    "checkpoint_policies": "/v1/jobs/{}/checkpoint-policy",
    "checkpoints": "/v1/checkpoints",
    "consolidation": "/v1/consolidation-plans/{}/apply",
    "cordon": "patch /v1/devices/{}",
    "drain": "/v1/devices/{}:drain",
    "events": "/v1/events",
    "fleet": "/v1/fleet",
    "logs": "/v1/jobs/{}/logs",
    "migrations": "/v1/migrations",
    "plans": "/v1/migration-plans",
    "operations": "/v1/operations",
    "policies": "/v1/policies",
    "profile": "/v1/jobs/{}/profile",
    "ranks": "/v1/jobs/{}/ranks",
    "resume": "/v1/processes/{}:resume",
    "series": "/v1/processes/{}/series",
    "suspend": "/v1/processes/{}:suspend",
    "tokens": "/v1/tokens",
}


class Features:
    def __init__(self) -> None:
        self._known: frozenset[str] = frozenset()
        self._learned_at = -LASTS

    def __getattr__(self, name: str) -> bool:
        if name not in PATHS:
            raise AttributeError(name)
        return name in self._known

    async def learn(self, api: Api) -> None:
        """Raises ApiError; then what was known stays."""
        if time.monotonic() - self._learned_at < LASTS:
            return
        document = await api.get("/openapi.json")
        offered = {_without_names(path): set(methods) for path, methods in document.get("paths", {}).items()}
        self._known = frozenset(name for name, path in PATHS.items() if _offers(offered, path))
        self._learned_at = time.monotonic()


def _offers(offered: dict[str, set[str]], wanted: str) -> bool:
    method, space, path = wanted.rpartition(" ")
    return path in offered and (not space or method in offered[path])


def _without_names(path: str) -> str:
    """/v1/devices/{device}:drain → /v1/devices/{}:drain"""
    parts = path.split("{")
    return "{".join([parts[0], *("}" + part.partition("}")[2] for part in parts[1:])])
