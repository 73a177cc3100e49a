"""Words of strangers, made harmless for a terminal, a page and a log: one line, and nothing in it that is not seen."""

from __future__ import annotations

LONGEST = 1000  # characters of a line


def harmless(text: str, longest: int = LONGEST) -> str:
    """What a terminal acts upon and what a reader cannot see is written out, as \\x1b: control characters (C0, C1),
    escape sequences, overrides of the writing direction. What is too long ends with an ellipsis."""
    shown = "".join(c if c.isprintable() else _escaped(c) for c in text[: longest + 1])
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"


def _escaped(character: str) -> str:
    number = ord(character)
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
