"""Decisions have one form, so that a reader finds at a glance what holds and since when: number and title, status,
date, then sections in one order."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path

import pytest

from tests.docs.pages import DOCS

DECISIONS = sorted((DOCS / "decisions").glob("*.md"))
SECTIONS = ["Context", "Decision", "Alternatives", "Measurement", "Tests", "Consequence"]
# The second form of status is for a decision of which a part still holds.
HEAD = re.compile(
    r"# (?P<number>\d{4}): \S.*\n\n"
    r"Status: (?:accepted|(?:accepted, .+ )?superseded by \[(?P<by>\d{4})\]\((?P<link>[\w.-]+)\))\n\n"
    r"Date: (?P<date>\d{4}-\d{2}-\d{2})\n\n"
)


def test_numbers_have_no_gap_and_none_twice() -> None:
    assert [path.name[:5] for path in DECISIONS] == [f"{number:04}-" for number in range(1, len(DECISIONS) + 1)]


@pytest.mark.parametrize("path", DECISIONS, ids=lambda path: path.stem)
def test_a_decision_has_number_status_and_date(path: Path) -> None:
    head = HEAD.match(path.read_text())
    assert head, "begins with number and title, status, date: see any other decision"
    assert head["number"] == path.name[:4]
    date.fromisoformat(head["date"])
    if head["by"]:
        assert head["by"] > head["number"], "a later decision supersedes an earlier one"
        assert head["link"].startswith(f"{head['by']}-")
        assert path.with_name(head["link"]) in DECISIONS


@pytest.mark.parametrize("path", DECISIONS, ids=lambda path: path.stem)
def test_a_decision_has_its_sections_in_order(path: Path) -> None:
    titles = re.findall(r"^##? (.+)$", path.read_text(), re.M)[1:]
    assert titles[:2] == ["Context", "Decision"]
    assert titles == [title for title in SECTIONS if title in titles]
