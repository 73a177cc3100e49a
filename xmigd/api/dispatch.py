"""Requests to the endpoints that FastAPI knows.

FastAPI reads what endpoints declare, and describes them. What it would find out about each parameter again with every
request is found out here when the daemon starts. Its functions read parameters and bodies, and its fields check what is
answered: both are as the OpenAPI document says. Where there is no endpoint, it answers itself.
"""

from __future__ import annotations

import copy
import email.message
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.dependencies.models import Dependant
from fastapi.dependencies.utils import request_body_to_args, request_params_to_args
from fastapi.exceptions import RequestValidationError, ResponseValidationError
from fastapi.routing import APIRoute
from pydantic_core import PydanticUndefined, to_json
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from xmigd.api.dependencies import Provided, Services
from xmigd.api.problems import on_error
from xmigd.api.strict import check, known
from xmigd.errors import XmigError

EXPECTED = (XmigError, RequestValidationError, HTTPException)
JSON = "application/json"


class Dispatch:
    """Routes are tried in their order, as FastAPI tries them."""

    def __init__(self, app: FastAPI, services: Services) -> None:
        self._elsewhere: ASGIApp = app
        endpoints = [Endpoint(route, services) for route in app.routes if isinstance(route, APIRoute)]
        # By their path, where that has no parameters; otherwise by what it begins with.
        self._fixed: dict[tuple[str, str], Endpoint] = {}
        self._others: dict[str, list[Endpoint]] = {}
        for endpoint in endpoints:
            self._others.setdefault(_beginning(endpoint.route.path), []).append(endpoint)
        for path in (route.path for route in app.routes if isinstance(route, APIRoute) and not route.param_convertors):
            for endpoint in reversed(endpoints):
                if endpoint.route.path_regex.match(path):
                    self._fixed |= {(method, path): endpoint for method in endpoint.methods}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint, scope["path_params"] = self.find(scope["method"], scope["path"])
        if endpoint is None and scope["path"].endswith("\n"):  # FastAPI's patterns end before it: it would find one
            await (await on_error(Request(scope), HTTPException(404)))(scope, receive, send)
            return
        await (endpoint or self._elsewhere)(scope, receive, send)

    def find(self, method: str, path: str) -> tuple[Endpoint | None, dict[str, str]]:
        """The endpoint, and the parameters in its path."""
        endpoint = self._fixed.get((method, path))
        if endpoint is not None:
            return endpoint, {}
        for endpoint in self._others.get(_beginning(path), ()):
            if method in endpoint.methods and (found := endpoint.route.path_regex.fullmatch(path)):
                return endpoint, found.groupdict()
        return None, {}


def _beginning(path: str) -> str:
    """Paths begin with a version and what there are many of, which an action may follow: /v1/jobs, /v1/node:drain."""
    return "/".join(path.split("/", 3)[:3]).partition(":")[0]


class Endpoint:
    """An ASGI application."""

    def __init__(self, route: APIRoute, services: Services) -> None:
        self.route = route
        self.methods = frozenset(route.methods or ())
        self._known = known(route)
        self._handler = _Call(route.dependant, services)
        self._field = route.response_field
        self._waits = inspect.iscoroutinefunction(route.endpoint)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["route"] = self.route
        request = Request(scope, receive, send)
        begun = False

        async def sending(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await (await self._answer(request))(scope, receive, sending)
        except Exception as error:
            if begun:  # nothing can be put behind it
                raise
            await (await on_error(request, error))(scope, receive, send)
            if not isinstance(error, EXPECTED):
                raise

    async def _answer(self, request: Request) -> Response:
        """Raises what its handler raises, Invalid, RequestValidationError, HTTPException."""
        names, takes_body = self._known
        if request.method != "GET" or request.scope["query_string"]:
            await check(request, names, takes_body=takes_body)
        collected = _Collected(request, await _body(request) if takes_body else PydanticUndefined)
        arguments = await self._handler.arguments(collected)
        if collected.errors:
            raise RequestValidationError(collected.errors)
        if self._waits:
            result = self._checked(await self._handler.call(**arguments))
        else:
            result = await run_in_threadpool(self._in_thread, arguments)
        if isinstance(result, Response):
            return result
        status = collected.status or self.route.status_code or 200
        response = Response(result if status not in (204, 304) else b"", status, media_type=JSON)
        if collected.response is not None:
            response.raw_headers += collected.response.raw_headers
        return response

    def _in_thread(self, arguments: dict[str, Any]) -> Any:
        return self._checked(self._handler.call(**arguments))

    def _checked(self, result: Any) -> Response | bytes:
        """As JSON. Raises ResponseValidationError: it is not what the document says."""
        if isinstance(result, Response):
            return result
        if self._field is None:
            return to_json(result)
        value, errors = self._field.validate(result, {}, loc=("response",))
        if errors:
            raise ResponseValidationError(errors=errors if isinstance(errors, list) else [errors], body=result)
        return self._field.serialize_json(value)


class _Collected:
    """One request, while its handler's arguments are collected."""

    __slots__ = ("body", "errors", "request", "response")

    def __init__(self, request: Request, body: Any) -> None:
        self.request = request
        self.body = body
        self.errors: list[Any] = []
        self.response: Response | None = None  # what its handler may add headers to

    @property
    def status(self) -> int | None:
        return None if self.response is None else self.response.status_code


@dataclass(frozen=True, slots=True)
class _Step:
    """Another function that is called before, and which argument its result is."""

    name: str | None
    call: _Call


class _Call:
    """A function, and where its arguments come from. Raises TypeError for one that declares what no endpoint of ours
    does."""

    def __init__(self, dependant: Dependant, services: Services) -> None:
        assert dependant.call is not None
        self.call: Callable[..., Any] = dependant.call
        others = (
            dependant.cookie_params, dependant.websocket_param_name, dependant.http_connection_param_name,
            dependant.background_tasks_param_name, dependant.security_scopes_param_name, dependant.body_params[1:],
        )  # fmt: skip
        if any(others):
            raise TypeError(f"{self.call.__qualname__} declares a parameter that is not read here")
        self._services: dict[str, Any] = {}
        self._before: list[_Step] = []
        for each in dependant.dependencies:
            if isinstance(each.call, Provided) and each.name is not None:
                self._services[each.name] = services.get(each.call.kind)
            elif inspect.iscoroutinefunction(each.call):
                self._before.append(_Step(each.name, _Call(each, services)))
            else:
                raise TypeError(f"{self.call.__qualname__} depends on what is no coroutine")
        self._path, self._headers = dependant.path_params, dependant.header_params
        self._query = _Query(dependant.query_params)
        self._body = dependant.body_params
        self._request, self._response = dependant.request_param_name, dependant.response_param_name

    async def arguments(self, collected: _Collected) -> dict[str, Any]:
        """What is not as it was declared is among the errors; a function whose arguments are not is not called."""
        values = self._services.copy()
        request, errors = collected.request, collected.errors
        for step in self._before:
            before = len(errors)
            given = await step.call.arguments(collected)
            if len(errors) == before:
                result = await step.call.call(**given)
                if step.name is not None:
                    values[step.name] = result
        if self._path:
            _take(values, errors, request_params_to_args(self._path, request.path_params))
        if self._query.fields:
            _take(values, errors, self._query.read(request))
        if self._headers:
            _take(values, errors, request_params_to_args(self._headers, request.headers))
        if self._body:
            found = request_body_to_args(body_fields=self._body, received_body=collected.body, embed_body_fields=False)
            _take(values, errors, await found)
        if self._request is not None:
            values[self._request] = request
        if self._response is not None:
            if collected.response is None:
                collected.response = _Draft()
            values[self._response] = collected.response
        return values


class _Query:
    """Most parameters of most requests are not given: what they are then is known before."""

    def __init__(self, fields: list[Any]) -> None:
        self.fields = fields
        self._defaults, errors = request_params_to_args(fields, QueryParams())
        self._all_given = bool(errors)  # there are some without a default
        self._mutable = [name for name, value in self._defaults.items() if isinstance(value, list | dict | set)]

    def read(self, request: Request) -> tuple[dict[str, Any], list[Any]]:
        params = request.query_params
        if self._all_given:
            return request_params_to_args(self.fields, params)
        values = self._defaults.copy()
        for name in self._mutable:
            values[name] = copy.copy(values[name])
        if not params:
            return values, []
        given, errors = request_params_to_args([each for each in self.fields if each.alias in params], params)
        return values | given, errors


class _Draft(Response):
    """Headers for an answer that is not made yet, and its status if it is another one than declared."""

    def __init__(self) -> None:
        self.raw_headers = []
        self.status_code = None  # type: ignore[assignment]


def _take(values: dict[str, Any], errors: list[Any], found: tuple[Mapping[str, Any], list[Any]]) -> None:
    values.update(found[0])
    errors += found[1]


async def _body(request: Request) -> Any:
    """What it says in JSON; what says that it is something else, as it is. Raises RequestValidationError,
    HTTPException."""
    raw = await request.body()
    if not raw:
        return PydanticUndefined
    declared = request.headers.get("content-type", "")
    if declared != JSON and not _is_json(declared):
        return raw
    try:
        return json.loads(raw)
    except json.JSONDecodeError as error:
        raise RequestValidationError(
            [{"type": "json_invalid", "loc": ("body", error.pos), "msg": "JSON decode error", "input": {},
              "ctx": {"error": error.msg}}]
        ) from error  # fmt: skip
    except (ValueError, RecursionError) as error:  # not UTF-8; nested too deep
        raise HTTPException(400, "There was an error parsing the body") from error


def _is_json(declared: str) -> bool:
    message = email.message.Message()
    message["content-type"] = declared
    subtype = message.get_content_subtype()
    return message.get_content_maintype() == "application" and (subtype == "json" or subtype.endswith("+json"))
