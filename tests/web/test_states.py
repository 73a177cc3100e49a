"""What operators meet more seldom: the dashboard over TLS, an open circuit breaker, a cancel that comes too late, a
front that was restarted."""

from __future__ import annotations

import os
import re
import signal
import ssl
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, expect

from tests.daemon.conftest import MakeNode, make_node, peer_native
from tests.daemon.node import Program, until
from tests.daemon.test_supervision import started
from tests.forked import Node
from tests.harness import make_certificate
from tests.web.front import PATIENCE, Front, port_for_long
from tests.web.look import check_both

__all__ = ["make_node", "peer_native"]


@pytest.fixture(scope="module")
def certificate() -> Iterator[tuple[Path, Path]]:
    with tempfile.TemporaryDirectory() as folder:
        yield make_certificate(Path(folder))


@pytest.fixture(scope="module")
def node(native_dir: Path, certificate: tuple[Path, Path]) -> Iterator[Node]:
    """One whose API is encrypted."""
    with (
        tempfile.TemporaryDirectory(prefix="xmig-") as folder,
        Node(Path(folder), native_dir=native_dir, tls_cert=certificate[0], tls_key=certificate[1]) as node,
    ):
        yield node


def test_over_tls_with_a_token(chromium: Browser, node: Node, certificate: tuple[Path, Path]) -> None:
    """From the browser to the dashboard, and from it to the API."""
    api = node.client.get("/v1/node")["tcp_address"]
    assert api.startswith("https://")
    token = node.client.post("/v1/tokens", {"name": "an operator", "scope": "admin"})["token"]
    encrypted = {"tls_certificate": certificate[0], "tls_key": certificate[1], "api": api, "api_ca": certificate[0]}
    with Front(node, local=0, **encrypted) as front:
        assert front.address.startswith("https://")
        with pytest.raises(httpx.TransportError):
            httpx.get(front.address.replace("https", "http"), trust_env=False, timeout=PATIENCE)
        trusting = ssl.create_default_context(cafile=str(certificate[0]))
        answer = httpx.get(front.address, verify=trusting, trust_env=False, timeout=PATIENCE)
        assert answer.headers["strict-transport-security"].startswith("max-age=")
        # Chromium does not know who has signed it; that it is ours, the lines above have shown.
        with chromium.new_context(base_url=front.address, ignore_https_errors=True) as context:
            page = context.new_page()
            page.goto("/jobs")
            check_both(page, "login")
            page.get_by_label("Token").fill(token)
            page.get_by_role("button", name="Log in").click()
            expect(page.locator(".empty")).to_contain_text("No job yet")
            cookie = next(each for each in context.cookies() if "xmig_" not in each["name"])
            assert (cookie["name"], cookie["secure"], cookie["httpOnly"]) == ("__Host-xmig", True, True)
            expect(page.locator(".dot")).to_be_visible()
            job = node.client.post("/v1/jobs", {"name": "made-meanwhile"})["id"]
            expect(page.locator(f"#job-{job}")).to_contain_text("made-meanwhile")  # without a reload
            page.get_by_role("button", name="Log out").click()
            expect(page.get_by_label("Token")).to_be_visible()
            page.goto("/jobs")
            expect(page.get_by_label("Token")).to_be_visible()


def test_an_open_circuit_breaker(chromium: Browser, make_node: MakeNode) -> None:
    node = make_node(XMIG_MAX_ATTEMPTS="1")
    node.start()
    with node.http() as http:
        changed = http.patch("/v1/policies/circuit-breaker", json={"max_actions": 1}, headers={"if-match": "*"})
        assert changed.is_success, changed.text
    with Front(node) as front, chromium.new_context(base_url=front.address) as context, Program(node) as program:
        process = started(node, program)
        page = context.new_page()
        page.goto("/")
        summary = page.locator(".summary")
        expect(summary).to_contain_text(re.compile(r"Circuit breaker\s*closed"))
        node.behave(go="exit")  # whoever is given the process does not live for long: it is lost
        os.kill(process["server_pid"], signal.SIGKILL)
        # All of this without a reload.
        alert = page.locator("#live").get_by_role("alert")
        expect(alert).to_contain_text("The circuit breaker is open")
        expect(alert).to_contain_text("1 automatic action within 600 s, the last one: loss")
        expect(summary).to_contain_text(re.compile(r"Circuit breaker\s*open"))
        check_both(page, "overview, open circuit breaker")
        for path in ("/devices", "/jobs", "/migrations", "/faults", "/operations", "/audit"):
            page.goto(path)
            expect(alert).to_contain_text("The circuit breaker is open")
        alert.get_by_role("link", name="Settings").click()
        check_both(page, "settings, open circuit breaker")
        page.get_by_role("button", name="Close the circuit breaker").click()
        expect(page.locator(".note")).to_contain_text("automation acts again")
        expect(alert).to_have_count(0)
        assert node.get("/v1/circuit-breaker")["state"] == "closed"


def test_what_happened_while_the_front_was_away(chromium: Browser, node: Node) -> None:
    with chromium.new_context() as context:
        page = context.new_page()
        requested: list[str] = []
        page.on("request", lambda request: requested.append(request.url) if "/live?" in request.url else None)
        port = port_for_long()
        with Front(node, port=port) as front:
            page.goto(f"{front.address}/jobs")
            expect(page.locator(".dot")).to_be_visible()
            seen = node.client.post("/v1/jobs", {"name": "seen"})["id"]
            expect(page.locator(f"#job-{seen}")).to_be_visible()
        expect(page.locator("#stale")).to_contain_text("Stale since")
        check_both(page, "stale")
        missed = node.client.post("/v1/jobs", {"name": "missed"})["id"]
        with Front(node, port=port):
            expect(page.locator(f"#job-{missed}")).to_contain_text("missed")
            expect(page.locator("#stale")).to_be_hidden()
            context.close()  # the front's end does not wait for it
        assert len(requested) > 1


def test_a_cancel_that_comes_too_late(chromium: Browser, make_node: MakeNode) -> None:
    node = make_node()
    node.start()
    with Front(node) as front, chromium.new_context(base_url=front.address) as context, Program(node) as program:
        process = started(node, program)
        page = context.new_page()
        node.behave(prepare="hold")
        page.goto(f"/processes/{process['id']}")
        page.get_by_text("Suspend…").click()
        page.get_by_role("button", name="Suspend", exact=True).click()
        cancel = page.get_by_role("button", name="Cancel")
        expect(cancel).to_be_enabled()
        old = context.new_page()  # one that does not hear of what comes
        old.route("**/live?*", lambda route: route.abort())
        old.goto(page.url)
        expect(old.get_by_role("button", name="Cancel")).to_be_enabled()
        node.behave(suspend="hold")
        expect(cancel).to_be_disabled()
        expect(page.locator("#why-not")).to_contain_text("past the point up to which it can be taken back")
        check_both(page, "past the point of no return")
        old.get_by_role("button", name="Cancel").click()
        refusal = old.locator("#notes").get_by_role("alert")
        expect(refusal).to_contain_text("cannot be cancelled any more")
        expect(refusal).to_contain_text("What to do")
        assert [each["state"] for each in node.get("/v1/operations")] == ["running"]
        node.behave()  # within the time that a source may take to hand over
        check_both(old, "refused to cancel")
        expect(page.locator(".status")).to_contain_text("its memory is in host memory")
        until(lambda: [each["state"] for each in node.get("/v1/operations")] == ["succeeded"], "it has succeeded")
