"""Entry of the daemon: `xmigd [--config FILE]`."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import sys


def be_lean() -> None:
    """Before anything large is imported: the daemon stays small for as long as the node is up, and starts fast."""
    # What is imported stays. Looking through it again and again while it grows is a tenth of the start; serve() ends
    # that.
    gc.disable()
    # structlog's renderer would load it (6 MB), for tracebacks in colour.
    sys.modules.setdefault("rich", None)  # type: ignore[arg-type]
    # One heap for all threads, not one for each: what they free is used again. M_ARENA_MAX of malloc.h; musl has none.
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).mallopt(-8, 1)


def be_prompt() -> None:
    """Python lets a thread go on for 5 ms when another wants to run. The loop that repairs programs wants to after each
    message that it sends, and what the database's thread does takes long enough to be in its way."""
    sys.setswitchinterval(0.0005)


def main() -> None:
    be_lean()
    be_prompt()
    from xmigd import log
    from xmigd.configuration import from_command_line, run
    from xmigd.settings import Settings

    settings = from_command_line(Settings, "xMIG's node daemon")
    log.configure(settings.log_level, json=settings.log_json)
    from sqlalchemy.exc import DatabaseError

    from xmigd.daemon import serve
    from xmigd.database.damage import unusable

    def work() -> None:
        try:
            asyncio.run(serve(settings))
        except DatabaseError as error:
            raise unusable(settings.database, error) from None

    run(Settings.program, work)


if __name__ == "__main__":
    main()
