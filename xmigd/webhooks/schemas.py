"""What bodies about webhooks say. Times are Unix seconds; what is not known is null."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from xmigd.events.bus import EventType
from xmigd.schemas import EXACT, Answer, written
from xmigd.text import VISIBLE


def _with_a_port(url: str) -> str:
    """If it names one, there is one. Raises ValueError."""
    if urlsplit(url).port == 0:
        raise ValueError("there is no port 0")
    return url


URL = r"^https?://[^\s/?#@\\]+([/?][^\s#\\]*)?$"
Url = Annotated[
    str,
    AfterValidator(_with_a_port),
    Field(
        max_length=2048, pattern=URL,
        description="http or https, with neither a user's name nor a fragment; redirections are not followed",
    ),
    written(URL, "write http://HOST:PORT/PATH or https://HOST:PORT/PATH, with neither a user's name nor a fragment"),
]  # fmt: skip
Secret = Annotated[
    str, Field(min_length=16, max_length=255, pattern=VISIBLE, description="with which deliveries are signed")
]
Types = Annotated[
    list[EventType],
    Field(max_length=64, description="of events that are sent; empty: all but `audit`"),
]


class Request(BaseModel):
    model_config = ConfigDict(extra="forbid")


class WebhookRequest(Request):
    url: Url
    secret: Secret | None = Field(default=None, description="null: xMIG makes one, which the answer shows once")
    types: Types = []
    enabled: bool = True


class WebhookChange(Request):
    """What is left out stays."""

    url: Url | None = None
    secret: Secret | None = None
    types: Types | None = None
    enabled: bool | None = Field(
        default=None, description="false: nothing is sent; events wait as long as they are kept"
    )


class RetryRequest(Request):
    letters: Annotated[list[Annotated[int, Field(ge=0, le=EXACT)]], Field(max_length=1000)] | None = Field(
        default=None, description="numbers of dead letters; null: all"
    )


class WebhookInfo(Answer):
    id: str
    url: str
    types: list[str]
    enabled: bool
    created_at: float
    created_by: str
    position: int = Field(description="the event up to which everything was delivered, or is a dead letter")
    behind: int = Field(description="events after that, of all types")
    delivered: int
    dead_letters: int
    dropped: int = Field(description="dead letters that had to make room for newer ones: they are lost")
    failing_since: float | None = Field(description="the target does not take what is sent; null: it does")
    attempts: int = Field(description="of the delivery under way, that failed")
    last_error: str | None = Field(description="since the daemon's start")
    last_delivery_at: float | None = Field(description="since the daemon's start")
    version: int = Field(description="its ETag's")


class WebhookMade(WebhookInfo):
    secret: str = Field(description="shown only here")


class Tried(Answer):
    delivered: bool
    status: int | None = Field(description="HTTP's; null: the target did not answer")
    error: str | None
    ms: float


class DeadLetterInfo(Answer):
    number: int
    event_id: int
    type: str
    event: dict[str, Any] = Field(description="as it is sent")
    attempts: int
    error: str = Field(description="of the last attempt")
    queued: bool = Field(description="it is to be sent again")
    at: float = Field(description="when it was given up")


class RetryAnswer(Answer):
    queued: int = Field(description="dead letters that are sent again, one after the other")
