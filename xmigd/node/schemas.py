"""What bodies about the node say. Times are Unix seconds; *_ms are milliseconds; what is not known is null."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from xmigd.schemas import Answer
from xmigd.security.callers import Scope


class CallerInfo(Answer):
    name: str
    scope: Scope
    uid: int | None = Field(description="whose programs they may start; null: a token of the node's")
    operator: bool
    sees_everything: bool = Field(description="not only what belongs to their user")


class NodeInfo(Answer):
    version: str
    pid: int
    uid: int
    started_at: float
    runtime_dir: str
    database: str
    tcp_address: str | None
    devices: list[str]
    processes: int
    database_failure: str | None


class Health(Answer):
    status: Literal["ok"] = "ok"
