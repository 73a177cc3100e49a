"""What bodies about findings say. Times are Unix seconds; what is not known is null."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from xmigd.schemas import Answer
from xmigd.text import VISIBLE

RungName = Literal["report", "cordon", "drain", "lose"]


class FindingInfo(Answer):
    id: int
    device: str
    code: str = Field(description="`xid_79`, `recovery_action`, `lost`…")
    text: str
    rung: RungName = Field(description="of the answer that helps; the policy `devices` may allow less")
    source: str = Field(description="`nvml`, `kernel`, or who has reported it")
    first_at: float
    last_at: float
    count: int = Field(description="how often it came while it was open")
    answer: str | None = Field(description="what xMIG has done about it, or why nothing; null: it is being decided")
    closed_at: float | None = Field(description="null: it is open")
    closed_by: str | None


class Report(BaseModel):
    """Either an Xid, which xMIG grades, or a finding of a health agent's own, with its rung."""

    model_config = ConfigDict(extra="forbid")

    xid: Annotated[int, Field(ge=1, le=9999)] | None = Field(default=None, description="as the driver numbers it")
    code: Annotated[str, Field(pattern=r"^[a-z0-9_.-]{1,64}$")] | None = None
    text: Annotated[str, Field(min_length=1, max_length=200, pattern=VISIBLE)] | None = Field(
        default=None, description="everybody sees it"
    )
    rung: RungName | None = None

    @model_validator(mode="after")
    def one_kind(self) -> Self:
        own = (self.code, self.text, self.rung)
        if (self.xid is None) == (None in own) or (self.xid is not None and own != (None, None, None)):
            raise ValueError("either xid, or code, text and rung")
        return self
