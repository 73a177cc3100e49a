"""What bodies about operations say. Times are Unix seconds; *_ms are milliseconds; what is not known is null."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from xmigd.operations.repository import OperationState
from xmigd.schemas import Answer, Problem, Subject


class OperationInfo(Answer):
    """Long work, and how far it is."""

    id: str
    kind: str
    state: OperationState
    phase: str
    subject: Subject
    job_id: str | None
    requestor: str
    created_at: float
    started_at: float | None
    ended_at: float | None
    may_cancel: bool
    may_cancel_why: str = Field(description="why it cannot be cancelled")
    progress: dict[str, Any] | None
    result: dict[str, Any] | None
    error: Problem | None
