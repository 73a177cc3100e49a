"""Who calls, how often they may, and whether they may change anything."""

from __future__ import annotations

import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from xmigd.api.gate.kinds import changes
from xmigd.api.gate.limits import RateLimit
from xmigd.errors import Forbidden, Unauthorized, XmigError
from xmigd.security.callers import Caller, local_caller
from xmigd.security.tokens import Tokens

OPEN_PATHS = frozenset({"/healthz", "/readyz"})
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
STRANGERS_RATE = 5.0  # requests a second without a valid token, for each address; four times that at once
PORT = re.compile(r":[0-9]*$")


class WrongHost(XmigError):
    """A web page in a browser of this machine has resolved its own name to the daemon."""

    status = 421
    code = "wrong_host"


class Callers:
    """`state["caller"]`: who it is."""

    def __init__(self, app: ASGIApp, tokens: Tokens, operators: int | None, *, rate: float, open_reading: bool) -> None:
        """`rate`: requests a second of one caller. `open_reading`: without a token, too."""
        self._app = app
        self._tokens = tokens
        self._operators = operators
        self._open_reading = open_reading
        self._rates = RateLimit(rate, 2 * rate)
        self._strangers = RateLimit(STRANGERS_RATE, 4 * STRANGERS_RATE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            caller = scope["state"]["caller"] = self._caller(scope, Headers(scope=scope))
            if caller.scope == "read" and changes(scope):
                raise Forbidden(
                    "this caller may only read", code="read_only",
                    hint="use the local socket api.sock, or a token of scope operate",
                )  # fmt: skip
        await self._app(scope, receive, send)

    def _caller(self, scope: Scope, headers: Headers) -> Caller:
        """Raises Unauthorized, TooManyRequests, WrongHost."""
        peer = scope["state"].get("peer")
        authorization = headers.get("authorization")
        address = (scope.get("client") or ("",))[0] or "somebody"
        if authorization is not None:
            # A token comes before what the kernel says: a front that serves others forwards theirs.
            kind, _, secret = authorization.partition(" ")
            try:
                if kind.lower() != "bearer":
                    raise Unauthorized("only bearer tokens are known", hint="Authorization: Bearer xmig_...")
                caller = self._tokens.caller(secret.strip(), "network" if peer is None else "unix")
            except Unauthorized:
                self._strangers.take(address if peer is None else f"user {peer[0].uid}")
                raise
        elif peer is not None:
            caller = local_caller(peer[0], peer[1], self._operators)
        else:
            _check_host(scope, headers)
            if scope["path"] not in OPEN_PATHS and not self._open_reading:
                self._strangers.take(address)
                raise Unauthorized(
                    "over TCP one needs a token", code="token_required",
                    hint="send Authorization: Bearer ...; on the daemon's machine: xmigctl token create",
                )  # fmt: skip
            caller = Caller(f"somebody at {address}", "read", None, None, "network")
        self._rates.take(caller.name)
        return caller


def _check_host(scope: Scope, headers: Headers) -> None:
    """On this machine's loopback, where browsers of this machine are. Elsewhere the daemon has names of its own, and
    without a token there is only its health."""
    name = PORT.sub("", headers.get("host", ""))
    bound = (scope.get("server") or ("",))[0]
    local = bound == "::1" or bound.startswith("127.")
    if local and name not in LOCAL_NAMES and name != bound:
        raise WrongHost(f"this is not {name[:64]!r}")
