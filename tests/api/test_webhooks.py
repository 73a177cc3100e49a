"""Webhooks: signed, at least once, in order, whatever the target does; and nothing that concerns anybody else waits."""

from __future__ import annotations

import hashlib
import hmac
import http.server
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.cli.conftest import ctl
from tests.daemon.conftest import MakeNode
from tests.daemon.node import Node, until

from .callers import request_as

SECRET = "a secret of the tests"
ANY = {"If-Match": "*"}


@dataclass
class Target:
    """What takes deliveries: `answers` says with which status, `hangs` that it answers nothing."""

    url: str = ""
    status: int = 200
    taken: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    tried: int = 0
    hangs: threading.Event | None = None
    bodies: list[bytes] = field(default_factory=list)

    def jobs(self) -> list[str]:
        """Of the events that it has taken, in their order."""
        return [each["job_id"] for each in self.taken if each["type"] == "job.created"]


def handler(target: Target) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            target.tried += 1
            if target.hangs is not None:
                target.hangs.wait(60)
                return
            if target.status == 200:
                target.taken.append(json.loads(body))
                target.bodies.append(body)
                target.headers.append({name.lower(): value for name, value in self.headers.items()})
            self.send_response(target.status)
            if 300 <= target.status < 400:
                self.send_header("Location", target.url + "/elsewhere")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


@pytest.fixture
def targets() -> Iterator[list[Target]]:
    made, servers = [], []
    for _ in range(2):
        target = Target()
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler(target))
        server.daemon_threads = True
        target.url = f"http://127.0.0.1:{server.server_port}/events?of=node"
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        made.append(target)
        servers.append(server)
    yield made
    for target, server in zip(made, servers, strict=True):
        if target.hangs is not None:
            target.hangs.set()
        server.shutdown()
        server.server_close()


@pytest.fixture
def target(targets: list[Target]) -> Target:
    return targets[0]


@pytest.fixture
def node(make_node: MakeNode) -> Node:
    node = make_node(XMIG_WEBHOOK_WAIT="0.02", XMIG_WEBHOOK_ATTEMPTS="3", XMIG_WEBHOOK_TIMEOUT="5")
    node.start()
    return node


def add(node: Node, target: Target, *types: str, **fields: Any) -> str:
    with node.http() as http:
        body = {"url": target.url, "secret": SECRET, "types": list(types), **fields}
        answer = http.post("/v1/webhooks", json=body)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])


def job(node: Node, **fields: Any) -> str:
    with node.http() as http:
        return str(http.post("/v1/jobs", json={"name": "job", **fields}).json()["id"])


def happened(node: Node, **fields: Any) -> str:
    """A job whose event is in the history."""
    made = job(node, **fields)
    until(lambda: made in [each["job_id"] for each in node.get("/v1/events", limit=10)], "its event")
    return made


def webhook(node: Node, id: str) -> dict[str, Any]:
    found: dict[str, Any] = node.get(f"/v1/webhooks/{id}")
    return found


def letters(node: Node, id: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = node.get(f"/v1/webhooks/{id}/dead-letters")
    return found


def test_deliveries_are_signed_and_in_order(node: Node, target: Target) -> None:
    happened(node)  # before there is a webhook
    id = add(node, target, "job.created", "job.exited")
    jobs = [job(node, external_id=f"slurm:{number}") for number in range(5)]
    with node.http() as http:
        http.post(f"/v1/jobs/{jobs[0]}:exited", json={"exit_code": 3})
    until(lambda: len(target.taken) == 6, "all are delivered")
    assert target.jobs() == jobs
    assert target.taken[-1]["type"] == "job.exited"
    assert target.taken[-1]["data"]["exit_code"] == 3
    assert [each["external_id"] for each in target.taken[:5]] == [f"slurm:{number}" for number in range(5)]
    assert [each["id"] for each in target.taken] == sorted({each["id"] for each in target.taken})
    assert {each["webhook"] for each in target.taken} == {id}
    for body, headers in zip(target.bodies, target.headers, strict=True):
        signed = headers["xmig-timestamp"].encode() + b"." + body
        expected = "v1=" + hmac.new(SECRET.encode(), signed, hashlib.sha256).hexdigest()
        assert headers["xmig-signature"] == expected
        assert headers["xmig-event-id"] == str(json.loads(body)["id"])
        assert abs(time.time() - int(headers["xmig-timestamp"])) < 600
    info = until(lambda: (found := webhook(node, id))["delivered"] == 6 and found, "it is known")
    assert (info["dead_letters"], info["failing_since"]) == (0, None)


def test_no_event_is_lost_with_the_daemon(make_node: MakeNode, target: Target) -> None:
    """It dies again and again, while the target takes nothing for a while."""
    node = make_node(XMIG_WEBHOOK_WAIT="0.02", XMIG_WEBHOOK_ATTEMPTS="100")
    node.start()
    add(node, target, "job.created")
    jobs = []
    for status in (503, 200, 503):
        target.status = status
        jobs += [happened(node) for _ in range(3)]
        node.kill()
        node.start()
    target.status = 200
    until(lambda: set(jobs) <= set(target.jobs()), "all are delivered")
    seen = dict.fromkeys((each["id"], each["job_id"]) for each in target.taken if each["type"] == "job.created")
    assert [job for _, job in seen] == jobs  # some twice, with the same id


def test_a_target_that_hangs_delays_nobody(node: Node, targets: list[Target]) -> None:
    hanging, other = targets
    hanging.hangs = threading.Event()
    add(node, hanging, "job.created")
    add(node, other, "job.created")
    jobs = [job(node) for _ in range(5)]
    until(lambda: other.jobs() == jobs, "the other one has them")
    assert hanging.tried == 1
    began = time.monotonic()
    node.kill(15)
    assert time.monotonic() - began < 30
    node.start()
    jobs.append(job(node))
    until(lambda: other.jobs()[-1] == jobs[-1], "and after a restart")


def test_dead_letters_are_sent_again(node: Node, target: Target) -> None:
    id = add(node, target, "job.created")
    target.status = 302  # which is not followed
    lost = [job(node) for _ in range(2)]
    until(lambda: webhook(node, id)["dead_letters"] == 2, "they are given up")
    assert target.tried == 6
    found = letters(node, id)
    assert [each["event"]["job_id"] for each in reversed(found)] == lost
    assert {(each["attempts"], each["error"], each["queued"]) for each in found} == {(3, "it answered 302", False)}
    assert webhook(node, id)["last_error"] == "it answered 302"
    target.status = 200
    later = job(node)
    until(lambda: target.jobs() == [later], "others go on")
    assert webhook(node, id)["failing_since"] is None

    node.kill()
    node.start()
    done = ctl(node, "webhook", "retry", id[:8], "--letter", str(found[0]["number"]))
    assert (done.returncode, done.stdout) == (0, "1 dead letter(s) are sent again\n")
    until(lambda: len(letters(node, id)) == 1, "one is delivered")
    target.status = 500
    with node.http() as http:
        assert http.post(f"/v1/webhooks/{id}:retry", json={}).json() == {"queued": 1}
    until(lambda: letters(node, id)[0]["attempts"] == 4, "it is not taken")
    target.status = 200
    assert ctl(node, "webhook", "retry", id).returncode == 0
    until(lambda: not letters(node, id), "all are delivered")
    assert target.jobs() == [later, lost[1], lost[0]]


def test_what_waits_too_long_is_a_dead_letter(make_node: MakeNode, target: Target) -> None:
    """Before it is trimmed: of 100 events that are kept, 50 may wait."""
    node = make_node(XMIG_WEBHOOK_WAIT="0.05", XMIG_WEBHOOK_ATTEMPTS="100", XMIG_EVENTS_KEPT="100")
    node.start()
    target.status = 500
    id = add(node, target, "job.created")
    jobs = [job(node) for _ in range(120)]
    until(lambda: webhook(node, id)["dead_letters"] > 0, "the first are given up")
    assert "too many events waited" in letters(node, id)[0]["error"]
    target.status = 200
    until(lambda: target.jobs()[-1:] == jobs[-1:], "the others are delivered")
    kept = [each["event"]["job_id"] for each in reversed(node.get(f"/v1/webhooks/{id}/dead-letters", limit=1000))]
    assert kept + target.jobs() == jobs


def test_it_is_changed(node: Node, targets: list[Target]) -> None:
    first, second = targets
    id = add(node, first, "job.created")
    path = f"/v1/webhooks/{id}"
    with node.http() as http:
        tag = http.get(path).headers["etag"]
        assert http.patch(path, json={"enabled": False}, headers={"If-Match": tag}).json()["enabled"] is False
        assert http.patch(path, json={"enabled": True}, headers={"If-Match": tag}).status_code == 412
        waits = job(node)
        assert "disabled" in ctl(node, "webhook", "list").stdout
        changed = http.patch(path, json={"enabled": True, "url": second.url, "types": []}, headers=ANY).json()
        assert (changed["url"], changed["types"]) == (second.url, [])
    until(lambda: second.jobs() == [waits], "it goes on where it was")
    assert first.taken == []
    assert "audit" not in {each["type"] for each in second.taken}
    done = ctl(node, "webhook", "test", id)
    assert done.returncode == 0, done.stderr
    until(lambda: any(each["type"] == "webhook.test" for each in second.taken), "the test")
    second.status = 404
    done = ctl(node, "webhook", "test", id)
    assert (done.returncode, "it answered 404" in done.stderr) == (1, True)
    assert ctl(node, "webhook", "rm", id, "--yes").returncode == 0
    assert node.get("/v1/webhooks") == []


def test_changes_at_once(node: Node, targets: list[Target]) -> None:
    """The last one counts. No other target gets anything any more, and nobody does once it is removed."""
    id = add(node, targets[0], "job.created")
    path = f"/v1/webhooks/{id}"

    def change(number: int) -> int:
        with node.http() as http:
            body = {"url": f"{targets[number % 2].url}&number={number}"}
            return http.patch(path, json=body, headers=ANY).status_code

    def remove() -> int:
        with node.http() as http:
            return http.delete(path).status_code

    with ThreadPoolExecutor(16) as threads:
        for _ in range(4):
            assert set(threads.map(change, range(16))) == {200}
            chosen = next(each for each in targets if webhook(node, id)["url"].startswith(each.url))
            (other,) = [each for each in targets if each is not chosen]
            before = len(other.taken), len(chosen.taken)
            jobs = [happened(node) for _ in range(3)]
            until(lambda chosen=chosen, jobs=jobs: jobs == chosen.jobs()[-3:], "the chosen one has them")  # type: ignore[misc]
            until(lambda: webhook(node, id)["behind"] < 3, "nothing waits")
            assert (len(other.taken), len(chosen.taken)) == (before[0], before[1] + 3)
        changes = [threads.submit(change, number) for number in range(8)]
        removal = threads.submit(remove)
        changes += [threads.submit(change, number) for number in range(8)]
        assert removal.result() == 204
        assert {each.result() for each in changes} <= {200, 404}
    taken = [len(each.taken) for each in targets]
    witness = Target(url=targets[0].url + "&witness=1")
    add(node, witness, "job.created")
    made = happened(node)
    until(lambda: targets[0].jobs()[-1:] == [made], "who is there has it")
    assert [len(each.taken) for each in targets] == [taken[0] + 1, taken[1]]


def test_the_secret_is_nowhere(node: Node, target: Target) -> None:
    id = add(node, target)
    with node.http() as http:
        answers = [http.get("/v1/webhooks"), http.get(f"/v1/webhooks/{id}"),
                   http.patch(f"/v1/webhooks/{id}", json={"secret": SECRET + "!"}, headers=ANY),
                   http.post("/v1/webhooks", content=b'{"secret": "' + SECRET.encode() + b'",}'),
                   http.get("/v1/audit"), http.get("/v1/events")]  # fmt: skip
        assert not [answer.url for answer in answers if SECRET in answer.text]
        made = http.post("/v1/webhooks", json={"url": target.url}, headers={"Idempotency-Key": "k"}).json()
        assert made["secret"].startswith("whsec_")
    assert SECRET not in node.log.read_text()
    assert made["secret"] not in node.log.read_text()


@pytest.mark.parametrize(
    "fields",
    [
        {"url": "ftp://127.0.0.1/"}, {"url": "file:///etc/passwd"}, {"url": "http://"}, {"url": "http://u:p@host/"},
        {"url": "http://host/#x"}, {"url": "http://host/a b"}, {"url": "http://host\\@other/"}, {"secret": "short"},
        {"types": ["job.begun"]}, {"types": ["snapshot"]}, {"unknown": 1}, {"url": "http://host:port/"},
    ],
)  # fmt: skip
def test_limits(daemon: Node, http: httpx.Client, fields: dict[str, Any]) -> None:
    answer = http.post("/v1/webhooks", json={"url": "http://127.0.0.1:9/", **fields})
    assert answer.status_code == 422, answer.text


def test_for_operators(daemon: Node, http: httpx.Client) -> None:
    made = http.post("/v1/webhooks", json={"url": "http://127.0.0.1:9/", "enabled": False}).json()
    for method, path, body in (
        ("GET", "", None), ("POST", "", {"url": "http://127.0.0.1:9/"}), ("GET", f"/{made['id']}", None),
        ("GET", f"/{made['id']}/dead-letters", None), ("DELETE", f"/{made['id']}", None),
        ("POST", f"/{made['id']}:retry", {}), ("POST", f"/{made['id']}:test", None),
    ):  # fmt: skip
        status, problem = request_as(daemon, 60_010, method, f"/v1/webhooks{path}", body=body)
        assert (status, problem["code"]) == (403, "operators_only"), path
