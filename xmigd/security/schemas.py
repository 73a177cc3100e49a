"""What bodies about callers say. Times are Unix seconds; *_ms are milliseconds; what is not known is null."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from xmigd.schemas import Answer
from xmigd.security.callers import Scope
from xmigd.text import VISIBLE


class TokenRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(min_length=1, max_length=64, pattern=VISIBLE)]
    scope: Scope = "read"
    uid: Annotated[int, Field(ge=0, lt=(1 << 32) - 1)] | None = Field(
        default=None, description="whose jobs it is for; null: the node's"
    )
    lifetime: Annotated[float, Field(ge=1, le=1e9)] | None = Field(
        default=30 * 86_400.0, description="seconds until it expires; null: never"
    )


class TokenInfo(Answer):
    id: str
    name: str
    scope: Scope
    uid: int | None
    user: str | None = Field(default=None, description="what the daemon's machine calls them; null: the node's")
    created_by: str
    created_at: float
    last_used_at: float | None = Field(default=None, description="to a minute; null: never")
    expires_at: float | None
    revoked_at: float | None


class TokenMade(TokenInfo):
    token: str = Field(description="for `Authorization: Bearer`; never shown again")


class AuditInfo(Answer):
    id: int
    at: float
    entry: Literal["intent", "outcome"]
    intent_id: int | None = Field(description="of an outcome")
    request_id: str
    requestor: str
    uid: int | None
    via: str
    action: str
    detail: dict[str, Any]
    outcome: str | None = Field(description="done, or the error's code")
    status: int | None
