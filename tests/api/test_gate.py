"""What holds for every request: limits, strictness, idempotency, preconditions, the audit."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy import Engine, text
from sqlalchemy.exc import IntegrityError

from tests.daemon.conftest import MakeNode
from tests.daemon.node import Node, Program, until
from xmigd import log
from xmigd.api.gate import make_gate
from xmigd.api.gate.limits import RateLimit
from xmigd.api.problems import on_error
from xmigd.database.writer import Writer
from xmigd.errors import TooManyRequests
from xmigd.ipc.channel import Peer
from xmigd.metrics.requests import Requests
from xmigd.security.callers import Caller
from xmigd.settings import Settings

from .callers import request_as


def code(answer: httpx.Response) -> tuple[int, str]:
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    problem = answer.json()
    assert problem["status"] == answer.status_code
    return answer.status_code, problem["code"]


class TestStrictness:
    @pytest.mark.parametrize("path", ["jobs", "processes", "faults", "operations", "events", "devices", "node"])
    def test_unknown_parameters_are_refused(self, http: httpx.Client, path: str) -> None:
        answer = http.get(f"/v1/{path}", params={"limt": 5})
        assert code(answer) == (422, "unknown_field")
        assert "limt" in answer.json()["detail"]

    def test_unknown_fields_and_bodies_are_refused(self, http: httpx.Client) -> None:
        assert code(http.post("/v1/jobs", json={"nam": "x"})) == (422, "unknown_field")
        assert code(http.request("DELETE", "/v1/jobs/x", json={"force": True})) == (422, "unknown_field")
        assert code(http.post("/v1/jobs", content=b"{", headers={"content-type": "application/json"})) == (
            422, "not_json",
        )  # fmt: skip
        assert http.get("/v1/jobs").json() == []

    def test_bodies_have_a_limit(self, http: httpx.Client) -> None:
        assert code(http.post("/v1/jobs", content=b"x" * (65 << 10))) == (413, "too_large")
        parts = (b"x" * 1024 for _ in range(65))
        assert code(http.post("/v1/jobs", content=parts)) == (413, "too_large")

    def test_everything_has_a_request_id(self, http: httpx.Client) -> None:
        assert http.get("/nothing", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
        assert http.get("/healthz", headers={"x-request-id": "a b"}).headers["x-request-id"] != "a b"


class TestRateLimit:
    def test_the_bucket(self) -> None:
        limit = RateLimit(0.001, 2)
        limit.take("a")
        limit.take("a")
        with pytest.raises(TooManyRequests) as refused:
            limit.take("a")
        assert 900 < (refused.value.retry_after or 0) <= 1000
        limit.take("b")
        RateLimit(0, 0).take("a")

    def test_over_the_api(self, make_node: MakeNode) -> None:
        node = make_node(XMIG_REQUEST_RATE="0.5")
        with node.http() as http:
            node.start()

            def refusal() -> httpx.Response | None:
                answer = http.get("/healthz")
                return answer if answer.status_code == 429 else None

            refused = until(refusal, "one request too many")
            assert code(refused) == (429, "too_many_requests")
            assert int(refused.headers["retry-after"]) >= 1


class TestIdempotency:
    def test_done_once(self, http: httpx.Client) -> None:
        def post(key: str, name: str) -> httpx.Response:
            return http.post("/v1/jobs", json={"name": name}, headers={"idempotency-key": key})

        first, again = post("k1", "a"), post("k1", "a")
        assert first.status_code == again.status_code == 201
        assert first.json() == again.json()
        assert again.headers["location"] == first.headers["location"]
        assert again.headers["idempotency-replayed"] == "true"
        assert code(post("k1", "b")) == (422, "idempotency_key_reused")
        assert post("k2", "a").json()["id"] != first.json()["id"]
        assert code(post("x" * 256, "a")) == (422, "bad_idempotency_key")
        assert code(post("a b", "a")) == (422, "bad_idempotency_key")
        assert code(post("k3", "a\nb")) == (422, "invalid")
        assert code(post("k3", "a\nb")) == (422, "invalid")

    def test_answers_outlive_the_daemon_and_secrets_do_not(self, node: Node) -> None:
        with node.http() as http:
            job = http.post("/v1/jobs", json={"name": "a"}, headers={"idempotency-key": "a"}).json()
            path = f"/v1/jobs/{job['id']}/faults:inject"
            missing = http.post(path, json={}, headers={"idempotency-key": "b"})
            assert code(missing) == (404, "not_found")
        node.kill()
        assert job["environment"]["XMIG_JOB"].encode() not in node.database.read_bytes()
        with sqlite3.connect(node.database) as database:  # a request in the middle of which the daemon was killed
            database.execute(
                "INSERT INTO idempotency_keys (caller, key, request, headers, at) "
                "SELECT caller, 'c', request, headers, at FROM idempotency_keys WHERE key = 'a'"
            )
        database.close()
        node.start()
        with node.http() as http:
            again = http.post("/v1/jobs", json={"name": "a"}, headers={"idempotency-key": "a"})
            assert code(again) == (409, "answer_not_kept")
            assert http.post(path, json={}, headers={"idempotency-key": "b"}).json() == missing.json()
            lost = http.post("/v1/jobs", json={"name": "a"}, headers={"idempotency-key": "c"})
            assert code(lost) == (409, "outcome_unknown")
            assert len(http.get("/v1/jobs").json()) == 1


class TestDevices:
    def test_what_is_shown(self, http: httpx.Client) -> None:
        device = http.get("/v1/devices/cpu:0").json()
        assert (device["state"], device["cordoned"], device["utilisation"]) == ("ready", False, None)
        assert (device["memory_bytes"], device["used_bytes"], device["free_bytes"]) == (1 << 30, 0, 1 << 30)

    def test_changes_need_what_was_seen(self, http: httpx.Client) -> None:
        path = "/v1/devices/cpu:0"
        etag = http.get(path).headers["etag"]
        assert code(http.patch(path, json={"cordoned": True})) == (428, "precondition_required")
        assert code(http.patch(path, json={"cordoned": True}, headers={"if-match": '"99"'})) == (412, "stale")
        changed = http.patch(path, json={"cordoned": True, "reason": "fan"}, headers={"if-match": etag})
        assert (changed.status_code, changed.json()["state"], changed.json()["cordon_reason"]) == (
            200, "cordoned", "fan",
        )  # fmt: skip
        assert code(http.patch(path, json={"cordoned": False}, headers={"if-match": etag})) == (412, "stale")
        etag = http.get(path).headers["etag"]
        assert etag == changed.headers["etag"]
        assert http.patch(path, json={"cordoned": False}, headers={"if-match": etag}).json()["state"] == "ready"
        assert code(http.patch("/v1/devices/x", json={}, headers={"if-match": "*"})) == (404, "not_found")

    def test_a_cordoned_device_gets_no_new_process(self, node: Node) -> None:
        from tests.daemon.node import Program

        def cordon(device: str) -> None:
            with node.http() as http:
                changed = http.patch(
                    f"/v1/devices/{device}", json={"cordoned": True, "reason": "fan"}, headers={"if-match": "*"}
                )
                assert changed.status_code == 200

        cordon("cpu:0")
        with node.http() as http:
            job = http.post("/v1/jobs", json={"device": "cpu:0"}).json()
        with Program(node, job=job["environment"]["XMIG_JOB"]) as wants_it:
            status, _, _, message = wants_it.welcome()
            assert status != 0
            assert "cpu:0 is cordoned and takes no new process: fan" in message
        with Program(node) as takes_any:
            assert takes_any.welcome()[0] == 0
            assert node.processes()[0]["device"] == "cpu:1"
            cordon("cpu:1")
            node.kill()  # a cordon outlives the daemon
            node.start()
            with Program(node) as finds_none:
                assert "every device of this node is cordoned" in finds_none.welcome()[3]


class TestAudit:
    def test_intent_and_outcome(self, http: httpx.Client) -> None:
        http.post("/v1/jobs", json={"name": "audited"}, headers={"x-request-id": "r1"})
        http.request("DELETE", "/v1/jobs/none", headers={"x-request-id": "r2"})

        def entries() -> list[dict[str, object]]:
            found = [each for each in http.get("/v1/audit").json() if each["request_id"] in ("r1", "r2")]
            return found if len(found) == 4 else []

        rows = {(row["request_id"], row["entry"]): row for row in until(entries, "four entries")}
        made, refused = rows["r1", "outcome"], rows["r2", "outcome"]
        assert json.loads(rows["r1", "intent"]["detail"]["body"]) == {"name": "audited"}  # type: ignore[index]
        assert (made["outcome"], made["status"], made["intent_id"]) == ("done", 201, rows["r1", "intent"]["id"])
        assert (refused["outcome"], refused["status"], refused["action"]) == (
            "not_found", 404, "DELETE /v1/jobs/none",
        )  # fmt: skip

    def test_nothing_is_changed_or_deleted(self, engine: Engine) -> None:
        with engine.begin() as connection:
            connection.execute(text(
                "INSERT INTO audit (at, entry, request_id, requestor, via, action, detail) "
                "VALUES (1, 'intent', 'r', 'user 0', 'unix', 'POST /', '{}')"
            ))  # fmt: skip
        for statement in ("UPDATE audit SET requestor = 'me'", "DELETE FROM audit"):
            with pytest.raises(IntegrityError, match="append-only"), engine.begin() as connection:
                connection.execute(text(statement))


def test_the_openapi_document(http: httpx.Client) -> None:
    assert http.get("/openapi.json").status_code == 200


def test_paths(http: httpx.Client) -> None:
    for path in ("/v1/processes/%00", "/v1/operations/" + "x" * 65, "/v1/jobs/%ff"):
        assert http.get(path).status_code in (404, 422), path


class Audit:
    """Remembers what it is sent."""

    def __init__(self) -> None:
        self.outcomes: list[tuple[str, str, int | None]] = []

    async def intent(self, caller: Caller, action: str, **_: object) -> int:
        return 1

    def outcome(self, intent: int, caller: Caller, action: str, outcome: str, *, status: int, **_: object) -> None:
        self.outcomes.append((action, outcome, status))


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_defect_is_a_problem_too(writer: Writer, method: str) -> None:
    log.configure()  # as the daemon does; what structlog does by itself draws the whole application into the traceback
    app = FastAPI(exception_handlers={Exception: on_error})

    @app.api_route("/broken", methods=[method], operation_id="broken")
    def broken() -> None:
        raise ZeroDivisionError("the secret of the machine")

    audit, requests, nobody = Audit(), Requests(), cast(Any, None)
    peer = (Peer(1, 0, 0), frozenset[int]())

    async def test() -> httpx.Response:
        gate = make_gate(
            app, settings=Settings(), writer=writer, operations=nobody, tokens=nobody, audit=cast(Any, audit),
            operators=None, requests=requests,
        )  # fmt: skip

        async def local(scope: Any, receive: Any, send: Any) -> None:
            await gate({**scope, "state": {"peer": peer}}, receive, send)

        transport = httpx.ASGITransport(local)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return await http.request(method, "/broken", headers={"idempotency-key": "k"})

    answer = asyncio.run(test())
    assert code(answer) == (500, "internal")
    assert "secret" not in answer.text
    assert answer.headers["x-request-id"]
    assert audit.outcomes == ([("POST /broken", "internal", 500)] if method == "POST" else [])
    again = asyncio.run(test())  # an answer that is our fault is not kept: the request may be tried again
    assert "idempotency-replayed" not in again.headers
    assert requests.counts == {(method, "/broken", 500): 2}


class TestAcknowledging:
    def test_a_fault_is_seen_to_once(self, node: Node) -> None:
        with Program(node) as program, node.http() as http:
            assert program.welcome()[0] == 0
            os.kill(node.wait_for_standby()["server_pid"], signal.SIGKILL)
            fault = until(lambda: http.get("/v1/faults").json(), "the fault")[0]
            assert (fault["acknowledged_at"], fault["acknowledged_by"]) == (None, None)
            path = f"/v1/faults/{fault['id']}"
            before = http.get(path).headers["etag"]
            status, answer = request_as(node, 60_011, "POST", f"{path}:ack")
            assert (status, answer["code"]) == (404, "not_found")  # somebody else's
            first = http.post(f"{path}:ack")
            assert first.status_code == 200, first.text
            assert first.headers["etag"] == http.get(path).headers["etag"] != before
            assert first.json()["acknowledged_by"]
            assert http.post(f"{path}:ack").json() == first.json()
            assert http.get("/v1/faults", params={"acknowledged": False}).json() == []
            seen = http.get("/v1/faults", params={"acknowledged": True}).json()
            assert [each["id"] for each in seen] == [fault["id"]]

            def reported() -> list[int]:
                events = http.get("/v1/events").json()
                return [event["data"]["fault"] for event in events if event["type"] == "fault.acknowledged"]

            assert until(reported, "the event") == [fault["id"]]
            assert f"POST {path}:ack" in {entry["action"] for entry in http.get("/v1/audit").json()}
        assert code(node_answer(node, "POST", "/v1/faults/99999:ack")) == (404, "not_found")


def node_answer(node: Node, method: str, path: str) -> httpx.Response:
    with node.http() as http:
        return http.request(method, path)
