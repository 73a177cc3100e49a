"""The fleet in a browser: nodes that answer, one that is gone, and a plan over them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.peers.nodes import PeerNode, acquainted
from tests.web.front import end_calm, start_calm
from tests.web.look import check_both


@pytest.fixture(scope="module")
def nodes(native_dir: Path) -> Iterator[list[PeerNode]]:
    with ExitStack() as stack:
        made = []
        for name in ("one", "two"):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="xmig-")))
            node = PeerNode(folder, name, native_dir, fleet_readers="*", device_memory=1 << 28)
            made.append(stack.enter_context(node))
        acquainted(*made)
        yield made


@pytest.fixture(scope="module")
def node(nodes: list[PeerNode]) -> PeerNode:
    """The dashboard is in front of the first."""
    return nodes[0]


def test_fleet(page: Page, nodes: list[PeerNode]) -> None:
    _, two = nodes
    program = start_calm(two, "far-away", device="cpu:1")
    page.goto("/fleet")
    expect(page.locator("#node-two")).to_contain_text("answered")
    jobs = page.get_by_role("group", name="Jobs")
    expect(jobs.get_by_role("row").filter(has_text="far-away")).to_contain_text("cpu:1")
    check_both(page, "fleet")
    page.get_by_role("button", name="Make a plan").click()
    expect(page.locator("#main")).to_contain_text("Devices freed")
    check_both(page, "fleet-plan")
    end_calm(program)
    two.stop()
    page.goto("/fleet")
    expect(page.locator("#node-two")).to_contain_text("unreachable")
    expect(page.locator("#node-two")).to_contain_text("ago")
    two.start()
    two.until("one", "connected")
    expect(page.locator("#node-two")).to_contain_text("answered")  # the page renews itself
