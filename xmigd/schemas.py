"""What bodies of several domains have in common. What is not known is null."""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from xmigd.errors import ProcessLocation
from xmigd.text import first_invisible


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


def written(pattern: str, words: str) -> BeforeValidator:
    """Beside a field's `pattern`: who has not written it so reads these words, and not the pattern. Characters that
    nobody sees are left to that."""

    def check(value: Any) -> Any:
        if isinstance(value, str) and not re.search(pattern, value) and not first_invisible(value):
            raise ValueError(words)
        return value

    return BeforeValidator(check)


class Answer(BaseModel):
    model_config = ConfigDict(from_attributes=True)


class Subject(Answer):
    type: str
    id: str
