"""etcd's JSON gateway (v3), as far as leases need it. Nothing in here trusts what answers.

Each request has a connection and a thread of its own, of a few, so that an etcd that hangs takes no thread of the
daemon's. It has a time in all, not for each byte: at its end the connection is shut.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.client
import json
import socket
import ssl
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from xmigd.errors import StartError, Unavailable
from xmigd.text import harmless

LONGEST = 1 << 20  # bytes of an answer
THREADS = 8
HINT = "look at the settings etcd_*, and at etcd: etcdctl endpoint health"


class NotFoundThere(Exception):
    """etcd has no such lease any more."""


@dataclass(frozen=True, slots=True)
class Found:
    """A key as it is there."""

    value: bytes
    create_revision: int
    lease: int


class Etcd:
    def __init__(
        self, endpoints: Sequence[str], *, timeout: float, ca: Path | None = None, certificate: Path | None = None,
        key: Path | None = None,
    ) -> None:  # fmt: skip
        """`timeout`: seconds for each endpoint. Raises StartError: a certificate cannot be used."""
        self.timeout = timeout
        self._endpoints = list(endpoints)
        self._trust: ssl.SSLContext | None = None
        self._threads = ThreadPoolExecutor(THREADS, "etcd")
        if any(each.startswith("https:") for each in endpoints):
            try:
                self._trust = ssl.create_default_context(cafile=None if ca is None else str(ca))
                if certificate is not None:
                    self._trust.load_cert_chain(certificate, key)
            except OSError as error:
                raise StartError(
                    f"the certificates of etcd cannot be used: {error.strerror or error}",
                    hint="etcd_ca, etcd_certificate and etcd_key name PEM files",
                ) from None

    async def grant(self, seconds: int) -> int:
        """The number of a new lease. Raises Unavailable, as all of these do."""
        return _number(await self._call("lease/grant", {"TTL": str(seconds)}), "ID")

    async def keep_alive(self, lease: int) -> None:
        """Raises NotFoundThere: it has expired."""
        answer = await self._call("lease/keepalive", {"ID": str(lease)})
        result = answer.get("result")
        if not isinstance(result, dict):
            raise _wrong("a lease is not kept alive")
        if "TTL" not in result or _number(result, "TTL") <= 0:  # the gateway leaves out what is 0
            raise NotFoundThere

    async def revoke(self, lease: int) -> None:
        """What it holds is removed. Raises NotFoundThere: it has expired."""
        await self._call("lease/revoke", {"ID": str(lease)})

    async def create(self, key: str, value: bytes, lease: int) -> Found | None:
        """Put it if it is not there. Returns what is there otherwise; None: it is ours."""
        answer = await self._call(
            "kv/txn",
            {
                "compare": [{"key": _text(key), "target": "CREATE", "result": "EQUAL", "create_revision": "0"}],
                "success": [{"request_put": {"key": _text(key), "value": _bytes(value), "lease": str(lease)}}],
                "failure": [{"request_range": {"key": _text(key)}}],
            },
        )
        if answer.get("succeeded") is True:
            return None
        responses = answer.get("responses")
        if not isinstance(responses, list) or len(responses) != 1 or not isinstance(responses[0], dict):
            raise _wrong("a transaction has no outcome")
        found = _found(responses[0].get("response_range"))
        if found is None:
            raise _wrong("a transaction failed because of a key that is not there")
        return found

    async def get(self, key: str) -> Found | None:
        """By a quorum, not by what one member remembers."""
        return _found(await self._call("kv/range", {"key": _text(key)}))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _call(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """At the first endpoint that answers; it is the first the next time. Raises Unavailable, NotFoundThere."""
        why = "no endpoint is set"
        for endpoint in list(self._endpoints):
            try:
                answer = await self._at(endpoint, path, json.dumps(body).encode())
            except Unavailable as error:
                why = error.message
                continue
            if endpoint != self._endpoints[0]:
                self._endpoints.remove(endpoint)
                self._endpoints.insert(0, endpoint)
            return answer
        raise Unavailable(why, code="etcd_unreachable", hint=HINT)

    async def _at(self, endpoint: str, path: str, body: bytes) -> dict[str, Any]:
        parts = urlsplit(endpoint)
        where = parts.netloc
        connection: http.client.HTTPConnection
        if parts.scheme == "https":
            connection = http.client.HTTPSConnection(where, timeout=self.timeout, context=self._trust)
        else:
            connection = http.client.HTTPConnection(where, timeout=self.timeout)
        running = asyncio.get_running_loop().run_in_executor(self._threads, _request, connection, path, body)
        try:
            async with asyncio.timeout(self.timeout):
                status, content = await asyncio.shield(running)
        except TimeoutError:
            running.add_done_callback(lambda done: done.cancelled() or done.exception())
            with contextlib.suppress(OSError):
                if connection.sock is not None:
                    connection.sock.shutdown(socket.SHUT_RDWR)  # its thread ends
            raise Unavailable(f"etcd at {where} has not answered within {self.timeout:g} s") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise Unavailable(f"etcd at {where} does not answer: {harmless(why, 200)}") from None
        try:
            # Of a stream, which keeping alive is, the first answer.
            answer = json.loads(content.split(b"\n", 1)[0] or content)
        except (ValueError, RecursionError):
            raise Unavailable(f"what answers at {where} is no etcd: status {status}, and no JSON") from None
        if not isinstance(answer, dict):
            raise Unavailable(f"what answers at {where} is no etcd: its answer is no object")
        if status != 200 or "error" in answer:
            problem: Any = answer.get("error")
            if isinstance(problem, dict):
                answer, problem = problem, problem.get("message")
            code = answer.get("code", answer.get("grpc_code"))
            if code == 5:
                raise NotFoundThere
            raise Unavailable(f"etcd at {where} refuses (status {status}): {harmless(str(problem), 200)}")
        return answer


def _request(connection: http.client.HTTPConnection, path: str, body: bytes) -> tuple[int, bytes]:
    """Raises OSError, HTTPException."""
    with contextlib.closing(connection):
        connection.request("POST", f"/v3/{path}", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read(LONGEST)


def _found(answer: Any) -> Found | None:
    if not isinstance(answer, dict):
        raise _wrong("a key was requested")
    rows = answer.get("kvs", [])
    if not isinstance(rows, list) or (rows and not isinstance(rows[0], dict)):
        raise _wrong("a key was requested")
    if not rows:
        return None
    try:
        value = base64.b64decode(rows[0].get("value", ""), validate=True)
    except (ValueError, TypeError):
        raise _wrong("a value is no base64") from None
    lease = _number(rows[0], "lease") if "lease" in rows[0] else 0
    return Found(value, _number(rows[0], "create_revision"), lease)


def _number(answer: dict[str, Any], name: str) -> int:
    """The gateway writes numbers of 64 bits as text."""
    value = answer.get(name)
    try:
        return int(value) if isinstance(value, (str, int)) else int("")
    except ValueError:
        raise _wrong(f"{name} is no number") from None


def _wrong(what: str) -> Unavailable:
    return Unavailable(f"etcd answers what is no answer: {what}", code="etcd_wrong", hint=HINT)


def _text(key: str) -> str:
    return _bytes(key.encode())


def _bytes(value: bytes) -> str:
    return base64.b64encode(value).decode()
