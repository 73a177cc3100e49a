"""The command line's way to a daemon: HTTP over its local socket, or over the network with a token.

What an answer means is decided here once: a problem (RFC 9457) becomes `Refused`, which keeps every member of it, and
a daemon that does not answer becomes `NoDaemon`.

Only the standard library is needed for it: a command of `xmigctl` is over before a larger one would have been loaded.
Threads may share a client. Each request has a connection of its own, unless the client keeps them.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import json
import os
import select
import socket
import ssl
import time
import uuid
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, urlencode, urlsplit

from xmigd.errors import XmigError
from xmigd.place import Place, local_socket

if TYPE_CHECKING:
    from xmigd.settings import Settings

# How long a request whose answer was lost is tried again: the time that a daemon needs to be restarted.
RESTART_PATIENCE = 30.0
KEPT = 1.0  # seconds after which a connection is not used again: a daemon may close it at the same moment
PATH_AS_IT_IS = "/:,;=@!$&'()*+~%?"


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


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        end = time.monotonic() + (self.timeout or 0.0)
        while True:
            try:
                return self.sock.connect(self._path)
            except BlockingIOError:  # more wait to be accepted than the kernel keeps
                if time.monotonic() >= end:
                    raise
                time.sleep(0.01)


class Client:
    """One daemon. Without `url` it is the local one, whose kernel says who calls; over the network a token does.

    `where`: which daemon is the local one. `url`: http(s)://host[:port]. `ca_file`: PEM file of the authority that
    signed the daemon's certificate; default: the system's. `client_cert`: PEM file with a certificate and its key, for
    a daemon that asks for one. `timeout`: seconds without a byte. `keep`: use connections again, for who asks all the
    time and closes this. Raises XmigError for an address that cannot be used,
    or over which the token could be read.
    """

    def __init__(
        self,
        where: Settings | Place,
        *,
        url: str | None = None,
        token: str | None = None,
        ca_file: str | None = None,
        client_cert: str | None = None,
        timeout: float = 30.0,
        keep: bool = False,
    ) -> None:
        self._keep = keep
        self._kept: deque[_Kept] = deque()
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._timeout = timeout
        self._trust: ssl.SSLContext | None = None
        self._remote = url is not None
        if url is None:
            self.address = str(local_socket(where if isinstance(where, Place) else where.place))
        else:
            self.address = _checked(url, with_token=bool(token))
            if self.address.startswith("https"):
                self._trust = _trust(ca_file, client_cert)

    def get(self, path: str, **params: Any) -> Any:
        return self._body(self._request("GET", path, params=_given(params)))

    def get_tagged(self, path: str, **params: Any) -> tuple[Any, str]:
        """The resource and its ETag, for a PATCH; "*" if it has none."""
        answer = self._request("GET", path, params=_given(params))
        return self._body(answer), answer.headers.get("ETag", "*")

    def get_text(self, path: str) -> str:
        answer = self._request("GET", path)
        self._body(answer, json_expected=False)
        return answer.text()

    def get_bytes(self, path: str) -> bytes:
        answer = self._request("GET", path)
        self._body(answer, json_expected=False)
        return answer.content

    def post(self, path: str, body: dict[str, Any] | None = None, *, keep_null: dict[str, Any] | None = None) -> Any:
        """What is None in `body` is left out; `keep_null` is sent as it is, where null has a meaning."""
        return self._body(self._request("POST", path, json_body=_given(body or {}) | (keep_null or {})))

    def patch(self, path: str, body: dict[str, Any], tag: str) -> Any:
        return self._body(self._request("PATCH", path, json_body=body, headers={"If-Match": tag}))

    def put(self, path: str, body: dict[str, Any], tag: str) -> Any:
        return self._body(self._request("PUT", path, json_body=body, headers={"If-Match": tag}))

    def delete(self, path: str, tag: str | None = None) -> Any:
        return self._body(self._request("DELETE", path, headers={} if tag is None else {"If-Match": tag}))

    def start(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Begin long work, once: the key lets a request whose answer was lost be sent again. Returns the operation."""
        headers = {"Idempotency-Key": uuid.uuid4().hex}
        end = time.monotonic() + RESTART_PATIENCE
        while True:
            try:
                operation = self._body(self._request("POST", path, json_body=_given(body or {}), headers=headers))
                return dict(operation)
            except NoDaemon as error:
                # Never sent: there is no daemon. Sent and lost: it may be on its way.
                if error.code != "lost" or time.monotonic() > end:
                    raise
                time.sleep(0.2)

    def events(self, *, after: int | None = None, **params: Any) -> Iterator[dict[str, Any]]:
        """Events as they come: `{"id", "event", "data"}`. Ends when the daemon ends the stream."""
        headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": str(after)} if after is not None else {})
        with contextlib.closing(self._connection()) as connection:
            answer = self._ask(connection, "GET", "/v1/events", params=_given(params), headers=headers)
            try:
                if answer.status != 200:
                    self._body(_Answer(answer.status, answer.headers, answer.read()))
                if connection.sock is not None:
                    connection.sock.settimeout(None)  # the next event comes when it comes
                yield from _server_sent(line.decode(errors="replace").rstrip("\r\n") for line in answer)
            except (OSError, http.client.HTTPException) as error:
                raise self._lost(error) from None

    def close(self) -> None:
        """Nothing stays open. It may be used again."""
        with contextlib.suppress(IndexError):
            while True:
                self._kept.pop().connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        if not self._remote:
            return _UnixConnection(self.address, self._timeout)
        parts = urlsplit(self.address)
        if self._trust is not None:
            return http.client.HTTPSConnection(parts.netloc, timeout=self._timeout, context=self._trust)
        return http.client.HTTPConnection(parts.netloc, timeout=self._timeout)

    def _request(self, method: str, path: str, **options: Any) -> _Answer:
        if (kept := self._usable()) is not None:
            try:
                return self._over(kept, method, path, **options)
            except NoDaemon as error:
                if method != "GET" or isinstance(error.__context__, TimeoutError):  # it was there, and is only slow
                    raise
        return self._over(self._connection(), method, path, **options)

    def _over(self, connection: http.client.HTTPConnection, method: str, path: str, **options: Any) -> _Answer:
        with contextlib.ExitStack() as stack:
            stack.callback(connection.close)
            answer = self._ask(connection, method, path, **options)
            try:
                found = _Answer(answer.status, answer.headers, answer.read())
            except (OSError, http.client.HTTPException) as error:
                raise self._lost(error) from None
            if self._keep and not answer.will_close:
                self._kept.append(_Kept(connection, time.monotonic(), os.geteuid()))
                stack.pop_all()
            return found

    def _usable(self) -> http.client.HTTPConnection | None:
        """One that was used a moment ago, by the same user (the kernel notes who connects), and is not closed."""
        with contextlib.suppress(IndexError):
            while True:
                kept = self._kept.pop()
                poll = select.poll()
                poll.register(kept.connection.sock, select.POLLIN)
                fresh = time.monotonic() - kept.used < KEPT and kept.user == os.geteuid()
                if fresh and not poll.poll(0):
                    return kept.connection
                kept.connection.close()
        return None

    def _ask(
        self, connection: http.client.HTTPConnection, method: str, path: str, *, params: dict[str, Any] | None = None,
        json_body: dict[str, Any] | None = None, headers: dict[str, str] | None = None,
    ) -> http.client.HTTPResponse:  # fmt: skip
        sent = {"Accept": "application/json"} | self._headers | (headers or {})
        if not self._keep:
            sent["Connection"] = "close"
        body = None
        if json_body is not None:
            body, sent = json.dumps(json_body).encode(), sent | {"Content-Type": "application/json"}
        path = quote(path, safe=PATH_AS_IT_IS, errors="surrogateescape")  # an argument may be any bytes
        if params:
            path += "?" + urlencode(
                {name: _parameter(value) for name, value in params.items()}, True, errors="surrogateescape"
            )
        try:
            if connection.sock is None:
                connection.connect()
        except (OSError, http.client.HTTPException) as error:
            raise self._absent(error) from None
        try:
            connection.request(method, path, body, sent)
            return connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise self._lost(error) from None

    def _absent(self, error: Exception) -> NoDaemon:
        if self._remote:
            return NoDaemon(
                f"no xmigd answers at {self.address}: {error}",
                hint="check the address, the daemon's XMIG_HOST and XMIG_PORT, and its certificate (--ca-file)",
            )
        return NoDaemon(
            f"no xmigd answers at {self.address}",
            hint="start it with `xmigd`, or set XMIG_RUNTIME_DIR to where it runs",
        )

    def _lost(self, error: Exception) -> NoDaemon:
        return NoDaemon(f"xmigd at {self.address} did not answer: {error}", code="lost")

    @staticmethod
    def _body(answer: _Answer, *, json_expected: bool = True) -> Any:
        if answer.is_success and (answer.status == 204 or not json_expected or not answer.content):
            return None
        try:
            body = json.loads(answer.content)
        except ValueError:
            body = None
        if answer.is_success and body is not None:
            return body
        if isinstance(body, dict) and "detail" in body:
            raise Refused(answer.status, body)
        raise Refused(answer.status, {"detail": f"xmigd answered {answer.status}: {answer.text()[:200]}"})


class _Kept(NamedTuple):
    """A connection that may be used again."""

    connection: http.client.HTTPConnection
    used: float  # when, by the monotonic clock
    user: int


class _Answer(NamedTuple):
    """One that has come whole."""

    status: int
    headers: http.client.HTTPMessage
    content: bytes

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300

    def text(self) -> str:
        return self.content.decode(errors="replace")


def _parameter(value: Any) -> Any:
    """As JSON writes it: true, not True."""
    return str(value).lower() if isinstance(value, bool) else value


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


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
