"""The way to xmigd: HTTP with the visitor's token, over its Unix socket or TCP."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from typing import Any

import httpx

from xmigd.web.settings import WebSettings

PATIENCE = httpx.Timeout(20.0, connect=5.0)


class ApiError(Exception):
    """A problem (RFC 9457) that the API answered with, or the one that it does not answer."""

    def __init__(self, status: int, problem: dict[str, Any]) -> None:
        super().__init__(problem.get("detail", ""))
        self.status = status
        self.problem = problem

    @property
    def code(self) -> str:
        return str(self.problem.get("code", ""))


def no_daemon(where: str, why: str) -> ApiError:
    return ApiError(503, {
        "title": "xmigd does not answer", "status": 503, "code": "no_daemon",
        "detail": f"nothing came back from {where}: {why}",
        "hint": "running programs are not affected; look at `systemctl status xmigd`, then reload this page",
    })  # fmt: skip


def make_http(settings: WebSettings) -> httpx.AsyncClient:
    """One pool of connections for all visitors. Proxies of the environment are not for tokens."""
    verify: ssl.SSLContext | bool = True
    if settings.api_ca is not None:
        verify = ssl.create_default_context(cafile=str(settings.api_ca))
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
    if settings.api.startswith("unix:"):
        transport = httpx.AsyncHTTPTransport(uds=settings.api.removeprefix("unix:"), limits=limits)
        return httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=PATIENCE)
    return httpx.AsyncClient(
        base_url=settings.api, timeout=PATIENCE, verify=verify, limits=limits, trust_env=False, follow_redirects=False
    )


class Api:
    """The API as one visitor has it. Raises ApiError."""

    def __init__(self, http: httpx.AsyncClient, where: str, token: str | None) -> None:
        self._http = http
        self._where = where
        self._headers = {} if token is None else {"authorization": f"Bearer {token}"}

    async def get(self, path: str, **params: Any) -> Any:
        answer = await self.request("GET", path, params={k: v for k, v in params.items() if v not in (None, "")})
        return answer.json()

    async def get_or(self, default: Any, path: str, **params: Any) -> Any:
        """For what a page can do without: the default where it is not there, or not for this visitor."""
        try:
            return await self.get(path, **params)
        except ApiError as error:
            if error.status in (403, 404):
                return default
            raise

    async def all(self, *paths: tuple[str, dict[str, Any]] | str) -> list[Any]:
        """Several at once."""
        requested = [(path, {}) if isinstance(path, str) else path for path in paths]
        return await asyncio.gather(*(self.get(path, **params) for path, params in requested))

    async def post(self, path: str, body: dict[str, Any] | None = None, **options: Any) -> httpx.Response:
        body = {k: v for k, v in (body or {}).items() if v is not None}
        return await self.request("POST", path, json=body, **options)

    async def patch(self, path: str, change: dict[str, Any], version: str) -> httpx.Response:
        """Change what the visitor has seen: somebody else's change since then is a problem with status 412."""
        return await self.request("PATCH", path, json=change, headers={"if-match": f'"{version}"'})

    async def put(self, path: str, body: dict[str, Any], version: str) -> httpx.Response:
        """Replace what the visitor has seen."""
        return await self.request("PUT", path, json=body, headers={"if-match": f'"{version}"'})

    async def delete(self, path: str) -> httpx.Response:
        return await self.request("DELETE", path)

    async def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        options["headers"] = self._headers | options.get("headers", {})
        try:
            answer = await self._http.request(method, path, **options)
        except httpx.HTTPError as error:
            raise no_daemon(self._where, str(error) or type(error).__name__) from None
        if not answer.is_success:
            raise problem_of(answer)
        return answer

    @contextlib.asynccontextmanager
    async def stream(self, path: str, **options: Any) -> AsyncIterator[httpx.Response]:
        options["headers"] = self._headers | options.get("headers", {})
        timeout = httpx.Timeout(60.0, connect=5.0)  # the API says something at least every 30 s
        try:
            async with self._http.stream("GET", path, timeout=timeout, **options) as answer:
                if not answer.is_success:
                    await answer.aread()
                    raise problem_of(answer)
                yield answer
        except httpx.HTTPError as error:
            raise no_daemon(self._where, str(error) or type(error).__name__) from None


def problem_of(answer: httpx.Response) -> ApiError:
    with contextlib.suppress(ValueError):
        body = answer.json()
        if isinstance(body, dict) and "detail" in body:
            return ApiError(answer.status_code, body)
    text = answer.text[:200] or answer.reason_phrase
    return ApiError(answer.status_code, {"status": answer.status_code, "code": "unexpected", "detail": text})
