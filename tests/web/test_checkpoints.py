"""Checkpoints in a browser: one is made of a job, verified, exported, restored from and removed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests import harness
from tests.criu.test_client_dump import STEPS, criu_or_skip, let_end, start, wait_for_lines
from tests.web.front import Front
from tests.web.look import check_both
from xmigd.demo.node import Node

pytestmark = pytest.mark.criu


@pytest.fixture(scope="module")
def node(native_dir: Path) -> Iterator[Node]:
    with harness.own_node(native_dir, devices="cpu:0,cpu:1", port=-1, criu=criu_or_skip()) as node:
        yield node


def test_from_the_first_to_none(page: Page, node: Node, front: Front, native_dir: Path, tmp_path: Path) -> None:
    page.goto("/checkpoints")
    expect(page.locator(".empty")).to_contain_text("No checkpoints")
    output = tmp_path / "steps"
    program = start(node, native_dir, output, 0.02)
    wait_for_lines(output, STEPS // 4)
    page.goto(f"/jobs/{program.job}")
    page.locator("summary", has_text="Checkpoint policy…").click()
    page.get_by_label("Minutes between").fill("90")
    page.get_by_label("also before a drain").check()
    check_both(page, "a policy")
    page.get_by_role("button", name="Apply").click()
    expect(page.get_by_role("region", name="Checkpoints")).to_contain_text("Every 90 minutes, and before a drain")
    page.locator("summary", has_text="Checkpoint…").click()
    page.get_by_label("ends, to be restored later").check()
    reaping = threading.Thread(target=program.process.wait)
    reaping.start()
    page.get_by_role("button", name="Make a checkpoint").click()
    expect(page.locator(".status")).to_contain_text("succeeded")
    reaping.join(60)

    page.get_by_role("link", name="Checkpoints").click()
    row = page.locator("tbody tr")
    expect(row).to_have_count(1)
    expect(row).to_contain_text("MiB")
    expect(row).to_contain_text("complete")
    check_both(page, "checkpoints")
    row.get_by_role("button", name="Verify").click()
    expect(page.locator(".status")).to_contain_text("succeeded")
    page.goto("/checkpoints")
    expect(row).to_contain_text("whole")
    row.locator("summary", has_text="Export…").click()
    row.get_by_role("button", name="Export").click()
    expect(page.locator("main")).to_contain_text(".xmig")
    page.goto("/checkpoints")
    row.get_by_role("link").first.click()
    check_both(page, "checkpoint")
    page.locator("summary", has_text="Restore…").click()
    page.get_by_label("on").select_option("cpu:1")
    page.get_by_role("button", name="Restore", exact=False).click()
    expect(page.locator(".status")).to_contain_text("succeeded")
    let_end(output)
    wait_for_lines(output, STEPS)

    # Of the job that is over there is its checkpoint, which is removed there.
    page.goto(f"/jobs/{program.job}")
    listed = page.get_by_role("region", name="Checkpoints")
    listed.locator("summary", has_text="Remove…").click()
    listed.get_by_role("button", name="Remove").click()
    expect(page.locator(".note")).to_contain_text("is removed")
    expect(page.locator(".empty")).to_contain_text("No checkpoints")
    assert node.client.get("/v1/checkpoints") == []
