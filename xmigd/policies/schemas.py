"""What bodies about policies say. Times are Unix seconds; *_ms are milliseconds; what is not known is null."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from xmigd.schemas import Answer, Subject


class PolicyInfo(Answer):
    name: str
    description: str
    version: int = Field(description="its ETag's; 0: nobody has changed it")
    settings: dict[str, float | int] = Field(description="what applies")
    defaults: dict[str, float | int] = Field(description="what the settings say")
    units: dict[str, str] = Field(description="what each value is measured in, or counts: seconds, share, faults…")
    meanings: dict[str, str] = Field(description="what a value means, where its name alone does not say")
    updated_at: float | None
    updated_by: str | None


class AutomaticAction(Answer):
    at: float
    action: str
    subject: Subject
    why: str


class BreakerInfo(Answer):
    state: Literal["closed", "open"] = Field(description="open: automation is stopped until it is reset")
    why: str
    changed_at: float | None
    actions: list[AutomaticAction] = Field(description="that count now, oldest first")
    max_actions: int
    window_seconds: float
