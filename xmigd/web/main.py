"""Entry of the dashboard: `xmig-web [--config FILE]`."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import ssl
from collections.abc import Iterator
from types import FrameType
from typing import Any

import uvicorn

from xmigd import __version__, log
from xmigd.api.server import bind_tcp
from xmigd.configuration import from_command_line, run
from xmigd.connections.http import HttpServer
from xmigd.connections.quotas import Quotas
from xmigd.errors import StartError
from xmigd.web.app import make_app
from xmigd.web.page import Front
from xmigd.web.settings import WebSettings

logger = log.get("web")


class WebServer(HttpServer):
    """Pages listen to events for as long as they are open: they are informed first when it is time to go."""

    def __init__(self, config: uvicorn.Config, front: Front) -> None:
        super().__init__(config, Quotas.of(front.settings, "XMIG_WEB_"), front.settings)
        self._front = front

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(say_unless_late)
        await super().startup(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's own would end an orderly stop by killing itself with the same signal."""
        before = {number: signal.signal(number, self._stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.leave()
        self._front.stopping.set()


def say_unless_late(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """What the loop does with errors that nobody catches, but for one that is none: when a page goes at the moment at
    which xmigd has news for it, anyio (4.16) hands them to a reader that was cancelled just before."""
    late = isinstance(context.get("exception"), asyncio.InvalidStateError)
    if not late or "Future.set_result" not in repr(context.get("handle")):
        loop.default_exception_handler(context)


def main() -> None:
    settings = from_command_line(WebSettings, "xMIG's dashboard, in front of an xmigd")
    log.configure(settings.log_level, json=settings.log_json)
    run(WebSettings.program, lambda: serve(settings))


def serve(settings: WebSettings) -> None:
    """Raises StartError: the address cannot be had, the certificate cannot be used."""
    listening = bind_tcp(settings.host, settings.port, "XMIG_WEB_")
    app, front = make_app(settings)
    config = uvicorn.Config(
        app, http="httptools", ws="none", lifespan="off", access_log=False, log_config=None,
        server_header=False, proxy_headers=False, timeout_graceful_shutdown=3, timeout_keep_alive=settings.idle_timeout,
        reset_contextvars=True,
        ssl_certfile=settings.tls_certificate, ssl_keyfile=settings.tls_key,
    )  # fmt: skip
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        raise StartError(
            f"{settings.tls_certificate} and {settings.tls_key} cannot be used: {error}",
            hint="XMIG_WEB_TLS_CERTIFICATE and XMIG_WEB_TLS_KEY are PEM files that belong together",
        ) from None
    host, port = listening.getsockname()[:2]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    scheme = "https" if settings.tls_certificate else "http"
    logger.info(
        "xmig-web is ready", version=__version__, address=f"{scheme}://{address}", api=settings.api,
        local=settings.local,
    )  # fmt: skip
    WebServer(config, front).run(sockets=[listening])


if __name__ == "__main__":
    main()
