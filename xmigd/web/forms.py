"""Forms as browsers send them, and the proof that one of our own pages has sent it."""

from __future__ import annotations

from urllib.parse import parse_qsl

from starlette.requests import Request

from xmigd.web.sessions import same
from xmigd.web.upstream import ApiError

LONGEST = 64 << 10  # bytes
FIELD = "csrf"

Form = dict[str, str]


def refused(status: int, code: str, detail: str, hint: str) -> ApiError:
    return ApiError(status, {"status": status, "code": code, "detail": detail, "hint": hint})


async def read_form(request: Request, expected: str) -> Form:
    """Its fields, once the page it comes from has proved to be ours. Raises ApiError."""
    if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        raise refused(403, "cross_site", "the form comes from another site", "open the dashboard itself and try again")
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/x-www-form-urlencoded":
        raise refused(415, "not_a_form", "this takes forms only", "programs use the REST API of xmigd")
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > LONGEST:
            raise refused(413, "too_long", f"a form has at most {LONGEST} bytes", "shorten it")
    try:
        form = dict(parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=100))
    except ValueError:
        raise refused(400, "not_a_form", "the form cannot be read", "reload the page and try again") from None
    if not expected or not same(expected, form.pop(FIELD, "")):
        raise refused(
            403, "csrf", "the form does not prove that it comes from this dashboard",
            "reload the page and send it again; nothing was changed",
        )  # fmt: skip
    return form


def path_of_ours(wanted: str, otherwise: str = "/") -> str:
    """Where to go next, if it is a page of ours."""
    if wanted.startswith("/") and not wanted.startswith("//") and "\\" not in wanted and wanted.isprintable():
        return wanted
    return otherwise
