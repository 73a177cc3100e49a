"""Kubernetes' API server, as far as the adapter needs it: objects are read, patched, and watched.

Nothing is repeated here: a request that fails raises, and the loop that made it looks again.
"""

from __future__ import annotations

import contextlib
import json
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx

from xmigd.errors import StartError, XmigError
from xmigd.kubernetes.settings import KubernetesSettings
from xmigd.text import harmless

TIMEOUT = httpx.Timeout(10.0, connect=5.0)
WATCHED = 120  # seconds after which the server ends a watch, and a new one goes on from there
SILENT = 30.0  # seconds that it may take longer for: then the connection is dead
PAGE = 500  # objects
Json = dict[str, Any]
Kind = Literal["merge-patch", "strategic-merge-patch"]


class ApiError(XmigError):
    """The API server refuses, or answers what it should not. `answered`: HTTP's status; 0: it does not answer."""

    def __init__(self, detail: str, answered: int = 0) -> None:
        super().__init__(detail)
        self.answered = answered


class Gone(ApiError):
    """A watch cannot go on from there: everything has to be read again."""


class Api:
    """Threads may share one."""

    def __init__(self, settings: KubernetesSettings) -> None:
        """Raises StartError: the file of the authority cannot be used."""
        trust: ssl.SSLContext | bool = True
        if settings.server.startswith("https://"):
            try:
                trust = ssl.create_default_context(cafile=settings.ca)
            except OSError as error:
                raise StartError(
                    f"{settings.ca} cannot be used: {error.strerror or error}",
                    hint="XMIG_KUBERNETES_CA is a PEM file; in a pod it comes with the service account",
                ) from None
        self._token = settings.token
        self._client = httpx.Client(base_url=settings.server, verify=trust, timeout=TIMEOUT, trust_env=False)

    def get(self, path: str, **params: str | int) -> Json:
        return self._request("GET", path, params)

    def list(self, path: str, **params: str | int) -> tuple[list[Json], str]:
        """All of them, and where a watch goes on."""
        found: list[Json] = []
        more: dict[str, str | int] = {"limit": PAGE}
        while True:
            page = self._request("GET", path, params | more)
            metadata = page.get("metadata") or {}
            found += page.get("items") or []
            if not metadata.get("continue"):
                return found, str(metadata.get("resourceVersion", ""))
            more["continue"] = metadata["continue"]

    def patch(self, path: str, body: Json, kind: Kind = "merge-patch") -> Json:
        return self._request("PATCH", path, {}, body, f"application/{kind}+json")

    def post(self, path: str, body: Json) -> Json:
        return self._request("POST", path, {}, body)

    def delete(self, path: str) -> None:
        """Also if it is not there any more."""
        with contextlib.suppress(NotThere):
            self._request("DELETE", path, {})

    def watch(self, path: str, version: str, **params: str | int) -> Iterator[tuple[str, Json]]:
        """What changes after this version: `ADDED`, `MODIFIED`, `DELETED` or `BOOKMARK`, and the object. Ends when the
        server ends it. Raises Gone."""
        wanted = params | {
            "watch": "true", "resourceVersion": version, "allowWatchBookmarks": "true", "timeoutSeconds": WATCHED,
        }  # fmt: skip
        timeout = httpx.Timeout(WATCHED + SILENT, connect=5.0)
        try:
            with self._client.stream("GET", path, params=wanted, headers=self._headers(), timeout=timeout) as answer:
                if answer.status_code != 200:
                    answer.read()
                    self._body(answer, path)
                for line in answer.iter_lines():
                    event = _parsed(line, path)
                    kind, object = event.get("type"), event.get("object")
                    if not isinstance(kind, str) or not isinstance(object, dict):
                        raise ApiError(f"{path}: a watch sent what is no event")
                    if kind == "ERROR":
                        raise _refusal(object, int(object.get("code") or 0), path)
                    yield kind, object
        except httpx.HTTPError as error:
            raise ApiError(f"{path}: the API server does not answer: {error or type(error).__name__}") from None

    def _request(
        self, method: str, path: str, params: dict[str, str | int], body: Json | None = None,
        content_type: str = "application/json",
    ) -> Json:  # fmt: skip
        headers, content = self._headers(), None
        if body is not None:
            content, headers["Content-Type"] = json.dumps(body).encode(), content_type
        try:
            answer = self._client.request(method, path, params=params, headers=headers, content=content)
        except httpx.HTTPError as error:
            raise ApiError(f"{path}: the API server does not answer: {error or type(error).__name__}") from None
        return self._body(answer, path)

    def _body(self, answer: httpx.Response, path: str) -> Json:
        body = _parsed(answer.text, path) if answer.is_success else _parsed_or_empty(answer.text)
        if not answer.is_success:
            raise _refusal(body, answer.status_code, path)
        return body

    def _headers(self) -> dict[str, str]:
        """The kubelet replaces a token before it is too old."""
        headers = {"Accept": "application/json", "User-Agent": "xmig-kubernetes"}
        if (token := _read(self._token)) is not None:
            headers["Authorization"] = f"Bearer {token}"
        return headers


class NotThere(ApiError):
    """There is no such object, or no such kind of objects."""


class Changed(ApiError):
    """Somebody else was faster, or it is there already."""


KINDS: dict[int, type[ApiError]] = {404: NotThere, 409: Changed, 410: Gone}


def _refusal(status: Json, answered: int, path: str) -> ApiError:
    message = harmless(str(status.get("message") or f"status {answered}"), 500)
    return KINDS.get(answered, ApiError)(f"{path}: the API server refuses: {message}", answered)


def _parsed(text: str, path: str) -> Json:
    found = _parsed_or_empty(text)
    if not found:
        raise ApiError(f"{path}: the API server answered what is no object")
    return found


def _parsed_or_empty(text: str) -> Json:
    with contextlib.suppress(ValueError):
        found = json.loads(text)
        if isinstance(found, dict):
            return found
    return {}


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip() or None
    except OSError:
        return None
