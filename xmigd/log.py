"""Logs: one line per event on standard error. A decision's line says why in `why`."""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog

from xmigd.text import harmless

_least = logging.DEBUG  # what is logged; structlog's own default


def _one_line(_: Any, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Text that came from outside stays on its line and cannot paint the terminal."""
    for key, value in event.items():
        if value is not None and not isinstance(value, (bool, int, float)) and not str(value).isprintable():
            event[key] = harmless(str(value), None)
    return event


def configure(level: str = "info", *, json: bool = False) -> None:
    global _least
    _least = logging.getLevelNamesMapping()[level.upper()]
    renderer: Any = (
        structlog.processors.JSONRenderer()
        if json
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=0)
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _one_line,
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_least),
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),  # whatever that is at the time
        cache_logger_on_first_use=False,
    )


def get(name: str) -> structlog.typing.FilteringBoundLogger:
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(part=name)
    return logger


def debugs() -> bool:
    """Whether the daemon says what only a debugger reads. Who would say it with each request looks first: to make a
    line and throw it away takes a twentieth of a request."""
    return _least <= logging.DEBUG
