"""Packing running jobs in a browser: a plan with before and after, its application, and a plan that is stale."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from tests.harness import wait_until
from tests.web.front import Front, end_calm, start_calm
from tests.web.look import check_both
from xmigd.demo.node import Node, Program


@pytest.fixture(scope="module")
def trainings(node: Node, front: Front) -> Iterator[list[Program]]:
    """One on each device. At their ends everything that they computed was exact."""
    programs = [start_calm(node, f"training-{number}", device=f"cpu:{number}") for number in range(2)]
    wait_until(lambda: all((each.info() or {}).get("live_bytes") for each in programs), "snapshots")
    yield programs
    for program in programs:
        end_calm(program)


def devices_of(programs: list[Program]) -> set[str]:
    return {str((program.info() or {})["device"]) for program in programs}


def make_plan(page: Page) -> None:
    page.goto("/consolidation")
    page.get_by_label("Unknown busy shares").fill("0")
    page.get_by_label("Slow-down at most").fill("50")
    page.get_by_role("button", name="Make a plan").click()
    expect(page.get_by_role("heading", name="Packing")).to_be_visible()


def test_a_plan_is_applied(page: Page, trainings: list[Program]) -> None:
    page.goto("/consolidation")
    expect(page.locator(".empty")).to_contain_text("Nothing has been packed yet")
    check_both(page, "consolidation")
    make_plan(page)
    stale = page.url
    make_plan(page)
    expect(page.locator("#main")).to_contain_text(re.compile(r"Devices freed\s*cpu:[01]"))
    expect(page.get_by_role("row").filter(has_text="free").first).to_contain_text("leaves")
    expect(page.get_by_role("row").filter(has_text="comes")).to_have_count(1)
    check_both(page, "consolidation-plan")
    page.get_by_label("Watch the jobs for").fill("1")
    page.get_by_role("button", name="Apply").click()
    expect(page.locator(".status")).to_contain_text("succeeded")
    expect(page.locator(".status")).to_contain_text("1 moved")
    expect(page.locator("#main")).to_contain_text("1 of 1 moves are over")
    expect(page.get_by_role("heading", name="Watched for")).to_be_visible()
    check_both(page, "consolidation-progress")
    assert len(devices_of(trainings)) == 1

    page.goto(stale)
    page.get_by_role("button", name="Apply").click()
    expect(page.locator(".problem")).to_contain_text("the node has changed since the plan was made")
    page.goto("/consolidation")
    expect(page.get_by_role("row").filter(has_text="succeeded")).to_have_count(1)
    page.get_by_label("Slow-down at most").fill("much")
    page.get_by_role("button", name="Make a plan").click()
    expect(page.locator(".problem")).to_contain_text("is a number")
