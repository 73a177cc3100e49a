"""What bodies of several domains have in common. What is not known is null."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from xmigd.errors import ProcessLocation


class Problem(BaseModel):
    """RFC 9457."""

    type: str = "about:blank"
    title: str
    status: int
    code: str
    detail: str
    hint: str = ""
    phase: str | None = Field(default=None, description="of the operation, in which it failed")
    operation: str | None = Field(default=None, description="the operation that it is about")
    process_location: ProcessLocation | None = Field(default=None, description="where the process lives now")


EXACT = (1 << 53) - 1  # the largest of the whole numbers that every JSON reader reads as they are


class Answer(BaseModel):
    model_config = ConfigDict(from_attributes=True)


class Subject(Answer):
    type: str
    id: str
