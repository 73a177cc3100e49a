"""A long history in a browser: 10,000 migrations, of which a page shows those that are requested."""

from __future__ import annotations

import itertools
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.bench import history
from tests.forked import Node
from tests.web.look import check_both

RECORDS = 10_000
LISTED = 50


@pytest.fixture(scope="module")
def node(native_dir: Path) -> Iterator[Node]:
    with (
        tempfile.TemporaryDirectory(prefix="xmig-") as folder,
        Node(Path(folder), native_dir=native_dir, history_records=2 * RECORDS) as node,
    ):
        node.stop()
        history.write(node.folder / "xmig.db", RECORDS)
        with sqlite3.connect(node.folder / "xmig.db") as database:
            database.execute("UPDATE migrations SET downtime_ms = number * 7919 % 9973, processed_bytes = number << 20")
            database.execute("UPDATE migrations SET downtime_ms = NULL, state = 'failed' WHERE number % 100 = 0")
            database.execute("UPDATE migrations SET kind = 'suspend', target = 'host' WHERE number % 1000 = 1")
        database.close()
        node.start()
        yield node


def ids(page: Page) -> list[str]:
    """Of the migrations that are listed, from top to bottom."""
    rows: list[str] = page.eval_on_selector_all("tbody tr", "all => all.map(each => each.id)")
    return [row.removeprefix("migration-") for row in rows]


def column(page: Page, name: str) -> list[str]:
    """Its cells' texts, from top to bottom."""
    heads = [text.split()[0] for text in page.locator("thead th").all_inner_texts()]
    return page.locator(f"tbody td:nth-child({heads.index(name) + 1})").all_inner_texts()


def follow(page: Page, link: str) -> None:
    """Click it, and wait for the page that it leads to."""
    with page.expect_navigation():
        page.get_by_role("link", name=link, exact=True).click()


def test_page_by_page(page: Page) -> None:
    page.goto("/migrations")
    check_both(page, "a long list")
    seen = ids(page)
    for _ in range(5):
        follow(page, "Older")
        seen += ids(page)
    # 10,000 rows have numbers from 1 on; the newest comes first, and none twice or left out.
    assert seen == [f"{number:032x}" for number in range(RECORDS - 1, RECORDS - 1 - 6 * LISTED, -1)]
    follow(page, "Newest")
    assert ids(page) == seen[:LISTED]
    follow(page, "Began")  # again: the other way round
    assert ids(page) == [f"{number:032x}" for number in range(LISTED)]
    follow(page, "Next")
    assert ids(page) == [f"{number:032x}" for number in range(LISTED, 2 * LISTED)]


def test_sorted(page: Page, node: Node) -> None:
    page.goto("/migrations")
    follow(page, "Downtime")
    check_both(page, "sorted")
    expect(page.get_by_role("columnheader", name="Downtime")).to_have_attribute("aria-sort", "descending")
    seen = ids(page)
    follow(page, "Next")
    seen += ids(page)
    times = [node.client.get(f"/v1/migrations/{each}")["downtime_ms"] for each in seen]
    assert all(longer >= shorter for longer, shorter in itertools.pairwise(times))
    assert times[0] == 9972
    assert len(set(seen)) == 2 * LISTED
    follow(page, "Copied")
    assert column(page, "Copied")[0] == "9.8 GiB"


def test_filtered(page: Page, node: Node) -> None:
    page.goto("/migrations")
    follow(page, "Failed")
    assert set(column(page, "State")) == {"failed"}
    follow(page, "Older")
    follow(page, "Older")
    assert len(ids(page)) == 0
    check_both(page, "beyond the end")
    page.goto("/migrations?state=failed")
    follow(page, "Suspensions")
    expect(page.locator(".empty")).to_contain_text("None of these")
    follow(page, "All")
    assert set(column(page, "Kind")) == {"suspend"}
    assert len(ids(page)) == RECORDS // 1000
    expect(page.get_by_role("link", name="Older")).to_have_count(0)
    process = node.client.get("/v1/migrations", limit=1)[0]["process_id"]
    page.goto(f"/processes/{process}")
    follow(page, "Its moves, suspensions and resumptions")
    assert set(column(page, "Process")) == {process[:12]}
    follow(page, "Downtime")
    assert set(column(page, "Process")) == {process[:12]}


def test_it_stays_usable(page: Page, node: Node) -> None:
    """The list renews itself, and a long one is as small in the browser as a short one."""
    page.goto("/migrations")
    assert page.evaluate("document.querySelectorAll('*').length") < 2000
    before = page.locator(".asof time").get_attribute("datetime")
    assert before is not None
    node.client.post("/v1/devices/cpu:1:drain", {"reason": "new fan"})
    expect(page.locator(".asof time")).not_to_have_attribute("datetime", before)
    assert len(ids(page)) == LISTED
