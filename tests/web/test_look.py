"""Every page, light and dark: nothing that axe finds; and how it looks, for docs/screenshots (--screenshots)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal

import pytest
from playwright.sync_api import Browser, expect

from tests.harness import kill_server, wait_until
from tests.web.front import Front, end_calm, start_calm
from tests.web.look import SCHEMES, SCREENSHOTS, check, shoot
from xmigd.demo.node import Node, Program
from xmigd.errors import XmigError

ALSO_DARK = ("overview", "job", "migration")


@pytest.fixture(scope="module")
def lived(node: Node, front: Front) -> Iterator[Program]:
    """A node with a history: two programs, one of which was recovered and moved; a token, a refusal."""
    program = start_calm(node, "resnet50", device="cpu:0", mebibytes=64)
    other = start_calm(node, "gpt2-small", device="cpu:1", mebibytes=48)
    kill_server(program)
    wait_until(lambda: bool(program.recoveries()), "a recovery")
    info = program.until("running")
    wait_until(lambda: bool((program.info() or {}).get("live_bytes")), "a snapshot")
    node.client.post("/v1/migrations", {"process": info["id"], "target": "cpu:1"})
    wait_until(lambda: [m["state"] for m in node.client.get("/v1/migrations")] == ["done"], "a move")
    wait_until(lambda: [o["state"] for o in node.client.get("/v1/operations")] == ["succeeded"], "its operation's end")
    node.client.post("/v1/tokens", {"name": "grafana", "scope": "read"})
    with contextlib.suppress(XmigError):
        node.client.post("/v1/migrations", {"process": info["id"], "target": "cpu:1"})
    yield program
    end_calm(program)
    end_calm(other)


def pages(program: Program) -> dict[str, str]:
    info = program.info()
    assert info is not None
    return {
        "overview": "/", "devices": "/devices", "jobs": "/jobs", "job": f"/jobs/{program.job}",
        "process": f"/processes/{info['id']}", "faults": "/faults", "operations": "/operations", "audit": "/audit",
        "settings": "/settings", "checkpoints": "/checkpoints",
        "migrations": "/migrations", "plan": f"/migrations/new?process={info['id']}",
        "migration": f"/migrations/{program.node.client.get('/v1/migrations')[0]['id']}", "not-found": "/nothing",
        "consolidation": "/consolidation",
    }  # fmt: skip


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_page(
    scheme: Literal["light", "dark"], chromium: Browser, front: Front, lived: Program, request: pytest.FixtureRequest
) -> None:
    keep = request.config.getoption("--screenshots")
    with chromium.new_context(
        base_url=front.address, viewport={"width": 1280, "height": 800}, color_scheme=scheme, reduced_motion="reduce"
    ) as context:
        page = context.new_page()
        for name, path in pages(lived).items():
            page.goto(path)
            check(page, name)
            if keep and name != "not-found" and (scheme == "light" or name in ALSO_DARK):
                shoot(page, SCREENSHOTS / f"{name}{'-dark' if scheme == 'dark' else ''}.webp")


# What stands on each page for whoever has no JavaScript.
READABLE = {
    "overview": "Latest recoveries", "devices": "Utilisation", "jobs": "gpt2-small", "job": "every reply the same",
    "process": "Generation", "faults": "killed by SIGKILL", "operations": "succeeded", "audit": "POST /v1/tokens",
    "settings": "Circuit breaker", "checkpoints": "No checkpoints",
    "migrations": "cpu:1", "plan": "Expected downtime", "migration": "Take over",
    "not-found": "there is no such page",
    "consolidation": "Make a plan",
}  # fmt: skip


def test_every_page_without_javascript(chromium: Browser, front: Front, lived: Program) -> None:
    with chromium.new_context(base_url=front.address, java_script_enabled=False) as context:
        page = context.new_page()
        for name, path in pages(lived).items():
            page.goto(path)
            expect(page.get_by_role("main")).to_contain_text(READABLE[name])
            expect(page.locator("[data-plot]:visible")).to_have_count(0)  # no frames without their charts
            if name in ("job", "process"):
                page.get_by_text("The charts' numbers as a table").click()
                expect(page.locator("#samples tbody tr").first).to_be_visible()


CONTROLS = """() => {
  for (const details of document.querySelectorAll("details")) details.open = true;
  const all = document.querySelectorAll("a[href], button, input, select, summary, [tabindex='0']");
  const controls = [...all].filter((each) => each.checkVisibility() && !each.disabled
    && each.type !== "hidden" && !(each.type === "radio" && !each.checked));
  window.missing = new Set(controls);
  document.addEventListener("focusin", (event) => missing.delete(event.target));
  document.activeElement.blur();
  return controls.length;
}"""


def test_the_keyboard_reaches_every_control(chromium: Browser, front: Front, lived: Program) -> None:
    with chromium.new_context(base_url=front.address) as context:
        context.route("**/live?*", lambda route: route.abort())  # a page that stays as it is
        page = context.new_page()
        for name, path in pages(lived).items():
            page.goto(path)
            for _ in range(page.evaluate(CONTROLS) + 2):
                page.keyboard.press("Tab")
            assert page.evaluate("[...missing].map((each) => each.outerHTML)") == [], name


# Cells with as many lines as words, of which there are several.
STACKED = """() => [...document.querySelectorAll("main :is(th, td, dt, dd, h1, h2, label > span)")].filter((each) => {
  const words = each.innerText.trim().split(/\\s+/).length;
  const range = document.createRange();
  range.selectNodeContents(each);
  const tops = [...range.getClientRects()].filter((at) => at.width > 1).map((at) => at.bottom).sort((a, b) => a - b);
  const lines = tops.filter((top, i) => i === 0 || top - tops[i - 1] > 8).length;
  return each.checkVisibility() && words > 1 && lines >= words;
}).map((each) => each.innerText)"""


def test_every_page_on_a_telephone(chromium: Browser, front: Front, lived: Program) -> None:
    with chromium.new_context(base_url=front.address, viewport={"width": 375, "height": 800}) as context:
        page = context.new_page()
        for name, path in pages(lived).items():
            page.goto(path)
            assert page.evaluate("document.documentElement.scrollWidth") <= 375, name
            assert page.evaluate(STACKED) == [], f"{name}: one word a line"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_empty_node_and_the_login(scheme: Literal["light", "dark"], chromium: Browser, empty: Front) -> None:
    with chromium.new_context(base_url=empty.address, color_scheme=scheme) as context:
        page = context.new_page()
        page.goto("/")
        expect(page.get_by_label("Token")).to_be_focused()
        check(page, "login")


@pytest.fixture
def empty(node: Node) -> Iterator[Front]:
    with Front(node, local=0) as front:
        yield front
