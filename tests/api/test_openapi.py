"""The OpenAPI document: complete, checked in, and what the daemon does."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute

from tests.daemon.node import ROOT
from xmigd.api.strict import known
from xmigd.rest import ROUTERS, make_app
from xmigd.rest import document as text


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return make_app().openapi()


def operations(document: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [
        (f"{method.upper()} {path}", operation)
        for path, item in document["paths"].items()
        for method, operation in item.items()
    ]


def test_it_is_checked_in() -> None:
    assert (ROOT / "docs" / "openapi.json").read_text() == text(), "make openapi"


def test_the_daemon_serves_it(http: httpx.Client, document: dict[str, Any]) -> None:
    assert http.get("/openapi.json").json() == document


def test_every_endpoint_is_described(document: dict[str, Any]) -> None:
    names = []
    for what, operation in operations(document):
        names.append(operation["operationId"])
        assert operation["operationId"].replace("_", "").isalpha(), f"{what}: give it an operation_id"
        assert operation.get("description"), f"{what}: give it a docstring"
        assert "application/problem+json" in operation["responses"]["default"]["content"], what
        assert "422" not in operation["responses"], f"{what}: the default response says it"
    assert len(set(names)) == len(names)


def test_what_takes_long_leads_to_its_operation(document: dict[str, Any]) -> None:
    for what, operation in operations(document):
        accepted = operation["responses"].get("202", {})
        schema = accepted.get("content", {}).get("application/json", {}).get("schema", {})
        if schema.get("$ref", "").endswith("/OperationInfo"):
            assert accepted["links"].keys() == {"get_operation", "wait_for_operation", "cancel_operation"}, what
            assert accepted["headers"].keys() == {"Location", "Retry-After"}, what


def test_what_a_request_is_compared_with_is_the_document(document: dict[str, Any]) -> None:
    """Which parameters and bodies are known is not read from it, but is the same."""
    described = {
        what: ({each["name"] for each in operation.get("parameters", ()) if each["in"] == "query"},
               "requestBody" in operation)
        for what, operation in operations(document)
    }  # fmt: skip
    routes = [route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]
    assert {f"{method} {route.path}": known(route) for route in routes for method in route.methods or ()} == described


def test_unknown_fields_are_refused_everywhere(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    for what, operation in operations(document):
        for media in operation.get("requestBody", {}).get("content", {}).values():
            name = media["schema"].get("$ref", "").rpartition("/")[2]
            if name:
                assert schemas[name].get("additionalProperties") is False, f"{what}: {name} takes unknown fields"
