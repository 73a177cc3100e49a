"""What bodies about predictions say. Times are Unix seconds; what is not known is null."""

from __future__ import annotations

from pydantic import Field

from xmigd.schemas import Answer


class PredictedQuantity(Answer):
    p50: float | None = Field(description="half of such jobs have at most this; null: unknown")
    p90: float | None = Field(description="nine tenths of such jobs have at most this; null: unknown")
    unknown: str = Field(description="why it is unknown; empty: it is known")


class JobPrediction(Answer):
    job_id: str
    at: float
    elapsed_s: float = Field(description="since the job's beginning")
    remaining_s: PredictedQuantity = Field(description="seconds from now to the job's end")
    peak_bytes: PredictedQuantity = Field(
        description="device memory with snapshot copies and contexts, on the device where the job has most"
    )
    basis: str = Field(description="what it was predicted from")
