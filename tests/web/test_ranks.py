"""A job of several ranks on its page: who waits for whom, in a table and in a chart with a lane for each rank."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.harness import own_node, wait_until
from tests.web.front import Front
from tests.web.look import check_both
from xmigd.demo.node import Node, Program
from xmigd.web.lanes import LONGEST, lanes

PROGRAMS = Path(__file__).parents[1] / "collectives" / "programs"
RANKS = 4


@pytest.fixture(scope="module")
def training(node: Node, front: Front, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    """One that is recovered, and goes on until the tests are over."""
    folder = tmp_path_factory.mktemp("ranks")
    command: list[str | Path] = [sys.executable, PROGRAMS / "launch.py", str(RANKS), folder, PROGRAMS / "steps.py"]
    program = node.program([*command, "0"], name="four-ranks")
    path = f"/v1/jobs/{program.job}/ranks"
    wait_until(lambda: any(one["outcome"] == "taken" for one in node.client.get(path)["snapshots"]), "a snapshot")
    victim = node.client.get(path)["ranks"][1]["process_id"]
    os.kill(node.client.get(f"/v1/processes/{victim}")["server_pid"], signal.SIGKILL)

    def outcomes() -> list[str]:
        return [one["outcome"] for one in node.client.get(path)["recoveries"]]

    wait_until(lambda: outcomes() == ["resumed"], "a recovery")
    yield program
    node.client.delete(f"/v1/jobs/{program.job}")
    program.process.wait(60)


def test_a_lane_for_each_rank(page: Page, training: Program) -> None:
    page.goto(f"/jobs/{training.job}")
    section = page.get_by_role("region", name="Ranks", exact=True)
    expect(section.locator("[id^=rank-]")).to_have_count(RANKS)
    expect(section.locator(".lane svg")).to_have_count(RANKS)
    expect(section.locator(".lane svg").first).to_have_attribute("aria-label", re.compile("rank 0: .* 1 recoveries"))
    expect(section.locator(".lane .recovery title").first).to_contain_text("its server was lost")
    waited = section.locator(".lane .snapshot title").filter(has_text=re.compile("waited for rank [0-3]"))
    expect(waited.first).to_be_attached()
    row = section.get_by_role("row").filter(has_text="SIGKILL")
    expect(row.get_by_role("cell").nth(1)).to_have_text("1")
    section.get_by_text("Snapshots of all ranks, and communicators").click()
    expect(section.get_by_role("group", name="Communicators").get_by_role("row").nth(1)).to_contain_text("whole")


def test_a_rank_that_differs_from_its_replicas(chromium: Browser, native_dir: Path, tmp_path: Path) -> None:
    with (
        own_node(native_dir, devices="cpu:0,cpu:1,cpu:2", replica_check=0.01, snapshot_cost=0.5) as node,
        Front(node) as front,
        chromium.new_context(base_url=front.address) as context,
    ):
        command: list[str | Path] = [sys.executable, PROGRAMS / "launch.py", "3", tmp_path, PROGRAMS / "equal.py", "0"]
        program = node.program(command, name="three-ranks")
        path = f"/v1/jobs/{program.job}/ranks"
        wait_until(lambda: (node.client.get(path)["comparison"] or {"watched": 0})["watched"] >= 8, "they are compared")
        victim = next(one for one in node.client.get(path)["ranks"] if one["rank"] == 1)
        address = int((tmp_path / "memory.1").read_text().split()[0])
        fault = {"kind": "flip", "process": victim["process_id"], "address": address + (2 << 20) - 8}
        node.client.post(f"/v1/jobs/{program.job}/faults:inject", fault)
        wait_until(lambda: node.client.get(path)["differences"], "it is found")
        page = context.new_page()
        page.goto(f"/jobs/{program.job}")
        row = page.get_by_role("group", name="Silent corruption").get_by_role("row").nth(1)
        expect(row.get_by_role("cell").nth(1)).to_have_text("1")
        expect(row.get_by_role("cell").nth(2)).to_have_text(f"{address:#x}")
        expect(row.get_by_role("cell").nth(4)).to_have_text("0, 2")
        node.client.delete(f"/v1/jobs/{program.job}")
        program.process.wait(60)


def test_how_it_looks(page: Page, training: Program) -> None:
    page.route("**/live?*", lambda route: route.abort())
    page.goto(f"/jobs/{training.job}")
    expect(page.locator(".lane svg")).to_have_count(RANKS)
    check_both(page, "a job of several ranks")


def test_on_a_telephone(chromium: Browser, front: Front, training: Program) -> None:
    with chromium.new_context(base_url=front.address, viewport={"width": 375, "height": 800}) as context:
        page = context.new_page()
        page.goto(f"/jobs/{training.job}")
        expect(page.locator(".lane svg")).to_have_count(RANKS)
        assert page.evaluate("document.documentElement.scrollWidth") <= 375


def test_what_is_drawn() -> None:
    def span(at: float, ms: float | None, activity: str) -> dict[str, object]:
        return {"at": at, "ms": ms, "activity": activity, "waited_for": None}

    rank = {"rank": 3, "process_id": "p", "activity": "running", "timeline": [
        span(0.0, 10_000, "running"), span(10.0, 500, "taking"), span(10.5, 99_500, "running"),
        span(110.0, 0.1, "restoring"), span(110.0, None, "running"),
    ]}  # fmt: skip
    drawn = lanes([rank], 140.0)
    assert drawn is not None
    assert (drawn.seconds, drawn.ended) == (LONGEST, False)
    (part,) = drawn.lanes[0].parts
    assert (part.look, part.x, part.width) == ("recovery", 500.0, 2.5)
    assert lanes([rank | {"activity": "ended", "timeline": [span(0.0, None, "ended")]}], 1.0) is None
