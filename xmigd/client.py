"""The command line's way to the daemon: HTTP over api.sock."""

from __future__ import annotations

from typing import Any

import httpx

from xmigd.errors import XmigError
from xmigd.settings import Settings


class NoDaemon(XmigError):
    code = "no_daemon"


class Refused(XmigError):
    """The daemon answered with a problem."""


class Client:
    def __init__(self, settings: Settings) -> None:
        self._socket = settings.api_socket
        self._http = httpx.Client(
            transport=httpx.HTTPTransport(uds=str(self._socket)), base_url="http://localhost", timeout=30
        )

    def get(self, path: str, **params: Any) -> Any:
        return self._request("GET", path, params={k: v for k, v in params.items() if v is not None})

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return self._request("POST", path, json={k: v for k, v in body.items() if v is not None})

    def delete(self, path: str) -> Any:
        return self._request("DELETE", path)

    def close(self) -> None:
        self._http.close()

    def _request(self, method: str, path: str, **options: Any) -> Any:
        try:
            answer = self._http.request(method, path, **options)
        except httpx.ConnectError:
            raise NoDaemon(
                f"no xmigd answers at {self._socket}",
                hint="start it with `xmigd`, or set XMIG_RUNTIME_DIR to where it runs",
            ) from None
        except httpx.HTTPError as error:
            raise NoDaemon(f"xmigd at {self._socket} did not answer: {error}") from None
        if answer.is_success:
            return answer.json()
        try:
            problem = answer.json()
            raise Refused(problem["detail"], hint=problem.get("hint", ""), code=problem.get("code"))
        except (ValueError, KeyError, TypeError):
            raise Refused(f"xmigd answered {answer.status_code}: {answer.text[:200]}") from None
