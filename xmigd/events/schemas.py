"""What bodies about events say. Times are Unix seconds; *_ms are milliseconds; what is not known is null."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from xmigd.schemas import Answer, Subject


class EventInfo(Answer):
    id: int | None = Field(description="its place in the sequence; null: a sample, which is not kept")
    type: str
    subject: Subject
    job_id: str | None
    at: float
    data: dict[str, Any]
