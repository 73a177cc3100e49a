"""A job's ranks: who sees them, and how many an answer has."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import httpx
import pytest

from tests.daemon.node import Node, Program, until

from .callers import request_as

RANKS = 3


@pytest.fixture(scope="module")
def job(daemon: Node) -> Iterator[str]:
    """Three processes that share a communicator."""
    daemon.behave(ranks=RANKS)
    with daemon.http() as http, contextlib.ExitStack() as stack:
        made = http.post("/v1/jobs", json={"name": "trains"}).json()
        for _ in range(RANKS):
            program = stack.enter_context(Program(daemon, made["environment"]["XMIG_JOB"]))
            assert program.welcome()[0] == 0
        path = f"/v1/jobs/{made['id']}/ranks"
        until(lambda: daemon.get(path)["total"] == RANKS or None, "all their communicators are known")
        yield path


class TestRanks:
    def test_all_of_them(self, http: httpx.Client, job: str) -> None:
        found = http.get(job).json()
        assert [one["rank"] for one in found["ranks"]] == list(range(RANKS))
        assert found["next_rank"] is None
        for one in found["ranks"]:
            assert (one["state"], one["activity"], one["waits_for"]) == ("running", "running", None)
            assert one["communicators"] == [{"communicator": "a" * 64, "rank": one["rank"]}]
            (span,) = one["timeline"]
            assert (span["activity"], span["ms"]) == ("running", None)
        (communicator,) = found["communicators"]
        assert (communicator["size"], communicator["state"]) == (RANKS, "whole")
        assert (found["snapshots"], found["recoveries"]) == ([], [])

    def test_page_by_page(self, http: httpx.Client, job: str) -> None:
        first = http.get(job, params={"limit": 2}).json()
        assert ([one["rank"] for one in first["ranks"]], first["next_rank"], first["total"]) == ([0, 1], 2, RANKS)
        second = http.get(job, params={"limit": 2, "from_rank": first["next_rank"]}).json()
        assert ([one["rank"] for one in second["ranks"]], second["next_rank"]) == ([2], None)

    def test_they_are_their_owner_s(self, daemon: Node, job: str) -> None:
        status, problem = request_as(daemon, 60_010, "GET", job)
        assert (status, problem["code"]) == (404, "not_found")
        assert request_as(daemon, 60_011, "GET", job, groups=(60_001,))[0] == 200

    def test_a_job_without_communicators_has_none(self, daemon: Node, http: httpx.Client) -> None:
        made = http.post("/v1/jobs", json={"name": "alone"}).json()
        found = http.get(f"/v1/jobs/{made['id']}/ranks").json()
        assert (found["total"], found["ranks"], found["communicators"]) == (0, [], [])

    def test_there_is_no_such_job(self, http: httpx.Client) -> None:
        answer = http.get("/v1/jobs/nothing/ranks")
        assert (answer.status_code, answer.json()["code"]) == (404, "not_found")
