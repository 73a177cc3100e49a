"""README.md and README.zh-CN.md say the same: commands, outputs, figures and links. The Chinese one is no translation
word for word, so the sentences are not compared."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.harness import ROOT

ENGLISH = (ROOT / "README.md").read_text()
CHINESE = (ROOT / "README.zh-CN.md").read_text()


def outputs(text: str) -> list[str]:
    return [block for language, block in _blocks(text) if not language]


def commands(text: str) -> list[str]:
    return [
        re.sub(r"\s*#.*", "", line)
        for language, block in _blocks(text)
        if language == "sh"
        for line in block.splitlines()
    ]


def links(text: str) -> list[str]:
    return re.findall(r"\]\(((?!#|README)[^)]+)\)", text)


def figures_in_tables(text: str) -> list[list[str]]:
    """Of the rows below the titles, whose first cell says what they are of."""
    return [re.findall(r"\d+(?:\.\d+)?", row) for row in re.findall(r"^\|(?! \|).*\|$", text, re.M)]


def code_in_prose(text: str) -> list[str]:
    return sorted(re.findall(r"`[^`\n]+`", text))


@pytest.mark.parametrize("part", [outputs, commands, links, figures_in_tables, code_in_prose])
def test_both_languages_have_the_same(part: Callable[[str], list[object]]) -> None:
    english = part(ENGLISH)
    assert english, "found nothing to compare"
    assert part(CHINESE) == english


def _blocks(text: str) -> list[tuple[str, str]]:
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S)
