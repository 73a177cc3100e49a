"""Moving jobs between devices in a browser: with what is known before, while it goes on, and when it is given up."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.harness import stop, wait_until
from tests.web.front import Front, end_calm, start_calm
from xmigd.demo.node import Node, Program


@pytest.fixture(scope="module")
def training(node: Node, front: Front) -> Iterator[Program]:
    """At its end everything that it computed was exact."""
    program = start_calm(node, "training", device="cpu:0", mebibytes=64)
    wait_until(lambda: bool(process_of(program)["live_bytes"]), "a snapshot with its memory")
    yield program
    end_calm(program)


def process_of(program: Program) -> dict[str, object]:
    info = program.info()
    assert info is not None
    return info


def test_migrate_with_progress(page: Page, training: Program) -> None:
    page.goto("/migrations")
    expect(page.locator(".empty")).to_contain_text("Nothing has been moved yet")
    page.get_by_role("button", name="Look at the targets").click()
    refused = page.get_by_role("row").filter(has_text="cpu:0")
    expect(refused).to_contain_text("refused")
    expect(refused).to_contain_text("the process is on cpu:0")
    page.get_by_label("cpu:1").check()
    page.get_by_role("button", name="Migrate").click()
    expect(page.locator(".status")).to_contain_text("The job is running on cpu:1")
    expect(page.locator(".status")).to_contain_text("done")
    expect(page.locator(".stepper li").first).to_contain_text("Prepare the target")
    expect(page.locator(".stepper .done")).to_have_count(4)
    expect(page.locator("#rounds tbody tr").last).to_contain_text("MiB")
    expect(page.locator("#plot-rounds canvas")).to_be_visible()
    expect(page.get_by_role("region", name="Downtime")).to_contain_text(re.compile(r"[0-9.]+ (ms|s)"))
    assert process_of(training)["device"] == "cpu:1"
    page.get_by_role("link", name="Migrations").first.click()
    expect(page.get_by_role("row").nth(1)).to_contain_text("done")


def test_a_migration_is_cancelled(page: Page, training: Program) -> None:
    wait_until(lambda: process_of(training)["standby"] == "warm", "a standby")
    info = training.until("running")
    page.goto(f"/migrations/new?process={info['id']}")
    server = int(info["server_pid"])
    stop(server)  # it hands over nothing: the migration can be cancelled for as long as we like
    try:
        page.get_by_role("button", name="Migrate").click()
        expect(page.locator(".stepper .current")).to_be_visible()
        page.get_by_role("button", name="Cancel").click()
        expect(page.locator(".note")).to_contain_text("it is being cancelled")
    finally:
        os.kill(server, signal.SIGCONT)
    expect(page.locator(".status")).to_contain_text("cancelled")
    expect(page.locator(".status")).to_contain_text(f"The job is running on {info['device']}")
    assert training.until("running")["server_pid"] == info["server_pid"]


def reach(page: Page, control: Locator) -> None:
    """Go there with the keyboard."""
    for _ in range(100):
        if control.evaluate("control => control === document.activeElement"):
            return
        page.keyboard.press("Tab")
    raise AssertionError(f"the keyboard does not reach {control}")


def test_migrate_suspend_and_resume_with_the_keyboard_only(page: Page, training: Program) -> None:
    info = training.until("running")
    page.goto(f"/processes/{info['id']}")
    reach(page, page.get_by_role("link", name="Migrate…"))
    page.keyboard.press("Enter")
    reach(page, page.get_by_role("radio").first)
    page.keyboard.press("Space")
    reach(page, page.get_by_role("button", name="Migrate"))
    page.keyboard.press("Enter")
    expect(page.locator(".status")).to_contain_text("done")
    assert training.until("running")["device"] != info["device"]
    page.goto(f"/processes/{info['id']}")
    reach(page, page.locator("summary", has_text="Suspend…"))
    page.keyboard.press("Enter")
    reach(page, page.get_by_role("radio", name="host memory"))
    reach(page, page.get_by_role("button", name="Suspend", exact=True))
    page.keyboard.press("Enter")
    expect(page.locator(".status")).to_contain_text("its memory is in host memory")
    page.goto(f"/processes/{info['id']}")
    reach(page, page.get_by_role("button", name="Resume"))
    page.keyboard.press("Enter")
    expect(page.locator(".status")).to_contain_text("The job is running on")
    training.until("running")


def test_what_cannot_be_says_why(page: Page, training: Program, node: Node) -> None:
    info = training.until("running")
    elsewhere = "cpu:0" if info["device"] == "cpu:1" else "cpu:1"
    page.goto(f"/migrations/new?process={info['id']}")
    expect(page.get_by_label(elsewhere)).to_be_checked()
    page.get_by_label("Downtime at most").fill("0")
    page.get_by_role("button", name="Migrate").click()
    refusal = page.locator("#notes").get_by_role("alert")
    expect(refusal).to_contain_text("max_downtime_ms")
    # Nothing began, and the page is where it was.
    expect(page.get_by_role("button", name="Migrate")).to_be_visible()
    assert training.until("running")["device"] == info["device"]


def test_drain_a_device(page: Page, training: Program) -> None:
    info = training.until("running")
    device = str(info["device"])
    page.goto("/devices")
    tile = page.locator(".tile").filter(has=page.get_by_role("heading", name=device))
    tile.get_by_text("Drain…").click()
    tile.locator("[id^=drain]").get_by_label("Why").fill("new fan")
    tile.get_by_role("button", name=f"Drain {device}").click()
    expect(page.locator(".status")).to_contain_text("succeeded")
    assert training.until("running")["device"] != device
    page.get_by_role("link", name="Devices").click()
    expect(tile).to_contain_text("No program runs here")
    expect(tile).to_contain_text("cordoned")
    tile.get_by_role("button", name="Uncordon").click()
    expect(tile.locator(".state").first).to_have_text("ready")


def test_suspend_and_resume(page: Page, training: Program) -> None:
    info = training.until("running")
    page.goto(f"/processes/{info['id']}")
    page.get_by_text("Suspend…").click()
    page.get_by_role("button", name="Suspend", exact=True).click()
    expect(page.locator(".status")).to_contain_text("its memory is in host memory")
    page.get_by_role("link", name=str(info["id"])[:12]).click()
    expect(page.locator(".status")).to_contain_text("suspended")
    page.get_by_role("button", name="Resume").click()
    expect(page.locator(".status")).to_contain_text("The job is running on")
    assert training.until("running")["device"] == info["device"]
