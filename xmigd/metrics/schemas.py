"""What bodies about metrics say. Times are Unix seconds; *_ms are milliseconds; what is not known is null."""

from __future__ import annotations

from pydantic import Field

from xmigd.schemas import Answer


class SeriesInfo(Answer):
    interval_s: float
    samples: dict[str, list[float | None]] = Field(description="a list for each value; `at` has the times")
