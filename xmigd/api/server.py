"""uvicorn on our sockets: api.sock, where the kernel says who calls, and TCP, where nobody does."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from xmigd.errors import StartError
from xmigd.supervisor.channel import peer_of
from xmigd.supervisor.listeners import bind_unix


class PeerProtocol(H11Protocol):
    """HTTP/1.1 whose requests carry the caller's credentials (`request.state.peer`) on a Unix socket."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        peer = peer_of(sock) if sock is not None and sock.family == socket.AF_UNIX else None
        self.app_state = {**self.app_state, "peer": peer}


class ApiServer(uvicorn.Server):
    """Signals are the daemon's business, not uvicorn's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind_tcp(host: str, port: int) -> socket.socket:
    """Raises StartError: the port is taken, the address is not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise StartError(
            f"cannot listen at {host} port {port}: {error.strerror}",
            hint="choose another port with XMIG_PORT (0: any free one, -1: none)",
        ) from None
    return sock


def bind_api(path: Path) -> socket.socket:
    return bind_unix(path, socket.SOCK_STREAM, 0o666)


def make_server(app: FastAPI) -> ApiServer:
    options: dict[str, Any] = {
        "http": PeerProtocol, "ws": "none", "lifespan": "off", "access_log": False, "log_config": None,
        "server_header": False, "timeout_graceful_shutdown": 3, "limit_concurrency": 256,
    }  # fmt: skip
    return ApiServer(uvicorn.Config(app, **options))
