"""What an operator does, in a browser: a real daemon, real programs, and what the pages make of them."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import APIResponse, Browser, Page, Route, expect

from tests.harness import kill_server, wait_until
from tests.web.front import Front, end_calm, start_calm
from xmigd.demo.node import Node, Program


@pytest.fixture(scope="module")
def training(node: Node, front: Front) -> Iterator[Program]:
    """One that is there all the time; at its end everything that it computed was exact."""
    program = start_calm(node, "training")
    yield program
    end_calm(program)


def test_run_a_job_and_see_it(page: Page, node: Node) -> None:
    page.goto("/jobs?show=live")
    expect(page.locator(".empty")).to_contain_text("No job is running")
    program = start_calm(node, "first")
    page.get_by_role("link", name="first").click()  # appeared without a reload
    expect(page.get_by_role("heading", level=1)).to_contain_text("first")
    expect(page.locator(".status")).to_contain_text("running")
    expect(page.locator("#plot-memory canvas")).to_be_visible()
    page.get_by_text("The charts' numbers as a table").click()
    expect(page.locator("#samples tbody tr").first).to_contain_text("MiB")
    # What the charts show of a program that has ended are its snapshots.
    wait_until(lambda: bool((program.info() or {}).get("live_bytes")), "a snapshot")
    end_calm(program)
    expect(page.locator(".status")).to_contain_text("ended")
    # What a person has opened stays open while the page renews itself.
    expect(page.locator("#samples")).to_be_visible()


def test_a_chart_of_a_single_sample_shows_its_time(page: Page, node: Node, training: Program) -> None:
    # A page that does not renew itself has to be requested when there is something to draw.
    series = f"/v1/processes/{_process(training)}/series"
    wait_until(lambda: any(node.client.get(series)["samples"]["live_bytes"]), "a sample")
    page.add_init_script(
        "window.drawn = []; const fill = CanvasRenderingContext2D.prototype.fillText;"
        "CanvasRenderingContext2D.prototype.fillText = "
        "function (...reported) { drawn.push(reported[0]); fill.apply(this, reported); }"
    )
    page.route("**/live?*", lambda route: route.abort())
    page.route("**/processes/*", only_the_newest_sample)
    page.goto(f"/processes/{_process(training)}")
    expect(page.locator("#plot-memory canvas")).to_be_visible()
    expect(page.locator("#samples tbody tr")).to_have_count(1)
    at = float(page.locator("#samples tbody td").first.get_attribute("data-v") or "")
    times = {text for text in page.evaluate("drawn") if re.fullmatch(r"\d\d:\d\d:\d\d", text)}
    assert times, "the axis has no times"
    assert times <= {time.strftime("%H:%M:%S", time.localtime(at + apart)) for apart in range(-31, 32)}


def only_the_newest_sample(route: Route) -> None:
    """The page as it is while there is a single one."""
    answer = route.fetch()
    row = r'<tr id="at-.*?</tr>\s*'
    route.fulfill(response=answer, body=re.sub(f"({row})({row})+", r"\1", answer.text(), flags=re.DOTALL))


def test_watch_a_recovery(page: Page, training: Program) -> None:
    page.goto(f"/jobs/{training.job}")
    expect(page.get_by_text("None so far.")).to_be_visible()
    wait_until(lambda: (training.info() or {}).get("standby") == "warm", "a warm standby")
    kill_server(training)
    incident = page.locator(".incident").first
    expect(incident).to_contain_text("killed by SIGKILL")
    expect(incident).to_contain_text("Running again after")
    expect(incident).to_contain_text("every reply the same")
    incident.get_by_text("Step by step").click()
    expect(incident.locator(".facts")).to_contain_text("Restored")
    page.get_by_role("link", name="Faults & recovery").click()
    expect(page.locator(".incident").first).to_contain_text("Give it to the warm standby")
    page.get_by_role("link", name="Overview").click()
    expect(page.get_by_role("region", name="Latest recoveries")).to_contain_text("resumed")


def test_stop_a_job(page: Page, node: Node) -> None:
    program = start_calm(node, "unwanted")
    page.goto(f"/jobs/{program.job}")
    page.get_by_text("Stop…").click()
    page.get_by_role("button", name="Stop unwanted").click()
    expect(page.locator(".note")).to_contain_text("is being stopped")
    expect(page.locator(".status")).to_contain_text("stopped")
    assert program.process.wait(60) == -signal.SIGTERM
    program.until("ended")


def test_cordon_a_device_and_open_it_again(page: Page, node: Node) -> None:
    page.goto("/devices")
    tile = page.locator(".tile").filter(has_text="cpu:1")
    tile.get_by_text("Cordon…").click()
    tile.locator("[id^=cordon]").get_by_label("Why").fill("its fan is loud")
    tile.get_by_role("button", name="Cordon cpu:1").click()
    expect(page.locator(".note")).to_contain_text("no new program")
    expect(tile).to_contain_text("its fan is loud")
    assert node.client.get("/v1/devices/cpu:1")["cordoned"]
    tile.get_by_role("button", name="Uncordon").click()
    expect(tile.locator(".state").first).to_have_text("ready")
    assert not node.client.get("/v1/devices/cpu:1")["cordoned"]


def test_log_in_with_a_token_that_may_only_look(chromium: Browser, node: Node, training: Program) -> None:
    with Front(node, local=0) as front, chromium.new_context(base_url=front.address) as context:
        page = context.new_page()
        page.goto(f"/jobs/{training.job}")
        page.get_by_label("Token").fill("xmig_nonsense")
        page.get_by_role("button", name="Log in").click()
        expect(page.get_by_role("alert")).to_contain_text("does not know this token")
        token = node.client.post("/v1/tokens", {"name": "a look", "scope": "read"})
        page.get_by_label("Token").fill(token["token"])
        page.get_by_role("button", name="Log in").click()
        expect(page.locator(".status")).to_contain_text("running")
        assert token["token"] not in str(context.cookies())
        page.get_by_text("Stop…").click()
        page.get_by_role("button", name="Stop training").click()
        refusal = page.locator("#notes").get_by_role("alert")
        expect(refusal).to_contain_text("may only read")
        expect(refusal).to_contain_text("What to do")
        node.client.delete(f"/v1/tokens/{token['id']}")
        expect(page.get_by_label("Token")).to_be_visible()  # without a reload
        page.wait_for_url("**/login**")  # and it is all there: a navigation that goes on would end the next one
        page.goto(f"/jobs/{training.job}")
        expect(page.get_by_label("Token")).to_be_visible()
    training.until("running")


def test_make_a_token_and_revoke_it(page: Page, node: Node) -> None:
    page.goto("/settings")
    page.get_by_text("Make a token…").click()
    page.get_by_label("Name").fill("grafana")
    page.get_by_role("button", name="Make it").click()
    secret = page.locator(".secret").inner_text()
    assert secret.startswith("xmig_")
    page.reload()
    expect(page.locator(".secret")).to_have_count(0)
    page.get_by_role("button", name="Revoke grafana").click()
    expect(page.get_by_role("row", name="grafana")).to_contain_text("revoked")
    page.get_by_role("link", name="Audit").click()
    expect(page.locator("tbody")).to_contain_text("DELETE /v1/tokens/")
    expect(page.locator("tbody")).not_to_contain_text(secret)


def test_change_a_policy(page: Page, node: Node) -> None:
    page.goto("/settings")
    policy = page.locator(".policy").filter(has_text="How processes are recovered")
    for value in ("max attempts", "stall bound seconds", "snapshot cost share", "hang timeout seconds"):
        expect(policy.get_by_label(value)).to_be_visible()
    expect(page.locator(".policy input:visible")).to_have_count(page.locator(".policy .unit").count())
    expect(page.locator(".policy .unit").filter(has_not_text=re.compile(r"\w"))).to_have_count(0)
    policy.get_by_label("max attempts").fill("7")
    policy.get_by_role("button", name="Apply").click()
    expect(page.locator(".note")).to_contain_text("it applies from now on")
    expect(policy).to_contain_text("the setting says 5 attempts")
    assert node.client.get("/v1/policies/recovery")["settings"]["max_attempts"] == 7
    # Somebody else changes it while the page stands as it was: nothing is overwritten unseen.
    policy.get_by_label("max attempts").fill("8")
    transport = httpx.HTTPTransport(uds=str(node.settings.api_socket), verify=False)
    with httpx.Client(transport=transport, base_url="http://localhost", timeout=60) as http:
        answer = http.patch("/v1/policies/recovery", json={"max_attempts": 9}, headers={"if-match": "*"})
        assert answer.status_code == 200
    policy.get_by_role("button", name="Apply").click()
    expect(page.locator("#notes").get_by_role("alert")).to_contain_text("has changed since")
    assert node.client.get("/v1/policies/recovery")["settings"]["max_attempts"] == 9


def test_a_form_that_is_being_filled_in_stays_as_it_is(page: Page, training: Program) -> None:
    page.goto(f"/jobs/{training.job}")
    page.get_by_text("Stop…").click()
    before = page.locator(".asof time").get_attribute("datetime")
    recoveries = len(training.recoveries())
    kill_server(training)
    expect(page.locator(".asof time")).not_to_have_attribute("datetime", before or "")
    expect(page.get_by_role("button", name="Stop training")).to_be_visible()
    outcomes = ["resumed"] * (recoveries + 1)
    wait_until(lambda: [each["outcome"] for each in training.recoveries()] == outcomes, "it goes on, whatever is next")


def test_the_daemon_is_away_for_a_while(page: Page, node: Node, training: Program) -> None:
    page.goto("/jobs")
    badge = page.locator("#stale")
    expect(page.locator("#live")).to_contain_text("training")
    expect(badge).to_be_hidden()
    node.kill()
    expect(badge).to_contain_text("Stale since")
    expect(page.locator("#live")).to_contain_text("training")  # what was known stays to be read
    node.start()
    job = node.client.post("/v1/jobs", {"name": "made-meanwhile"})["id"]
    expect(page.locator(f"#job-{job}")).to_contain_text("made-meanwhile")
    expect(badge).to_be_hidden()
    training.until("running")


def test_a_page_that_was_requested_for_before_the_daemon_went(page: Page, node: Node, training: Program) -> None:
    held: list[tuple[Route, APIResponse]] = []

    def hold(route: Route) -> None:
        answer = route.fetch()
        if held or "requested-for" not in answer.text():  # requested before there was such a job, or after what is held
            route.fulfill(response=answer)
        else:
            held.append((route, answer))

    page.goto("/jobs")
    expect(page.locator("#live")).to_contain_text("training")
    page.route("**/jobs", hold)
    node.client.post("/v1/jobs", {"name": "requested-for"})
    while not held:
        page.wait_for_timeout(10)
    node.kill()
    expect(page.locator("#stale")).to_contain_text("Stale since")
    route, answer = held[0]
    route.fulfill(response=answer)
    expect(page.locator("#live")).to_contain_text("requested-for")
    expect(page.locator("#stale")).to_contain_text("Stale since")
    page.unroute_all(behavior="wait")  # what is requested now is answered, too
    node.start()
    expect(page.locator("#stale")).to_be_hidden()
    training.until("running")


def test_without_javascript(chromium: Browser, front: Front, node: Node) -> None:
    program = start_calm(node, "plain")
    with chromium.new_context(base_url=front.address, java_script_enabled=False) as context:
        page = context.new_page()
        page.goto("/")
        page.get_by_role("link", name="plain").click()
        wait_until(lambda: len(node.client.get(f"/v1/processes/{_process(program)}/segments")) > 1, "snapshots")
        page.reload()
        page.get_by_text("The charts' numbers as a table").click()
        expect(page.locator("#samples tbody tr").first).to_be_visible()
        page.get_by_role("button", name="dark").click()
        expect(page.locator("html")).to_have_attribute("data-theme", "dark")
        page.get_by_text("Stop…").click()
        page.get_by_role("button", name="Stop plain").click()
        expect(page.locator(".note")).to_contain_text("is being stopped")
    program.process.wait(60)
    program.until("ended")


def test_the_keyboard_is_enough(page: Page, training: Program) -> None:
    page.goto(f"/jobs/{training.job}")
    page.keyboard.press("Tab")
    expect(page.get_by_text("Skip to the content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent").strip() == "Stop…":
            break
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="Stop training")).to_be_focused()


def test_a_page_that_listens_does_not_keep_the_front_from_ending(chromium: Browser, node: Node) -> None:
    with Front(node) as front, chromium.new_context(base_url=front.address) as context:
        page = context.new_page()
        page.goto("/jobs")
        expect(page.locator(".dot")).to_be_visible()
        assert front.process is not None
        os.kill(front.process.pid, signal.SIGTERM)
        assert front.process.wait(30) == 0
        expect(page.locator("#stale")).to_contain_text("Stale since")


def _process(program: Program) -> str:
    info = program.info()
    assert info is not None
    return str(info["id"])
