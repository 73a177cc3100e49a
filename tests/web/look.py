"""How a page looks: nothing that axe finds, in light and in dark; and what is kept of it in docs/screenshots."""

from __future__ import annotations

from base64 import b64decode
from pathlib import Path
from typing import Literal

from axe_playwright_python.base import AxeResults
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from tests.harness import ROOT

SCREENSHOTS = ROOT / "docs" / "screenshots"
AXE = Axe()
RUN = "axe.run({resultTypes: ['violations']})"
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
MOST = 80_000  # bytes of a screenshot


def check(page: Page, name: str) -> None:
    """In the colours that it has now."""
    if page.evaluate("typeof axe") == "undefined":  # to read it takes half as long as to run it
        page.evaluate(AXE.axe_script)
    found = AxeResults(page.evaluate(RUN))
    assert found.violations_count == 0, f"{name}: {found.generate_report()}"


def check_both(page: Page, name: str) -> None:
    for scheme in SCHEMES:
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        check(page, f"{name}, {scheme}")


# The folder of whoever makes the screenshots is nobody else's.
NEUTRAL = """folder => {
  const texts = document.createTreeWalker(document.getElementById("live"), NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) texts.currentNode.data = texts.currentNode.data.replaceAll(folder, "/opt/xmig");
}"""


def shoot(page: Page, file: Path) -> None:
    file.parent.mkdir(exist_ok=True)
    page.evaluate(NEUTRAL, str(ROOT))
    if page.locator(".canvas").count():
        expect(page.locator(".canvas canvas").first).to_be_visible()
    # A third of what the same is as PNG.
    session = page.context.new_cdp_session(page)
    file.write_bytes(b64decode(session.send("Page.captureScreenshot", {"format": "webp", "quality": 85})["data"]))
    session.detach()
    assert file.stat().st_size < MOST, file
