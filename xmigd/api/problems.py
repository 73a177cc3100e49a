"""Every error of the application is a problem document (RFC 9457)."""

from __future__ import annotations

from http import HTTPStatus

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.responses import Response

from xmigd import log
from xmigd.connections.answers import MEDIA_TYPE, problem
from xmigd.errors import Invalid, XmigError
from xmigd.text import first_invisible

logger = log.get("api")


async def on_error(request: Request, error: Exception) -> Response:
    if isinstance(error, RequestValidationError):
        error = _invalid(error)
    if isinstance(error, XmigError):
        found: Response = problem(error)
        request.state.code = error.code
    elif isinstance(error, HTTPException):
        found = _http(error)
        request.state.code = HTTPStatus(error.status_code).name.lower()
    else:
        logger.error("a request failed", why=f"{type(error).__name__}: {error}")
        found = problem(error)
        request.state.code = "internal"
    return found


def _invalid(error: RequestValidationError) -> Invalid:
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    hint = ""
    if first["type"] == "extra_forbidden":
        return Invalid(f"{place}: there is no such field", code="unknown_field", hint="the reference lists the fields")
    if first["type"] == "json_invalid":
        return Invalid("the body is not JSON", code="not_json", hint="send JSON, with Content-Type: application/json")
    if first["type"] == "model_attributes_type":
        hint = "send a JSON object, with Content-Type: application/json"
    if first["type"] == "string_pattern_mismatch" and (found := first_invisible(str(first["input"]))):
        return Invalid(f"{place}: {found} is in it, a character that people do not see",
                       hint="leave out control characters and marks of the writing direction")  # fmt: skip
    return Invalid(f"{place}: {first['msg'].removeprefix('Value error, ')}", hint=hint)


def _http(error: HTTPException) -> Response:
    status = HTTPStatus(error.status_code)
    hint = "GET /openapi.json lists what there is" if status in (404, 405) else ""
    body = {
        "type": "about:blank", "title": status.phrase, "status": int(status), "code": status.name.lower(),
        "detail": str(error.detail), "hint": hint,
    }  # fmt: skip
    return JSONResponse(body, int(status), headers=error.headers, media_type=MEDIA_TYPE)
