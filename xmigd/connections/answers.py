"""Errors as answers: RFC 9457, everywhere."""

from __future__ import annotations

import math

from fastapi.responses import JSONResponse

from xmigd.errors import XmigError, as_problem

RETRY_AFTER = {429: 1.0, 503: 5.0}
MEDIA_TYPE = "application/problem+json"


def problem(error: Exception) -> JSONResponse:
    body = as_problem(error)
    headers: dict[str, str] = {}
    retry_after = error.retry_after if isinstance(error, XmigError) else None
    if retry_after is None:
        retry_after = RETRY_AFTER.get(body["status"])
    if retry_after is not None:
        headers["Retry-After"] = str(max(1, math.ceil(retry_after)))
    if body["status"] == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(body, body["status"], headers=headers, media_type=MEDIA_TYPE)
