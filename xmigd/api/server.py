"""uvicorn on our sockets: api.sock, where the kernel says who calls, and TCP, where a token does."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from xmigd.connections.http import HttpServer
from xmigd.connections.listener import bind_unix
from xmigd.connections.quotas import Quotas
from xmigd.errors import StartError
from xmigd.ipc.channel import peer_groups, peer_of
from xmigd.settings import Settings

BACKLOG = 4096  # the kernel takes as many as its somaxconn; who comes when they are full is not even refused


class ApiServer(HttpServer):
    """Signals are the daemon's business, not uvicorn's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def state_of(self, sock: socket.socket) -> dict[str, Any]:
        """`peer`: the caller's credentials and groups, on a Unix socket."""
        return {"peer": (peer_of(sock), peer_groups(sock)) if sock.family == socket.AF_UNIX else None}


def bind_tcp(host: str, port: int, prefix: str = "XMIG_") -> socket.socket:
    """Raises StartError: the port is taken, the address is not ours. `prefix`: of the settings that choose others."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)  # who hears that we are ready can connect; uvicorn listens only when its loop runs
    except OSError as error:
        sock.close()
        raise StartError(
            f"cannot listen at {host} port {port}: {error.strerror}",
            hint=f"choose another port with {prefix}PORT (0: any free one), or another address with {prefix}HOST",
        ) from None
    return sock


def bind_api(path: Path) -> socket.socket:
    return bind_unix(path, socket.SOCK_STREAM, 0o666, BACKLOG)


def check_tcp(settings: Settings) -> None:
    """Raises StartError: tokens would cross the network for everybody to read, or nothing is there to encrypt with."""
    for name in ("tls_cert", "tls_key", "tls_client_ca"):
        path: Path | None = getattr(settings, name)
        if path is not None and not os.access(path, os.R_OK):
            raise StartError(f"{path} cannot be read", hint=f"set XMIG_{name.upper()} to a PEM file")
        if path is not None and settings.tls_cert is None:
            raise StartError(f"{name} is set and tls_cert is not", hint="set XMIG_TLS_CERT")
    loopback = settings.host == "localhost" or _is_loopback(settings.host)
    if settings.tls_cert is None and not loopback and not settings.plain_tcp:
        raise StartError(
            f"the API would listen at {settings.host} without TLS, and tokens could be read on their way",
            hint="set XMIG_TLS_CERT, or XMIG_PLAIN_TCP=true if something else encrypts",
        )
    if settings.open_reading and not loopback:
        raise StartError("open_reading is for this machine only", hint="set XMIG_HOST=127.0.0.1")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def make_server(app: ASGIApp, settings: Settings, quotas: Quotas, *, tcp: bool = False) -> ApiServer:
    """On the local socket, or on TCP, encrypted if the settings have a certificate."""
    options: dict[str, Any] = {
        "http": "httptools", "ws": "none", "lifespan": "off", "access_log": False, "log_config": None,
        "server_header": False, "proxy_headers": False, "timeout_graceful_shutdown": 3,
        "timeout_keep_alive": settings.idle_timeout,
        # A request that was sent ahead begins in the task of the one before it, whose variables are not its own.
        "reset_contextvars": True,
    }  # fmt: skip
    if tcp and settings.tls_cert is not None:
        options |= {
            "ssl_certfile": settings.tls_cert, "ssl_keyfile": settings.tls_key,
            "ssl_ca_certs": settings.tls_client_ca,
            "ssl_cert_reqs": ssl.CERT_NONE if settings.tls_client_ca is None else ssl.CERT_REQUIRED,
        }  # fmt: skip
    config = uvicorn.Config(app, **options)
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        raise StartError(
            f"{settings.tls_cert} and its key cannot be used: {error}",
            hint="XMIG_TLS_CERT and XMIG_TLS_KEY are PEM files that belong together",
        ) from None
    return ApiServer(config, quotas, settings)
