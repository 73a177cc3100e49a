"""A job's profile on its page, in a browser: charts of its steps, and a table of its operations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests import harness
from tests.profiling.conftest import PROGRAMS, kernels
from tests.profiling.test_profiles import has_charted_steps
from tests.web.look import check_both
from xmigd.demo.node import Node, Program

__all__ = ["kernels"]


@pytest.fixture
def program(node: Node, kernels: Path) -> Iterator[Program]:
    program = harness.start(node, PROGRAMS / "steps.py", kernels=kernels)
    harness.go(program)
    harness.wait_until(lambda: has_charted_steps(program), "steps in its series")
    yield program
    assert "steps True" in harness.output(program)


def test_steps_and_operations(page: Page, program: Program) -> None:
    page.goto(f"/jobs/{program.job}")
    for chart in ("step", "idle"):
        expect(page.locator(f"#plot-{chart} canvas")).to_be_visible()
    operations = page.locator("section[aria-labelledby=h-profile]")
    expect(operations.get_by_role("row").filter(has_text="mix")).to_have_count(3)
    expect(operations).to_contain_text("copy host to device")
    expect(operations.get_by_role("row").filter(has_text="8,1,1 × 32,1,1")).to_contain_text("≈")
    expect(page.locator("#main")).to_contain_text("A step takes")
    check_both(page, "job-profile")
