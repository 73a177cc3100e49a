"""Words of strangers, made harmless for a terminal, a page and a log: one line, and nothing in it that is not seen.

Names are refused that have a character that people do not see (INVISIBLE); whatever is shown goes through `harmless`.
"""

from __future__ import annotations

import json
import re
from typing import Any

LONGEST = 1000  # characters of a line
# What terminals and browsers act upon and readers do not see, for a regular expression of Python, Rust and JavaScript:
# control characters (C0, C1), the soft hyphen, marks and overrides of the writing direction, separators of lines and
# paragraphs, characters of no width.
INVISIBLE = r"\u0000-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
VISIBLE = f"^[^{INVISIBLE}]*$"  # a name


def harmless(text: str, longest: int | None = LONGEST) -> str:
    """What a terminal acts upon and what a reader cannot see is written out, as \\x1b: control characters (C0, C1),
    escape sequences, overrides of the writing direction. What is too long ends with an ellipsis."""
    if text.isprintable() and (longest is None or len(text) <= longest):
        return text
    shown = "".join(c if c.isprintable() else _escaped(c) for c in (text if longest is None else text[: longest + 1]))
    return shown if longest is None or len(shown) <= longest else shown[: longest - 1] + "…"


def harmless_json(value: Any, indent: int | None = None) -> str:
    """JSON that a terminal can be shown: the same value, what is not seen written as \\u202e. Lines are our own."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    return "".join(c if c == "\n" or c.isprintable() else json.dumps(c)[1:-1] for c in text)


def first_invisible(text: str) -> str | None:
    """Of the characters that a name may not have, how people call it: U+202E."""
    found = re.search(f"[{INVISIBLE}]", text)
    return f"U+{ord(found[0]):04X}" if found else None


def _escaped(character: str) -> str:
    number = ord(character)
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
