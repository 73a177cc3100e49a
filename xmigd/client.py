"""The command line's way to a daemon: HTTP over its local socket, or over the network with a token.

What an answer means is decided here once: a problem (RFC 9457) becomes `Refused`, which keeps every member of it, and
a daemon that does not answer becomes `NoDaemon`.
"""

from __future__ import annotations

import ipaddress
import json
import ssl
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from xmigd.errors import XmigError
from xmigd.settings import SYSTEM_RUNTIME_DIR, Settings

# How long a request whose answer was lost is tried again: the time that a daemon needs to be restarted.
RESTART_PATIENCE = 30.0


class NoDaemon(XmigError):
    code = "no_daemon"


class Refused(XmigError):
    """The daemon answered with a problem. `problem` is the document, `status` HTTP's."""

    def __init__(self, status: int, problem: dict[str, Any]) -> None:
        super().__init__(
            str(problem.get("detail") or problem.get("title") or f"xmigd answered {status}"),
            hint=str(problem.get("hint") or ""), code=str(problem.get("code") or "internal"),
        )  # fmt: skip
        self.status = status
        self.problem = problem


class Client:
    """One daemon. Without `url` it is the local one, whose kernel says who calls; over the network a token does.

    `url`: http(s)://host[:port]. `ca_file`: PEM file of the authority that signed the daemon's certificate; default:
    the system's. `client_cert`: PEM file with a certificate and its key, for a daemon that asks for one. Raises
    XmigError for an address that cannot be used, or over which the token could be read.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        url: str | None = None,
        token: str | None = None,
        ca_file: str | None = None,
        client_cert: str | None = None,
        timeout: float = 30.0,
    ) -> None:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        if url is None:
            self.address = str(local_socket(settings))
            self._http = httpx.Client(
                transport=httpx.HTTPTransport(uds=self.address), base_url="http://localhost", headers=headers,
                timeout=timeout,
            )  # fmt: skip
        else:
            self.address = _checked(url, with_token=bool(token))
            self._http = httpx.Client(
                base_url=self.address, headers=headers, verify=_trust(ca_file, client_cert), timeout=timeout,
                trust_env=False,
            )  # fmt: skip

    def get(self, path: str, **params: Any) -> Any:
        return self._body(self._request("GET", path, params=_given(params)))

    def get_tagged(self, path: str, **params: Any) -> tuple[Any, str]:
        """The resource and its ETag, for a PATCH; "*" if it has none."""
        answer = self._request("GET", path, params=_given(params))
        return self._body(answer), answer.headers.get("etag", "*")

    def get_text(self, path: str) -> str:
        answer = self._request("GET", path)
        self._body(answer, json_expected=False)
        return answer.text

    def post(self, path: str, body: dict[str, Any] | None = None, *, keep_null: dict[str, Any] | None = None) -> Any:
        """What is None in `body` is left out; `keep_null` is sent as it is, where null has a meaning."""
        return self._body(self._request("POST", path, json=_given(body or {}) | (keep_null or {})))

    def patch(self, path: str, body: dict[str, Any], tag: str) -> Any:
        return self._body(self._request("PATCH", path, json=body, headers={"If-Match": tag}))

    def delete(self, path: str) -> Any:
        return self._body(self._request("DELETE", path))

    def start(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Begin long work, once: the key lets a request whose answer was lost be sent again. Returns the operation."""
        headers = {"Idempotency-Key": uuid.uuid4().hex}
        end = time.monotonic() + RESTART_PATIENCE
        while True:
            try:
                operation = self._body(self._request("POST", path, json=_given(body or {}), headers=headers))
                return dict(operation)
            except NoDaemon as error:
                # Never sent: there is no daemon. Sent and lost: it may be on its way.
                if error.code != "lost" or time.monotonic() > end:
                    raise
                time.sleep(0.2)

    def events(self, *, after: int | None = None, **params: Any) -> Iterator[dict[str, Any]]:
        """Events as they come: `{"id", "event", "data"}`. Ends when the daemon ends the stream."""
        headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": str(after)} if after is not None else {})
        timeout = httpx.Timeout(30, read=None)
        try:
            with self._http.stream(
                "GET", "/v1/events", params=_given(params), headers=headers, timeout=timeout
            ) as answer:
                if not answer.is_success:
                    answer.read()
                    self._body(answer)
                yield from _server_sent(answer.iter_lines())
        except httpx.TransportError as error:
            raise self._lost(error) from None

    def close(self) -> None:
        self._http.close()

    def _request(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            return self._http.request(method, path, **options)
        except httpx.TransportError as error:
            raise self._lost(error) from None

    def _lost(self, error: httpx.TransportError) -> NoDaemon:
        if isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout)):
            if self.address.startswith("http"):
                return NoDaemon(
                    f"no xmigd answers at {self.address}: {error}",
                    hint="check the address, the daemon's XMIG_HOST and XMIG_PORT, and its certificate (--ca-file)",
                )
            return NoDaemon(
                f"no xmigd answers at {self.address}",
                hint="start it with `xmigd`, or set XMIG_RUNTIME_DIR to where it runs",
            )
        return NoDaemon(f"xmigd at {self.address} did not answer: {error}", code="lost")

    @staticmethod
    def _body(answer: httpx.Response, *, json_expected: bool = True) -> Any:
        if answer.is_success and (answer.status_code == 204 or not json_expected or not answer.content):
            return None
        try:
            body = answer.json()
        except ValueError:
            body = None
        if answer.is_success and body is not None:
            return body
        if isinstance(body, dict) and "detail" in body:
            raise Refused(answer.status_code, body)
        text = answer.text[:200]
        raise Refused(answer.status_code, {"detail": f"xmigd answered {answer.status_code}: {text}"})


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def local_socket(settings: Settings) -> Path:
    """The user's own daemon, if one was started or named; otherwise the system's."""
    system = SYSTEM_RUNTIME_DIR / settings.api_socket.name
    own = "runtime_dir" in settings.model_fields_set or settings.api_socket.exists() or not system.exists()
    return settings.api_socket if own else system


def _checked(url: str, *, with_token: bool) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
        raise XmigError(f"{url!r} is no address of a daemon", hint="write https://HOST:PORT", code="bad_url")
    if with_token and parts.scheme == "http" and not _is_this_machine(parts.hostname):
        raise XmigError(
            "a token is not sent over http: whoever is in between could use it",
            hint=f"use https://{parts.netloc}", code="insecure",
        )  # fmt: skip
    return f"{parts.scheme}://{parts.netloc}"


def _is_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _trust(ca_file: str | None, client_cert: str | None) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=ca_file)
        if client_cert is not None:
            context.load_cert_chain(client_cert)
    except OSError as error:
        raise XmigError(
            f"a certificate cannot be used: {error.strerror or error} ({ca_file or client_cert})",
            hint="--ca-file and --client-cert name PEM files", code="bad_ca_file",
        ) from None  # fmt: skip
    return context


def _server_sent(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """https://html.spec.whatwg.org/multipage/server-sent-events.html: fields until an empty line; `:` is a comment."""
    fields: dict[str, list[str]] = {}
    for line in lines:
        if line:
            name, _, value = line.partition(":")
            if name:
                fields.setdefault(name, []).append(value.removeprefix(" "))
            continue
        if "data" in fields:
            text = "\n".join(fields["data"])
            try:
                data = json.loads(text)
            except ValueError:
                data = text
            yield {"id": "".join(fields.get("id", [])), "event": "".join(fields.get("event", [])), "data": data}
        fields = {}
