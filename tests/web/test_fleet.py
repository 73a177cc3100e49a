"""The fleet in a browser: nodes that answer, one that is gone, a plan over them, and a fleet of several pages."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.fleet.standins import reading
from tests.harness import wait_until
from tests.peers.nodes import PeerNode, acquainted
from tests.web.front import Front, end_calm, start_calm
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


def test_a_fleet_of_many(chromium: Browser, native_dir: Path) -> None:
    """200 nodes: pages that come as soon as others do, and what is looked for."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="xmig-")))
        reader, standins = stack.enter_context(reading(folder, native_dir, 200))
        wait_until(
            lambda: reader.client.get("/v1/fleet")["totals"]["states"] == {"answered": 201}, "all answer"
        )  # fmt: skip
        front = stack.enter_context(Front(reader))
        window = {"width": 1280, "height": 800}
        page = stack.enter_context(chromium.new_context(base_url=front.address, viewport=window)).new_page()  # type: ignore[arg-type]
        began = time.monotonic()
        page.goto("/fleet")
        assert time.monotonic() - began < 20
        rows = page.get_by_role("group", name="Nodes").locator("tbody tr")
        expect(page.locator("#totals")).to_contain_text(re.compile(r"201 nodes: 201 answered\. 1\s602 devices"))
        expect(rows).to_have_count(25)
        check_both(page, "fleet of many")
        page.get_by_role("link", name="Next").click()
        expect(page.locator("#node-node-0024")).to_contain_text("answered")
        expect(page.locator("#node-node-0023")).to_have_count(0)
        page.get_by_role("link", name="Previous").click()
        expect(page.locator("#node-a-reader")).to_contain_text("this node")
        standins.answer(["node-0150"], "hang")
        page.get_by_label("Name").fill("015")
        page.get_by_role("button", name="Show").click()
        expect(rows).to_have_count(11)  # the fifteenth, too
        expect(page.locator("#node-node-0150")).to_contain_text("silent")  # the page renews itself
        expect(page.locator("#node-node-0150")).to_contain_text("since")
        expect(page.locator("#node-node-0151")).to_contain_text("now")
        page.get_by_label("State").select_option("silent")
        page.get_by_role("button", name="Show").click()
        expect(rows).to_have_count(1)
