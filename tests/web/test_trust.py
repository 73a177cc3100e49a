"""What makes a visitor trust what a page says: names, ends, words that are explained, lists that go on, room on a
telephone."""

from __future__ import annotations

import re
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.bench import history
from tests.forked import Node
from tests.web.front import Front, end_calm, start_calm
from tests.web.look import check_both
from tests.web.test_history import follow
from xmigd.web.glossary import WORDS
from xmigd.web.pages.faults import FAULTS, LISTED, one_page
from xmigd.words import duration, milliseconds

RECORDS = 10_000


@pytest.fixture(scope="module")
def node(native_dir: Path) -> Iterator[Node]:
    with (
        tempfile.TemporaryDirectory(prefix="xmig-") as folder,
        Node(Path(folder), native_dir=native_dir, history_records=2 * RECORDS) as node,
    ):
        node.stop()
        history.write(node.folder / "xmig.db", RECORDS)
        with sqlite3.connect(node.folder / "xmig.db") as database:
            database.execute("UPDATE recoveries SET resumed_ms = 4265.4")
        database.close()
        node.start()
        yield node


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.84, "0.8 ms"), (93.6, "94 ms"), (999.4, "999 ms"), (999.6, "1 s"), (4265, "4.3 s"), (43_000, "43 s"),
     (125_000, "2 min 5 s"), (12_000_000, "3 h 20 min")],
)  # fmt: skip
def test_times_for_people(value: float, text: str) -> None:
    assert milliseconds(value) == text
    if value >= 1000:
        assert duration(value / 1000) == text


def rows(count: int, *, answered: int, apart: float) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Faults from 1 on, of which every `answered`-th has a recovery; newest first."""
    faults = [
        {"id": n, "number": n, "at": 1000.0 + n * apart, "process_id": "p", "job_id": "j"} for n in range(1, count + 1)
    ]
    recoveries = [
        {"id": place + 1, "number": place + 1, "at": fault["at"], "process_id": "p", "fault": fault["number"],
         "resumed_ms": 0.0, "job_id": "j"}
        for place, fault in enumerate(faults[::answered])
    ]  # fmt: skip
    return recoveries[::-1], faults[::-1]


@pytest.mark.parametrize("answered", [1, 2, 7, 10_001])
@pytest.mark.parametrize("apart", [0.0, 1.0])
def test_every_incident_is_on_one_page(answered: int, apart: float) -> None:
    recoveries, faults = rows(2500, answered=answered, apart=apart)
    seen: list[int] = []
    more: str | None = "-"
    answers = 0
    pages = 0
    while more is not None:
        begins = more.partition("-")[::2]
        recovery, fault = (int(each) if each else 1 << 60 for each in begins)
        incidents, more = one_page(
            [r for r in recoveries if r["id"] < recovery][: LISTED + 1],
            [f for f in faults if f["id"] < fault][:FAULTS],
            begins,
        )
        assert len(incidents) <= LISTED
        answers += sum(each["recovery"] is not None for each in incidents)
        if apart:  # of what happened at one moment nobody can say what began what
            assert [each for each in incidents if each["recovery"] and each["fault"] is None] == []
        for each in incidents:
            seen += [f["id"] for f in (each["fault"], *each["further"]) if f]
        pages += 1
        assert pages <= 2 * 2500
    assert sorted(seen) == list(range(1, 2501))
    assert answers == len(recoveries)


def test_faults_page_by_page_without_a_script(chromium: Browser, front: Front, node: Node) -> None:
    with chromium.new_context(base_url=front.address, java_script_enabled=False) as context:
        page = context.new_page()
        page.goto("/faults")
        shown = [page.locator(".timeline").inner_text()]
        for _ in range(4):
            follow(page, "Older")
            shown.append(page.locator(".timeline").inner_text())
            assert page.locator(".timeline > li").count() <= LISTED
        assert len(set(shown)) == 5
        for before in reversed(shown[:-1]):
            follow(page, "Newer")
            assert page.locator(".timeline").inner_text() == before
        expect(page.get_by_role("link", name="Newer", exact=True)).to_have_count(0)
        page.goto("/faults?before=1-1")
        expect(page.locator(".empty")).to_contain_text("No older faults")
        expect(page.get_by_role("link", name="The newest")).to_be_visible()


def test_recoveries_are_reported_in_seconds_and_by_name(page: Page, node: Node) -> None:
    page.goto("/faults")
    expect(page.locator(".timeline")).to_contain_text("Running again after 4.3 s")
    assert "4265" not in page.locator("main").inner_text()
    names = {each["job_name"] for each in node.client.get("/v1/recoveries", limit=LISTED)}
    assert set(page.locator(".when a").all_inner_texts()) <= names
    page.goto("/")
    expect(page.get_by_role("table", name="").last).to_contain_text("4.3 s")


@pytest.mark.parametrize("width", [360, 390])
def test_no_page_is_wider_than_a_telephone(chromium: Browser, front: Front, node: Node, width: int) -> None:
    program = start_calm(node, "a-job-whose-name-is-rather-long-for-a-telephone-" + "x" * 60)
    info = program.info()
    assert info is not None
    paths = ["/", "/devices", "/jobs", "/jobs?show=live", f"/jobs/{program.job}", f"/processes/{info['id']}", "/faults",
             "/migrations", f"/migrations/new?process={info['id']}", "/operations", "/audit", "/settings", "/words",
             "/nothing"]  # fmt: skip
    paths.append(f"/migrations/{node.client.get('/v1/migrations', limit=1)[0]['id']}")
    paths.append(f"/operations/{node.client.get('/v1/operations', limit=1)[0]['id']}")
    try:
        with chromium.new_context(base_url=front.address, viewport={"width": width, "height": 780}) as context:
            page = context.new_page()
            for path in paths:
                page.goto(path)
                page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
                wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
                assert wide <= 0, f"{path} is {wide} px too wide"
    finally:
        end_calm(program)


def test_words_are_explained_where_they_stand(page: Page, node: Node) -> None:
    program = start_calm(node, "explained")
    info = program.info()
    assert info is not None
    page.goto(f"/processes/{info['id']}")
    for word in ("generation", "shadow", "held", "snapshot", "standby"):
        link = page.locator(f"dt a[href='/words#{word}']")
        expect(link).to_have_attribute("title", WORDS[word].meaning)
    page.locator("dt a[href='/words#shadow']").click()
    expect(page.locator("#shadow dd")).to_contain_text(WORDS["shadow"].meaning)
    check_both(page, "words")
    root = Path(__file__).resolve().parents[2] / "docs"
    assert [word.page for word in WORDS.values() if not (root / word.page).exists()] == []
    end_calm(program)


def test_a_page_that_is_not_there_leads_on(page: Page) -> None:
    answer = page.goto("/nothing")
    assert answer is not None
    assert answer.status == 404
    main = page.get_by_role("main")
    for name, to in (
        ("Overview", "/"),
        ("Jobs", "/jobs"),
        ("Devices", "/devices"),
        ("Faults and recoveries", "/faults"),
    ):
        expect(main.get_by_role("link", name=name)).to_have_attribute("href", to)
    check_both(page, "not found")
    main.get_by_role("link", name="Jobs").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Jobs")


def test_the_end_of_a_job(page: Page, node: Node) -> None:
    program = start_calm(node, "ended-well")
    page.goto(f"/jobs/{program.job}")
    expect(page.locator(".status")).to_contain_text("running")
    assert "Exit code" not in page.locator("main > #live > dl").inner_text()
    end_calm(program)
    node.client.post(f"/v1/jobs/{program.job}:exited", {"exit_signal": 9})
    facts = page.locator("dl.facts.row").first
    expect(facts).to_contain_text(re.compile(r"Exit code\s*SIGKILL \(137\)"))  # without a reload
    expect(facts).to_contain_text(re.compile(r"Took\s*\d"))
    expect(facts).to_contain_text(re.compile(r"User\s*root" if node.client.get("/v1/node")["uid"] == 0 else r"User"))
    check_both(page, "a job that has ended")
    page.goto("/jobs")
    expect(page.locator(f"#job-{program.job}")).to_contain_text("SIGKILL (137)")


def test_suspending_on_the_jobs_page_and_it_is_not_running_then(page: Page, node: Node) -> None:
    program = start_calm(node, "put-away")
    page.goto(f"/jobs/{program.job}")
    expect(page.get_by_role("link", name="Migrate…")).to_be_visible()
    page.get_by_text("Suspend…").click()
    page.get_by_role("button", name="Suspend", exact=True).click()
    expect(page.locator(".status").first).to_contain_text("suspended")
    assert node.client.get(f"/v1/jobs/{program.job}")["state"] == "suspended"
    page.goto("/")
    expect(page.locator(".summary")).to_contain_text(re.compile(r"Running processes\s*0"))
    expect(page.locator(".summary")).to_contain_text(re.compile(r"Suspended\s*1"))
    page.goto("/jobs?show=live")
    expect(page.locator(f"#job-{program.job}")).to_have_count(0)
    page.goto("/jobs?show=suspended")
    expect(page.locator(f"#job-{program.job}")).to_contain_text("suspended")
    page.goto(f"/jobs/{program.job}")
    check_both(page, "a suspended job")
    page.get_by_role("button", name="Resume").click()
    program.until("running")
    end_calm(program)


def test_devices_that_nobody_has_used(page: Page, node: Node) -> None:
    rows = {row["id"]: row for row in node.client.get("/v1/devices")}
    assert rows["cpu:1"]["uuid"] is None
    assert (rows["cpu:1"]["name"], rows["cpu:1"]["memory_bytes"]) == ("xMIG CPU device", 4 << 30)
    page.goto("/devices")
    expect(page.locator("[id='cpu:1']")).to_contain_text("xMIG CPU device")
    # The same as a server says once it has opened it.
    program = start_calm(node, "opens-it", device="cpu:1")
    known = {row["id"]: row for row in node.client.get("/v1/devices")}["cpu:1"]
    assert known["uuid"] is not None
    assert (known["name"], known["memory_bytes"]) == (rows["cpu:1"]["name"], rows["cpu:1"]["memory_bytes"])
    end_calm(program)
