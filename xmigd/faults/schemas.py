"""What bodies about faults say. Times are Unix seconds; *_ms are milliseconds; what is not known is null."""

from __future__ import annotations

from pydantic import Field

from xmigd.schemas import Answer


class FaultInfo(Answer):
    id: int
    process_id: str
    job_id: str
    job_name: str
    number: int
    kind: str
    text: str
    sequence: int | None
    op: str | None
    error: int | None
    injection: int | None
    at: float
    acknowledged_at: float | None = Field(description="null: nobody has acknowledged it")
    acknowledged_by: str | None


class RecoveryInfo(Answer):
    id: int
    process_id: str
    job_id: str
    job_name: str
    number: int
    cause: str
    fault: int | None
    outcome: str
    attempts: int
    standby: str
    snapshot: int
    expected_ms: float | None = Field(description="the stall that was expected when it occurred; null: not known")
    detected_ms: float
    standby_ready_ms: float | None
    mapped_ms: float | None
    restored_ms: float | None
    replayed_ms: float | None
    resumed_ms: float | None
    records: int | None
    compared: int | None
    differing: int | None
    first_difference: int | None
    exact: bool | None = Field(description="every reply that the program had was the same in the replay")
    delivered_sequence: int | None
    delivered_error: int | None
    story: list[str]
    at: float
