"""What bodies about peers say. Times are Unix seconds; what is not known is null."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from xmigd.peers.certificates import LONGEST
from xmigd.peers.contract import NAME
from xmigd.peers.known import ADDRESS, FINGERPRINT
from xmigd.schemas import Answer, written


class PeerRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: Annotated[
        str,
        Field(pattern=NAME, description="that node's own name"),
        written(NAME, "a node's name has up to 64 small letters, digits, points and hyphens"),
    ]
    address: Annotated[
        str,
        Field(pattern=ADDRESS, description="HOST:PORT, or [ADDRESS]:PORT for IPv6"),
        written(ADDRESS, "write HOST:PORT, or [ADDRESS]:PORT for IPv6"),
    ]
    fingerprint: Annotated[
        str,
        Field(pattern=FINGERPRINT, description="SHA-256 of its certificate, as that node's own identity has it"),
        written(FINGERPRINT, "it has 64 hexadecimal digits, in small letters: `xmigctl peer show` on that node has it"),
    ]
    certificate: Annotated[str, Field(max_length=LONGEST)] | None = Field(
        default=None, description="PEM, for a peer that listens at no address; null: learned when it is first reached"
    )


class PeerInfo(Answer):
    name: str
    address: str
    fingerprint: str
    state: Literal["connected", "unreachable", "refused"] = Field(
        description="refused: one of both nodes does not accept the other"
    )
    why: str = Field(description="empty: it is connected")
    changed_at: float = Field(description="since when it is so")


class IdentityInfo(Answer):
    node: str
    address: str | None = Field(description="where peers connect; null: this node only connects to others")
    fingerprint: str = Field(description="SHA-256 of the certificate")
    certificate: str = Field(description="PEM")
