"""What a browser is informed, and what is refused before anything happens."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from urllib.parse import quote

import httpx
import pytest

from tests.web.front import PATIENCE, Front
from xmigd.demo.node import Node

PAGES = ("/", "/devices", "/jobs", "/faults", "/operations", "/audit", "/settings", "/nothing-here", "/jobs/nothing")


@pytest.fixture
def browser(front: Front) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=front.address, trust_env=False, timeout=PATIENCE) as client:
        yield client


def proof(page: httpx.Response) -> str:
    """The secret of its forms."""
    return page.text.partition('name="csrf" value="')[2].partition('"')[0]


def test_no_page_runs_what_is_written_in_it(browser: httpx.Client) -> None:
    for path in PAGES:
        page = browser.get(path)
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'; script-src 'self'; style-src 'self'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert page.headers["x-frame-options"] == "DENY"
        assert page.headers["x-content-type-options"] == "nosniff"
        assert page.headers["cache-control"] == "no-store"
        for inline in ("<style", "style=", "<script>", "onclick", "javascript:"):
            assert inline not in page.text, path


def test_a_session_is_a_cookie_that_scripts_and_other_sites_do_not_have(browser: httpx.Client) -> None:
    cookie = browser.get("/").headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie


def test_a_form_proves_where_it_comes_from(browser: httpx.Client, node: Node) -> None:
    job = node.client.post("/v1/jobs", {"name": "kept"})["id"]
    page = browser.get(f"/jobs/{job}")
    for data in ({"csrf": ""}, {"csrf": "0" * 43}, {"reason": "x"}):
        answer = browser.post(f"/jobs/{job}/stop", data=data)
        assert answer.status_code == 403
        assert "does not prove" in answer.text
    answer = browser.post(f"/jobs/{job}/stop", data={"csrf": proof(page)}, headers={"sec-fetch-site": "cross-site"})
    assert answer.status_code == 403
    answer = browser.post(f"/jobs/{job}/stop", json={"csrf": proof(page)})
    assert answer.status_code == 415
    assert browser.post("/logout", content=b"x" * (65 << 10), headers={
        "content-type": "application/x-www-form-urlencoded"}).status_code == 413  # fmt: skip
    assert node.client.get(f"/v1/jobs/{job}")["state"] == "created"
    answer = browser.post(f"/jobs/{job}/stop", data={"csrf": proof(page)})
    assert answer.status_code == 303
    assert node.client.get(f"/v1/jobs/{job}")["state"] == "stopped"


def test_who_is_not_logged_in_gets_the_login_page_and_nothing_else(node: Node) -> None:
    with (
        Front(node, local=0) as front,
        httpx.Client(base_url=front.address, trust_env=False, timeout=PATIENCE) as browser,
    ):
        for path in ("/", "/jobs", "/settings"):
            answer = browser.get(path)
            assert (answer.status_code, answer.headers["location"]) == (303, f"/login?next={quote(path, safe='')}")
        assert browser.get("/live").status_code == 401
        assert browser.post("/jobs/x/stop").status_code == 303
        page = browser.get("/login?next=//evil.example/")
        assert 'name="next" value="/"' in page.text
        assert browser.post("/login", data={"token": "x"}).status_code == 403
        answer = browser.post("/login", data={"token": "two words", "csrf": proof(page)})
        assert answer.status_code == 422
        assert "xmigctl token create" in answer.text


def test_another_name_for_our_address_is_not_answered(browser: httpx.Client) -> None:
    answer = browser.get("/", headers={"host": "evil.example"})
    assert answer.status_code == 421
    assert "set-cookie" not in answer.headers


def test_another_user_of_the_machine_has_to_log_in(front: Front) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    code = (
        "import os,socket,sys; os.setgroups([]); os.setgid(65534); os.setuid(65534); "
        "host, port = sys.argv[1].split(':'); s=socket.socket(); s.connect((host, int(port))); "
        "s.sendall(f'GET / HTTP/1.0\\r\\nhost: {host}\\r\\n\\r\\n'.encode()); "
        "print(s.recv(9000).decode())"
    )  # fmt: skip
    address = front.address.removeprefix("http://")
    done = subprocess.run([sys.executable, "-c", code, address], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("HTTP/1.1 303"), done.stderr
    assert "location: /login" in done.stdout


@pytest.mark.parametrize(
    ("settings", "reported"),
    [
        ({"HOST": "0.0.0.0", "LOCAL": "1"}, "loopback"),
        ({"HOST": "0.0.0.0"}, "tls_certificate"),
        ({"TLS_KEY": "/x"}, "belong together"),
        ({"API": "somewhere"}, "XMIG_WEB_API"),
    ],
)
def test_settings_that_would_not_be_safe_are_refused(settings: dict[str, str], reported: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "xmigd.web.main"], env=os.environ | {f"XMIG_WEB_{k}": v for k, v in settings.items()},
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert reported in done.stderr


def test_xmigd_is_gone(native_dir: object, node: Node) -> None:
    with Front(node, api="unix:/nothing/here.sock") as front:
        answer = httpx.get(front.address + "/jobs", trust_env=False, timeout=PATIENCE)
        assert answer.status_code == 503
        assert "running programs are not affected" in answer.text
