"""Query parameters and bodies that an endpoint does not know are refused, not ignored: a typo must not act on more than
was meant."""

from __future__ import annotations

from fastapi import Request
from fastapi.dependencies.utils import get_flat_params
from fastapi.params import Query
from fastapi.routing import APIRoute

from xmigd.errors import Invalid


def known(route: APIRoute) -> tuple[frozenset[str], bool]:
    """The names of its query parameters, and whether it takes a body. As the OpenAPI document has them, without it: to
    make that stops the event loop for a third of a second."""
    fields = get_flat_params(route.dependant)
    names = frozenset(field.alias for field in fields if isinstance(field.field_info, Query))
    return names, route.body_field is not None


async def check(request: Request, names: frozenset[str], *, takes_body: bool) -> None:
    """Raises Invalid."""
    for name in request.query_params if request.scope["query_string"] else ():
        if name not in names:
            listed = ", ".join(sorted(names)) or "none"
            raise Invalid(
                f"query.{name[:64]}: there is no such parameter", code="unknown_field", hint=f"there are: {listed}"
            )
    if not takes_body and request.method != "GET" and await request.body() not in (b"", b"{}"):
        raise Invalid("this takes no body", code="unknown_field", hint="send none")
