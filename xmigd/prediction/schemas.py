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


class MeasuredSteps(Answer):
    devices: int
    jobs: int = Field(description="that ran on so many")
    step_ms: float = Field(description="the median of their last steps")


class ScaledStep(Answer):
    devices: int
    step_ms: float | None = Field(
        description="of the simplest model that agrees with the measured steps; null: unknown"
    )
    least_ms: float | None = Field(description="of all models that agree with them, the shortest step")
    most_ms: float | None = Field(description="and the longest")
    unknown: str = Field(description="why it is unknown; empty: it is known")


class JobScaling(Answer):
    """What a step of the job would take on other numbers of devices."""

    job_id: str
    measured: list[MeasuredSteps] = Field(description="jobs of its user that differ only in the number of devices")
    steps: list[ScaledStep]
