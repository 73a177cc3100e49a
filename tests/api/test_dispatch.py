"""Requests are answered as FastAPI itself would answer them."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, TypeVar

import httpx
import pytest
from fastapi import Depends, FastAPI, Header, Path, Query, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse
from starlette.routing import Match
from starlette.types import ASGIApp

from xmigd.api.dependencies import Services, provided
from xmigd.api.dispatch import Dispatch
from xmigd.api.problems import on_error
from xmigd.errors import Conflict, XmigError
from xmigd.rest import make_app

T = TypeVar("T")


class AnyService(Services):
    def get(self, kind: type[T]) -> T:
        return object.__new__(kind)


class Counter:
    """A service."""

    def __init__(self) -> None:
        self.count = 0


class Wanted(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str
    sizes: list[int] = []


class Made(BaseModel):
    name: str
    count: int


def in_a_thread() -> int:
    return 1


async def checked(x_allowed: Annotated[str | None, Header(max_length=4)] = None) -> str:
    if x_allowed == "no":
        raise Conflict("it is not allowed")
    return x_allowed or "somebody"


def application() -> FastAPI:
    app = FastAPI()
    for kind in (XmigError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, on_error)

    @app.get("/v1/lists")
    async def lists(
        many: Annotated[list[int], Query(max_length=3)] = [],  # noqa: B006
        one: Annotated[str | None, Query(max_length=3)] = None,
        flag: bool = False,
    ) -> list[Any]:
        many.append(0)  # of this request alone
        return [many, one, flag]

    @app.get("/v1/needed")
    def needed(here: Annotated[int, Query(ge=1)], also: int = 2) -> dict[str, int]:
        return {"here": here, "also": also}

    @app.post("/v1/made/{name}", status_code=201)
    async def made(
        name: Annotated[str, Path(max_length=4)], wanted: Wanted, who: Annotated[str, Depends(checked)],
        response: Response,
    ) -> Made:  # fmt: skip
        response.headers["ETag"] = '"7"'
        if wanted.name == "as before":
            response.status_code = 200
        return Made(name=f"{name} {wanted.name} {who}", count=sum(wanted.sizes))

    @app.get("/v1/made/fixed")
    async def fixed() -> Made:
        return Made(name="fixed", count=0)

    @app.get("/v1/made/{name}")
    async def one_of(name: str) -> Made:
        return Made(name=name, count=1)

    @app.post("/v1/made/{name}:act", status_code=204)
    async def act(name: str) -> None:
        if name == "x":
            raise HTTPException(418, "a teapot")

    @app.get("/v1/plain")
    async def plain() -> Response:
        return Response("text", headers={"x-own": "yes"}, media_type="text/plain")

    @app.get("/v1/gone")
    async def gone() -> FileResponse:
        return FileResponse("/nowhere")  # which it finds out when it is to be sent

    @app.get("/v1/wrong")
    async def wrong() -> Made:
        return {"name": 7}  # type: ignore[return-value]

    @app.get("/v1/broken")
    def broken() -> Made:
        raise ZeroDivisionError

    return app


TYPE = "application/json"
JSON = {"content-type": TYPE}
REQUESTS: list[tuple[str, str, dict[str, Any]]] = [
    ("GET", "/v1/lists", {}),
    ("GET", "/v1/lists?many=1&many=2&one=abc&flag=true", {}),
    ("GET", "/v1/lists?many=x&one=abcd&flag=perhaps", {}),
    ("GET", "/v1/lists?many=1&many=2&many=3&many=4", {}),
    ("GET", "/v1/lists?one=&many=", {}),
    ("GET", "/v1/needed", {}),
    ("GET", "/v1/needed?here=0", {}),
    ("GET", "/v1/needed?here=5&also=6", {}),
    ("POST", "/v1/made/a", {"json": {"name": "b", "sizes": [1, 2]}}),
    ("POST", "/v1/made/a", {"json": {"name": "as before"}}),
    ("POST", "/v1/made/a", {"json": {"name": "b"}, "headers": {"x-allowed": "yes"}}),
    ("POST", "/v1/made/a", {"json": {"name": "b"}, "headers": {"x-allowed": "no"}}),
    ("POST", "/v1/made/a", {"json": {"name": "b"}, "headers": {"x-allowed": "too long"}}),
    ("POST", "/v1/made/too-long", {"json": {"name": 1, "other": 2}}),
    ("POST", "/v1/made/a", {}),
    ("POST", "/v1/made/a", {"json": None}),
    ("POST", "/v1/made/a", {"json": [1]}),
    ("POST", "/v1/made/a", {"content": b"{", "headers": JSON}),
    ("POST", "/v1/made/a", {"content": b'{"name": "\xff"}', "headers": JSON}),
    ("POST", "/v1/made/a", {"content": b"[" * 100_000, "headers": JSON}),
    ("POST", "/v1/made/a", {"content": b'{"name": "b"}', "headers": {"content-type": f"{TYPE}; charset=utf-8"}}),
    ("POST", "/v1/made/a", {"content": b'{"name": "b"}', "headers": {"content-type": "application/x+json"}}),
    ("POST", "/v1/made/a", {"content": b'{"name": "b"}', "headers": {"content-type": "text/plain"}}),
    ("POST", "/v1/made/a", {"content": b'{"name": "b"}', "headers": {}}),
    ("GET", "/v1/made/fixed", {}),
    ("GET", "/v1/made/other", {}),
    ("GET", "/v1/made/a%2Fb", {}),
    ("POST", "/v1/made/a:act", {}),
    ("POST", "/v1/made/x:act", {}),
    ("GET", "/v1/plain", {}),
    ("HEAD", "/v1/plain", {}),
    ("DELETE", "/v1/plain", {}),
    ("GET", "/v1/plain/", {}),
    ("GET", "/v1/nothing", {}),
    ("GET", "/openapi.json", {}),
    ("GET", "/v1/gone", {}),
    ("GET", "/v1/wrong", {}),
    ("GET", "/v1/broken", {}),
]  # fmt: skip


def answer(app: ASGIApp, method: str, path: str, options: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return await http.request(method, path, **options)

    found = asyncio.run(ask())
    return found.status_code, dict(found.headers), found.content


@pytest.mark.parametrize(("method", "path", "options"), REQUESTS, ids=lambda value: str(value)[:60])
def test_the_answer_is_fastapis(method: str, path: str, options: dict[str, Any]) -> None:
    app = application()
    dispatch = Dispatch(app, Services())
    for _ in range(2):
        assert answer(dispatch, method, path, options) == answer(app, method, path, options)


@pytest.mark.parametrize("path", ["/v1/lists", "/v1/made/fixed/x", "/openapi.json", "/v1/nothing"])
def test_a_line_end_is_a_part_of_the_path(path: str) -> None:
    """FastAPI does not see it, and would call an endpoint that gets its services here only."""
    app = application()
    assert answer(Dispatch(app, Services()), "GET", f"{path}%0A", {}) == answer(app, "GET", "/v1/nothing", {})


def test_every_path_leads_where_fastapi_leads_it() -> None:
    app = make_app()
    dispatch = Dispatch(app, AnyService())
    routes = [route for route in app.routes if isinstance(route, APIRoute)]
    paths = [route.path.replace("{", "").replace("}", "") for route in routes]
    paths += [path + end for path in paths for end in ("/", ":act", "/x", "x", "%2f")]
    for path in paths:
        for method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"):
            scope = {"type": "http", "method": method, "path": path, "root_path": ""}
            matches = [(route, *route.matches(dict(scope))) for route in routes]
            full = [(route.path, child["path_params"]) for route, match, child in matches if match == Match.FULL]
            endpoint, params = dispatch.find(method, path)
            assert (endpoint and (endpoint.route.path, params)) == (full[0] if full else None), path


def test_no_line_end_is_lost() -> None:
    """`POST /v1/node:drain%0A` is no drain: a line end belongs to a parameter, or nothing is there."""
    app = make_app()
    dispatch = Dispatch(app, AnyService())
    for route in (route for route in app.routes if isinstance(route, APIRoute)):
        path = route.path.replace("{", "").replace("}", "") + "\n"
        for method in route.methods or ():
            endpoint, params = dispatch.find(method, path)
            assert endpoint is None or any("\n" in value for value in params.values()), f"{method} {path!r}"


def test_a_service_is_found_before_the_first_request() -> None:
    app = FastAPI()

    @app.post("/v1/counted")
    async def counted(counter: Annotated[Counter, provided(Counter)]) -> int:
        counter.count += 1
        return counter.count

    dispatch = Dispatch(app, Services(Counter()))
    assert [answer(dispatch, "POST", "/v1/counted", {})[2] for _ in range(2)] == [b"1", b"2"]
    with pytest.raises(KeyError):
        Dispatch(app, Services())


def test_what_is_not_read_cannot_be_declared() -> None:
    app = FastAPI()

    @app.get("/v1/slow")
    async def slow(number: Annotated[int, Depends(in_a_thread)]) -> int:
        return number

    with pytest.raises(TypeError, match="no coroutine"):
        Dispatch(app, Services())
