"""Templates, and how numbers and times are written. What is not known is a dash, never a zero."""

from __future__ import annotations

import hashlib
import time
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from xmigd import __version__
from xmigd.errors import StartError
from xmigd.text import harmless
from xmigd.users import requestor_name
from xmigd.web.glossary import WORDS
from xmigd.words import duration, exit_text, milliseconds

DASH = "–"


def folder() -> Path:
    """The folder `web`: in the source tree beside the package, installed inside of it (as `web_files`: there is a
    package of this name)."""
    package = Path(__file__).resolve().parent.parent
    for found in (package / "web_files", package.parent / "web"):
        if (found / "templates" / "base.html").exists():
            return found
    raise StartError("the dashboard's templates are missing", hint="install xmigd again")


def make_templates(*, users_are_ours: bool) -> Environment:
    """`users_are_ours`: xmigd runs on this machine, whose names of users are its own."""
    root = folder()
    templates = Environment(
        loader=FileSystemLoader(root / "templates"), autoescape=select_autoescape(default=True),
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_seen,
    )  # fmt: skip

    @cache
    def static(name: str) -> str:
        """The address of a file, which changes with its content: browsers may keep it for ever."""
        digest = hashlib.sha256((root / "static" / name).read_bytes()).hexdigest()[:12]
        return f"/static/{name}?{digest}"

    templates.globals |= {"static": static, "version": __version__, "address": address, "words_of_ours": WORDS}
    templates.filters |= {
        "bytes": bytes_text, "count": count_text, "ms": ms_text, "rate": rate_text, "clock": clock_text,
        "iso": iso_text, "duration": duration_text, "share": share, "percent": percent_text, "words": words,
        "number": number_text,
        "exit": exit_text, "requestor": requestor_name if users_are_ours else str,
    }  # fmt: skip
    return templates


def _seen(value: Any) -> Any:
    """Whatever a template writes: what a browser acts upon and a reader does not see is written out. Not what is
    finished (markup of ours)."""
    return harmless(value, None) if type(value) is str else value


def address(path: str, query: dict[str, str], **change: str) -> str:
    """The page with this query, but for what changes."""
    requested = urlencode({name: value for name, value in (query | change).items() if value})
    return f"{path}?{requested}" if requested else path


def bytes_text(value: float | None) -> str:
    if value is None:
        return DASH
    size = float(value)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"


def rate_text(value: float | None) -> str:
    return DASH if value is None else f"{bytes_text(value)}/s"


def count_text(value: float | None) -> str:
    """1234567 → 1 234 567, with narrow spaces that do not break."""
    return DASH if value is None else Markup(f"{value:,.0f}".replace(",", "\N{NARROW NO-BREAK SPACE}"))


def number_text(value: float) -> str:
    """As a person would put it into a form."""
    return str(int(value)) if value == int(value) else str(value)


def ms_text(value: float | None) -> str:
    return DASH if value is None else milliseconds(value)


def duration_text(seconds: float | None) -> str:
    return DASH if seconds is None else duration(seconds)


def percent_text(share: float | None) -> str:
    if share is None:
        return DASH
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.2f} %"


def clock_text(at: float | None) -> str:
    """Today's times without their date."""
    if at is None:
        return DASH
    local = time.localtime(at)
    today = time.strftime("%Y-%m-%d", local) == time.strftime("%Y-%m-%d")
    return time.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M:%S", local)


def iso_text(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")


def share(part: float | None, whole: float | None) -> float | None:
    """Percent, between 0 and 100."""
    if part is None or not whole:
        return None
    return round(min(max(100 * part / whole, 0), 100), 1)


def words(code: Any) -> str:
    """no_such_device → no such device"""
    return str(code).replace("_", " ").replace(".", " ")
