from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests import harness
from tests.web.front import PATIENCE, Front
from xmigd.demo.node import Node

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome-stable"))), None)
ARGUMENTS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run",
]  # fmt: skip
expect.set_options(timeout=PATIENCE * 1000)


@pytest.fixture(scope="module")
def node(native_dir: Path) -> Iterator[Node]:
    with harness.own_node(native_dir, profile_every=64) as node:
        yield node


@pytest.fixture(scope="module")
def front(node: Node) -> Iterator[Front]:
    with Front(node) as front:
        yield front


# Not for the session: while Playwright runs, nothing else in this process can have an event loop.
@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("there is no chromium here (packaging/setup/browser.sh)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=ARGUMENTS, env=dict(os.environ), timeout=PATIENCE * 1000
        )
        yield browser
        browser.close()


@pytest.fixture
def page(chromium: Browser, front: Front) -> Iterator[Page]:
    """A window of its own, at the dashboard. Nothing may go wrong in it unseen."""
    with chromium.new_context(base_url=front.address, viewport={"width": 1280, "height": 800}) as context:
        context.set_default_timeout(PATIENCE * 1000)
        page = context.new_page()
        reported: list[str] = []
        page.on(
            "console", lambda message: reported.append(message.text) if "Content Security" in message.text else None
        )
        page.on("pageerror", lambda error: reported.append(str(error)))
        yield page
        assert reported == []
