"""The settings that both programs have: how many connections, and how long one may take."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

Connections = Annotated[
    int,
    Field(ge=16, le=100_000, description="connections in all, at most a quarter of the descriptors; some are "
          "kept for root, and for questions about health"),
]  # fmt: skip
UserConnections = Annotated[
    int, Field(ge=1, description="connections that one user of the machine, or one address, may have at once")
]
UserStreams = Annotated[
    int, Field(ge=1, description="streams of events that one user or address may listen to; they count apart")
]
RequestTimeout = Annotated[
    float, Field(gt=0, le=3600, description="seconds within which a request has to have arrived, headers and body")
]
IdleTimeout = Annotated[
    int, Field(ge=1, le=3600, description="seconds that a connection may rest between two requests")
]
