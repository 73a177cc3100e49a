"""Who gets in, and what they see and may do. Against real daemons, as real users."""

from __future__ import annotations

import signal
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.daemon.conftest import MakeNode
from tests.daemon.node import Node, Program, until
from tests.harness import make_certificate
from xmigd.api.server import check_tcp
from xmigd.errors import StartError
from xmigd.security.callers import operators_group
from xmigd.settings import Settings

from .callers import request_as

ALICE, BOB, CAROL, DAVE = 60_010, 60_011, 60_012, 60_013
OPERATORS = 60_001
ANY = {"if-match": "*"}


@pytest.fixture
def tcp(daemon: Node) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=daemon.get("/v1/node")["tcp_address"], timeout=60) as client:
        yield client


def make_token(http: httpx.Client, **wanted: Any) -> dict[str, Any]:
    answer = http.post("/v1/tokens", json={"name": "t", **wanted})
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    return made


def bearer(token: dict[str, Any]) -> dict[str, str]:
    return {"authorization": f"Bearer {token['token']}"}


class TestNetwork:
    def test_without_a_token_there_is_only_health(self, tcp: httpx.Client) -> None:
        assert tcp.get("/healthz").status_code == tcp.get("/readyz").status_code == 200
        for method, path in (("GET", "/v1/node"), ("GET", "/openapi.json"), ("GET", "/x"), ("POST", "/v1/jobs")):
            answer = tcp.request(method, path)
            assert (answer.status_code, answer.json()["code"]) == (401, "token_required")
            assert answer.headers["www-authenticate"] == "Bearer"

    def test_a_page_in_a_browser_gets_nothing(self, tcp: httpx.Client) -> None:
        answer = tcp.get("/healthz", headers={"host": "evil.example"})
        assert (answer.status_code, answer.json()["code"]) == (421, "wrong_host")

    def test_open_reading_is_a_decision(self, make_node: MakeNode) -> None:
        node = make_node(XMIG_OPEN_READING="true")
        node.start()
        with httpx.Client(base_url=node.get("/v1/node")["tcp_address"], timeout=60) as http:
            assert http.get("/v1/jobs").json() == []
            for method, path in (("POST", "/v1/jobs"), ("DELETE", "/v1/jobs/x"), ("POST", "/v1/tokens")):
                answer = http.request(method, path)
                assert (answer.status_code, answer.json()["code"]) == (403, "read_only")
            assert http.get("/v1/audit").json()["code"] == "operators_only"
            assert http.get("/v1/jobs", headers={"host": "evil.example"}).status_code == 421

    @pytest.mark.parametrize(
        ("settings", "what"),
        [
            ({"host": "0.0.0.0"}, "without TLS"),
            ({"host": "0.0.0.0", "open_reading": True, "plain_tcp": True}, "this machine only"),
            ({"tls_cert": "/nowhere.pem"}, "cannot be read"),
            ({"tls_key": "/etc/hosts"}, "tls_cert is not"),
        ],
    )
    def test_what_would_be_insecure_does_not_start(self, settings: dict[str, Any], what: str) -> None:
        with pytest.raises(StartError, match=what):
            check_tcp(Settings(**settings))

    def test_tls(self, make_node: MakeNode, tmp_path: Path) -> None:
        """Encrypted, and with `tls_client_ca` only for those whose certificate it has signed."""
        certificate, key = make_certificate(tmp_path)
        node = make_node(XMIG_TLS_CERT=str(certificate), XMIG_TLS_KEY=str(key))
        node.start()
        trust, known = (ssl.create_default_context(cafile=str(certificate)) for _ in range(2))
        known.load_cert_chain(certificate, key)
        with node.http() as local:
            token = make_token(local)
        address = node.get("/v1/node")["tcp_address"]
        assert address.startswith("https://")
        with httpx.Client(base_url=address, verify=trust, timeout=60) as http:
            assert http.get("/v1/node", headers=bearer(token)).status_code == 200
            assert http.get("/v1/node").status_code == 401
        with httpx.Client(base_url=address, timeout=60) as stranger, pytest.raises(httpx.ConnectError):
            stranger.get("/healthz")
        assert node.kill(signal.SIGTERM) == 0
        node.environment["XMIG_TLS_CLIENT_CA"] = str(certificate)
        node.start()
        address = node.get("/v1/node")["tcp_address"]
        with httpx.Client(base_url=address, verify=known, timeout=60) as http:
            assert http.get("/v1/node", headers=bearer(token)).status_code == 200
            assert http.get("/v1/node").status_code == 401
        with httpx.Client(base_url=address, verify=trust, timeout=60) as http, pytest.raises(httpx.TransportError):
            http.get("/v1/node", headers=bearer(token))


class TestTokens:
    def test_scopes(self, http: httpx.Client, tcp: httpx.Client) -> None:
        read, operate, admin = (make_token(http, scope=scope) for scope in ("read", "operate", "admin"))
        job = http.post("/v1/jobs", json={}).json()["id"]
        for token, stops, cordons in ((read, 403, 403), (operate, 202, 403), (admin, 202, 200)):
            headers = bearer(token)
            assert tcp.get("/v1/jobs", headers=headers).json()[0]["id"] == job
            assert tcp.delete(f"/v1/jobs/{job}", headers=headers).status_code == stops
            cordon = tcp.patch("/v1/devices/cpu:1", json={}, headers=headers | {"if-match": "*"})
            assert cordon.status_code == cordons
            assert tcp.get("/v1/audit", headers=headers).status_code == cordons
        answer = tcp.post("/v1/jobs", json={}, headers=bearer(admin))
        assert (answer.status_code, answer.json()["code"]) == (403, "needs_user")

    def test_a_plan_is_only_a_question(self, http: httpx.Client, tcp: httpx.Client, daemon: Node) -> None:
        carol, dave = (bearer(make_token(http, scope="read", uid=uid)) for uid in (CAROL, DAVE))
        _, job = request_as(daemon, CAROL, "POST", "/v1/jobs", body={})
        with Program(daemon, job=job["environment"]["XMIG_JOB"]) as program:  # root may join
            assert program.welcome()[0] == 0
            process = until(lambda: daemon.processes(live=True), "the process")[0]["id"]
            before = http.get("/v1/audit").json()[0]["id"]
            plan = tcp.post("/v1/migration-plans", json={"process": process}, headers=carol)
            assert (plan.status_code, [t["device"] for t in plan.json()["targets"]]) == (200, ["cpu:0", "cpu:1"])
            assert tcp.post("/v1/migration-plans", json={"process": process}, headers=dave).status_code == 404
            assert tcp.post("/v1/migration-plans", content=b"x" * 100_000, headers=carol).status_code == 413
            move = tcp.post("/v1/migrations", json={"process": process, "target": "cpu:1"}, headers=carol)
            assert (move.status_code, move.json()["code"]) == (403, "read_only")
            assert http.get("/v1/audit").json()[0]["id"] == before

    def test_tokens_are_not_made_by_tokens(self, http: httpx.Client, tcp: httpx.Client) -> None:
        operate = make_token(http, scope="operate")
        assert tcp.post("/v1/tokens", json={"name": "x"}, headers=bearer(operate)).status_code == 403

    def test_shown_once_and_kept_as_a_hash(self, http: httpx.Client, daemon: Node) -> None:
        token = make_token(http, name="once")
        listed = http.get("/v1/tokens").json()
        assert [each["name"] for each in listed if each["id"] == token["id"]] == ["once"]
        assert "token" not in listed[0]
        files = [daemon.database, daemon.database.with_name("xmig.db-wal")]
        for content in (path.read_bytes() for path in files if path.exists()):
            assert token["token"].encode() not in content
        assert token["token"] not in daemon.log.read_text()

    def test_revoked_and_expired(self, http: httpx.Client, tcp: httpx.Client) -> None:
        token = make_token(http)
        assert http.delete(f"/v1/tokens/{token['id']}").status_code == 204
        answer = tcp.get("/v1/node", headers=bearer(token))
        assert (answer.status_code, answer.json()["code"]) == (401, "bad_token")
        assert http.delete(f"/v1/tokens/{token['id']}").status_code == 404
        short = make_token(http, lifetime=1)
        until(lambda: tcp.get("/v1/node", headers=bearer(short)).json().get("code") == "token_expired", "expired")
        assert tcp.get("/v1/node", headers={"authorization": "Basic eDp5"}).status_code == 401

    def test_guessing_is_slowed_down(self, make_node: MakeNode) -> None:
        node = make_node()
        node.start()
        with httpx.Client(base_url=node.get("/v1/node")["tcp_address"], timeout=60) as http:
            guesses = (http.get("/v1/node", headers={"authorization": f"Bearer {n}"}).status_code for n in range(5000))
            assert next(status for status in guesses if status != 401) == 429

    def test_they_outlive_the_daemon(self, node: Node) -> None:
        with node.http() as http:
            token, revoked = make_token(http, scope="admin"), make_token(http)
            http.delete(f"/v1/tokens/{revoked['id']}")
        node.kill()
        node.start()
        with httpx.Client(base_url=node.get("/v1/node")["tcp_address"], timeout=60) as http:
            assert http.get("/v1/audit", headers=bearer(token)).status_code == 200
            assert http.get("/v1/node", headers=bearer(revoked)).status_code == 401

    def test_a_token_comes_before_the_socket(self, http: httpx.Client) -> None:
        """A front forwards its caller's token over the local socket, and has no authority of its own."""
        headers = bearer(make_token(http, scope="read", uid=ALICE))
        assert http.get("/v1/caller", headers=headers).json() == {
            "name": f"token t ({http.get('/v1/tokens').json()[0]['id'][:8]})", "scope": "read", "uid": ALICE,
            "operator": False, "sees_everything": False,
        }  # fmt: skip
        assert http.get("/v1/audit", headers=headers).status_code == 403

    def test_a_stream_ends_with_its_token(self, http: httpx.Client, tcp: httpx.Client) -> None:
        token = make_token(http)
        headers = bearer(token) | {"accept": "text/event-stream"}
        with tcp.stream("GET", "/v1/events", headers=headers, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            http.delete(f"/v1/tokens/{token['id']}")
            assert any("not valid any more" in line for line in lines)


class TestUsers:
    def test_they_see_their_own(self, daemon: Node, http: httpx.Client) -> None:
        status, job = request_as(daemon, ALICE, "POST", "/v1/jobs", body={"name": "hers"})
        assert (status, job["uid"]) == (201, ALICE)
        path = f"/v1/jobs/{job['id']}"
        with Program(daemon, job=job["environment"]["XMIG_JOB"]) as program:  # root may join
            assert program.welcome()[0] == 0
            process = daemon.wait_for_standby()["id"]
            inject = request_as(daemon, ALICE, "POST", f"{path}/faults:inject", body={})
            assert inject[0] == 202
            until(lambda: daemon.get("/v1/recoveries"), "a recovery")
            until(lambda: daemon.get("/v1/recoveries")[0]["outcome"] == "resumed", "resumed")
            for what in ("jobs", "processes", "faults", "recoveries"):
                assert request_as(daemon, ALICE, "GET", f"/v1/{what}")[1], what
                assert request_as(daemon, BOB, "GET", f"/v1/{what}") == (200, []), what

            def hers() -> set[str]:
                events = request_as(daemon, ALICE, "GET", "/v1/events?after=0&limit=1000")[1]
                return {event["type"] for event in events}

            until(lambda: {"job.created", "process.state", "fault", "recovery"} <= hers(), "the events")
            assert "audit" not in hers()
            events = request_as(daemon, BOB, "GET", "/v1/events?after=0&limit=1000")[1]
            assert job["id"] not in {event["job_id"] for event in events}
            for method, theirs, body in (
                ("GET", path, None), ("DELETE", path, None), ("POST", f"{path}/faults:inject", {}),
                ("GET", f"/v1/processes/{process}", None), ("GET", f"/v1/processes/{process}/segments", None),
                ("POST", f"/v1/processes/{process}:pause", None),
            ):  # fmt: skip
                status, problem = request_as(daemon, BOB, method, theirs, body=body)
                assert (status, problem["code"]) == (404, "not_found"), (method, theirs)
            assert request_as(daemon, BOB, "GET", path, groups=(OPERATORS,))[0] == 200
            assert request_as(daemon, BOB, "GET", "/v1/devices/cpu:0")[1]["process_ids"] == []
            assert request_as(daemon, BOB, "GET", "/v1/audit")[0] == 403
            assert request_as(daemon, BOB, "GET", "/v1/audit", groups=(OPERATORS,))[0] == 200
            assert request_as(daemon, ALICE, "DELETE", path)[0] == 202

    def test_their_tokens_are_theirs(self, daemon: Node, tcp: httpx.Client) -> None:
        status, token = request_as(daemon, ALICE, "POST", "/v1/tokens", body={"name": "mine", "scope": "operate"})
        assert (status, token["uid"]) == (201, ALICE)
        assert {job["uid"] for job in tcp.get("/v1/jobs", headers=bearer(token)).json()} <= {ALICE}
        assert tcp.post("/v1/jobs", json={"name": "t"}, headers=bearer(token)).json()["uid"] == ALICE
        assert tcp.post("/v1/tokens", json={"name": "x"}, headers=bearer(token)).status_code == 403
        for body in ({"name": "x", "scope": "admin"}, {"name": "x", "uid": 0}, {"name": "x", "uid": BOB}):
            assert request_as(daemon, ALICE, "POST", "/v1/tokens", body=body)[0] == 403
        assert request_as(daemon, BOB, "GET", "/v1/tokens") == (200, [])
        assert request_as(daemon, BOB, "DELETE", f"/v1/tokens/{token['id']}")[0] == 404
        cordon = request_as(daemon, ALICE, "PATCH", "/v1/devices/cpu:1", body={"cordoned": True}, headers=ANY)
        assert (cordon[0], cordon[1]["code"]) == (403, "operators_only")
        assert request_as(daemon, ALICE, "DELETE", f"/v1/tokens/{token['id']}") == (204, None)


def test_an_unknown_group_is_named() -> None:
    with pytest.raises(StartError, match="there is no group 'no-such'"):
        operators_group("no-such")
