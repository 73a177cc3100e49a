"""Policies of checkpoints in the API: whose they are, and what is refused."""

from __future__ import annotations

import httpx
import pytest

from tests.api.callers import request_as
from tests.daemon.node import Node
from tests.harness import needs_root


@pytest.fixture
def path(http: httpx.Client) -> str:
    job = http.post("/v1/jobs", json={"name": "quiet"}).json()["id"]
    return f"/v1/jobs/{job}/checkpoint-policy"


class TestCheckpointPolicies:
    def test_the_settings_apply_until_a_job_has_its_own(self, http: httpx.Client, path: str) -> None:
        found = http.get(path)
        assert found.headers["etag"] == '"0"'
        policy = found.json()
        assert (policy["source"], policy["every_minutes"], policy["next_at"]) == ("settings", None, None)
        made = http.put(path, json={"every_minutes": 60}, headers={"If-Match": '"0"'})
        assert (made.status_code, made.headers["etag"], made.json()["source"]) == (200, '"1"', "job")
        assert http.delete(path, headers={"If-Match": '"1"'}).status_code == 204
        assert http.get(path).json() == policy

    def test_who_changes_it_has_seen_it(self, http: httpx.Client, path: str) -> None:
        http.put(path, json={"every_minutes": 60}, headers={"If-Match": "*"})
        for method in ("PUT", "DELETE"):
            body = {"every_minutes": 5} if method == "PUT" else None
            assert http.request(method, path, json=body).status_code == 428
            assert http.request(method, path, json=body, headers={"If-Match": '"0"'}).status_code == 412
        assert http.get(path).json()["every_minutes"] == 60

    def test_they_are_exact_unless_it_says_otherwise(self, http: httpx.Client, path: str) -> None:
        assert http.get(path).json()["keep_bits"] is None
        http.put(path, json={"every_minutes": 60, "keep_bits": 8}, headers={"If-Match": "*"})
        assert http.get(path).json()["keep_bits"] == 8
        http.put(path, json={"every_minutes": 60}, headers={"If-Match": "*"})
        assert http.get(path).json()["keep_bits"] is None

    @pytest.mark.parametrize(
        "body",
        [{"every_minutes": 0}, {"keep": 0}, {"keep_bits": 0}, {"keep_bits": 52}, {"every": 5}, {"every_minutes": 1e9}],
    )
    def test_what_is_no_policy(self, http: httpx.Client, path: str, body: dict[str, float]) -> None:
        assert http.put(path, json=body, headers={"If-Match": "*"}).status_code == 422
        assert http.get(path).json()["version"] == 0

    @needs_root
    def test_others_do_not_see_it(self, daemon: Node, path: str) -> None:
        for method, body in (("GET", None), ("PUT", {"keep": 1}), ("DELETE", None)):
            status, problem = request_as(daemon, 60_010, method, path, body=body, headers={"If-Match": "*"})
            assert (status, problem["code"]) == (404, "not_found")
