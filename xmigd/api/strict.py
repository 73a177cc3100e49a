"""Query parameters and bodies that an endpoint does not know are refused, not ignored: a typo must not act on more than
was meant."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request

from xmigd.errors import Invalid


class KnownParameters:
    """What each endpoint knows, out of the OpenAPI document."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        self._known: dict[tuple[str, str], tuple[frozenset[str], bool]] | None = None

    def of(self, path: str, method: str) -> tuple[frozenset[str], bool] | None:
        """The names of its query parameters, and whether it takes a body. None: it is not in the document."""
        if self._known is None:
            self._known = {
                (path, method.upper()): (_query_names(operation), "requestBody" in operation)
                for path, item in self._app.openapi()["paths"].items()
                for method, operation in item.items()
            }
        return self._known.get((path, method))


def _query_names(operation: dict[str, Any]) -> frozenset[str]:
    return frozenset(each["name"] for each in operation.get("parameters", ()) if each["in"] == "query")


async def only_known(request: Request) -> None:
    """A dependency of every endpoint. Raises Invalid."""
    if request.method == "GET" and not request.query_params:
        return  # the document, which takes a moment to be made, is not queried
    known: KnownParameters = request.app.state.known
    route = request.scope.get("route")
    found = known.of(getattr(route, "path", ""), request.method)
    if found is None:
        return
    names, takes_body = found
    for name in request.query_params:
        if name not in names:
            listed = ", ".join(sorted(names)) or "none"
            raise Invalid(
                f"query.{name[:64]}: there is no such parameter", code="unknown_field", hint=f"there are: {listed}"
            )
    if not takes_body and request.method != "GET" and await request.body() not in (b"", b"{}"):
        raise Invalid("this takes no body", code="unknown_field", hint="send none")
