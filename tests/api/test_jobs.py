"""Jobs as schedulers see them: labels, external ids, lists that are filtered, sorted and paged."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.daemon.node import Node, Program, until

from .callers import request_as

ANY = {"If-Match": "*"}
numbers = itertools.count()


def made(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    answer = http.post("/v1/jobs", json={"name": "job", **fields})
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


@pytest.fixture
def mine(http: httpx.Client) -> Iterator[str]:
    """A label that no other test has; its jobs have ended afterwards."""
    label = f"test=t{next(numbers)}"
    yield label
    for job in http.get("/v1/jobs", params={"label": label, "limit": 1000}).json():
        http.delete(f"/v1/jobs/{job['id']}")


def labelled(mine: str, **more: str) -> dict[str, str]:
    key, _, value = mine.partition("=")
    return {key: value, **more}


def pages(http: httpx.Client, **params: Any) -> Iterator[list[dict[str, Any]]]:
    answer = http.get("/v1/jobs", params=params)
    while True:
        assert answer.status_code == 200, answer.text
        yield answer.json()
        following = answer.links.get("next")
        if following is None:
            return
        answer = http.get(following["url"])


class TestLabels:
    def test_they_are_kept_and_found(self, http: httpx.Client, mine: str) -> None:
        labels = labelled(mine, **{"team.org/queue": "nightly", "empty": ""})
        job = made(http, labels=labels, external_id="slurm:4711")
        assert (job["labels"], job["external_id"]) == (labels, "slurm:4711")
        found = http.get(f"/v1/jobs/{job['id']}").json()
        assert (found["labels"], found["external_id"]) == (labels, "slurm:4711")
        ids = [job["id"]]
        for query in ({"label": [mine, "empty"]}, {"label": [mine, "team.org/queue=nightly"]},
                      {"label": mine, "external_id": "slurm:4711"}):  # fmt: skip
            assert [each["id"] for each in http.get("/v1/jobs", params=query).json()] == ids
        for query in ({"label": [mine, "empty=x"]}, {"label": [mine, "other"]},
                      {"label": mine, "external_id": "slurm:47"}):  # fmt: skip
            assert http.get("/v1/jobs", params=query).json() == []

    @pytest.mark.parametrize(
        "fields",
        [
            {"labels": {"": "x"}}, {"labels": {"a b": "x"}}, {"labels": {"a=b": "x"}}, {"labels": {"-a": "x"}},
            {"labels": {"a" * 64: "x"}}, {"labels": {"a": "x" * 256}}, {"labels": {"a": "x\u202ey"}},
            {"labels": {f"k{n}": "" for n in range(33)}}, {"external_id": ""}, {"external_id": "x" * 256},
            {"external_id": "a\nb"}, {"labels": {"a": 5}},
        ],
    )  # fmt: skip
    def test_limits(self, http: httpx.Client, fields: dict[str, Any]) -> None:
        answer = http.post("/v1/jobs", json={"name": "job", **fields})
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid")

    def test_they_are_changed(self, daemon: Node, http: httpx.Client, mine: str) -> None:
        job = made(http, labels=labelled(mine, a="1", b="2"))
        path = f"/v1/jobs/{job['id']}"
        newest = daemon.get("/v1/events", limit=1)[0]["id"]
        tag = http.get(path).headers["etag"]
        changed = http.patch(path, json={"labels": {"a": None, "c": "3"}}, headers={"If-Match": tag})
        assert changed.json()["labels"] == labelled(mine, b="2", c="3")
        assert changed.headers["etag"] != tag
        assert http.patch(path, json={"external_id": "x:1"}, headers={"If-Match": tag}).status_code == 412
        assert http.patch(path, json={"external_id": "x:1"}).status_code == 428
        assert http.patch(path, json={"external_id": "x:1"}, headers=ANY).json()["external_id"] == "x:1"
        assert http.patch(path, json={"labels": {}}, headers=ANY).json()["external_id"] == "x:1"
        assert http.patch(path, json={"external_id": None}, headers=ANY).json()["external_id"] is None
        many = {f"k{n}": "" for n in range(30)}
        refused = http.patch(path, json={"labels": many}, headers=ANY)
        assert (refused.status_code, refused.json()["code"]) == (422, "invalid")
        assert http.get(path).json()["labels"] == labelled(mine, b="2", c="3")

        def events() -> list[dict[str, Any]]:
            found = daemon.get("/v1/events", after=newest, limit=1000)
            return [each for each in found if each["type"] == "job.changed"]

        assert until(events, "its event")[0]["data"]["labels"] == labelled(mine, b="2", c="3")

    def test_of_others_nobody_knows(self, daemon: Node, http: httpx.Client, mine: str) -> None:
        job = made(http, labels=labelled(mine))
        path = f"/v1/jobs/{job['id']}"
        assert request_as(daemon, 60_010, "PATCH", path, body={"labels": {"a": "b"}}, headers=ANY)[0] == 404
        assert request_as(daemon, 60_010, "GET", f"/v1/jobs?label={mine}") == (200, [])

    def test_they_outlive_the_daemon(self, daemon: Node, http: httpx.Client, mine: str) -> None:
        job = made(http, labels=labelled(mine), external_id="slurm:1")
        daemon.kill()
        daemon.start()
        found = daemon.get(f"/v1/jobs/{job['id']}")
        assert (found["labels"], found["external_id"]) == (labelled(mine), "slurm:1")


class TestFilters:
    def test_by_state(self, daemon: Node, http: httpx.Client, mine: str) -> None:
        created, running, ended = (made(http, labels=labelled(mine)) for _ in range(3))
        http.post(f"/v1/jobs/{ended['id']}:exited", json={"exit_code": 0})
        with Program(daemon, running["environment"]["XMIG_JOB"]) as program:
            program.welcome()
            until(lambda: http.get(f"/v1/jobs/{running['id']}").json()["state"] == "running", "it runs")
            by = {"created": created, "running": running, "ended": ended}
            for state, job in by.items():
                listed = http.get("/v1/jobs", params={"label": mine, "state": state}).json()
                assert [(each["id"], each["state"]) for each in listed] == [(job["id"], state)]
            two = http.get("/v1/jobs", params={"label": mine, "state": ["ended", "created"]}).json()
            assert {each["id"] for each in two} == {ended["id"], created["id"]}
            device = daemon.processes(job=running["id"])[0]["device"]
            assert http.get("/v1/jobs", params={"label": mine, "device": device}).json()[0]["id"] == running["id"]
        assert http.get("/v1/jobs", params={"state": "sleeping"}).status_code == 422

    def test_by_device(self, http: httpx.Client, mine: str) -> None:
        both = made(http, labels=labelled(mine), device="cpu:0,1")
        made(http, labels=labelled(mine), device="cpu:0")
        listed = http.get("/v1/jobs", params={"label": mine, "device": "cpu:1"}).json()
        assert [each["id"] for each in listed] == [both["id"]]
        assert http.get("/v1/jobs", params={"device": "cpu:%"}).status_code == 422

    def test_by_user(self, daemon: Node, http: httpx.Client, mine: str) -> None:
        ours = made(http, labels=labelled(mine))
        status, theirs = request_as(daemon, 60_010, "POST", "/v1/jobs", body={"labels": labelled(mine)})
        assert status == 201
        for user, job in (("root", ours), ("0", ours), ("60010", theirs)):
            listed = http.get("/v1/jobs", params={"label": mine, "user": user}).json()
            assert [each["id"] for each in listed] == [job["id"]]
        refused = http.get("/v1/jobs", params={"user": "nobody-of-this-name"})
        assert (refused.status_code, refused.json()["code"]) == (422, "no_such_user")


class TestPages:
    @pytest.mark.parametrize("sort", ["created", "name", "memory", "state"])
    @pytest.mark.parametrize("reverse", [False, True])
    def test_each_job_comes_once(self, http: httpx.Client, mine: str, sort: str, reverse: bool) -> None:
        """Also those that end, and whatever begins, between two pages."""
        names = ["b", "a", "c", "a", "d"]
        jobs = [made(http, name=name, labels=labelled(mine)) for name in names]
        seen: list[dict[str, Any]] = []
        for page in pages(http, label=mine, sort=sort, reverse=reverse, limit=2):
            assert len(page) <= 2
            seen += page
            for job in jobs[:3]:
                http.post(f"/v1/jobs/{job['id']}:exited", json={"exit_code": 0})
            made(http, name="z" if reverse else "A", labels={"another": "test"})
        assert sorted(each["id"] for each in seen) == sorted(each["id"] for each in jobs)
        if sort == "name":
            assert [each["name"] for each in seen] == sorted(names, reverse=reverse)
        if sort == "created":
            assert [each["id"] for each in seen] == [each["id"] for each in jobs][:: 1 if reverse else -1]

    def test_by_state_in_the_order_of_states(self, http: httpx.Client, mine: str) -> None:
        ended, created = (made(http, labels=labelled(mine)) for _ in range(2))
        http.post(f"/v1/jobs/{ended['id']}:exited", json={"exit_code": 0})
        listed = http.get("/v1/jobs", params={"label": mine, "sort": "state"}).json()
        assert [each["id"] for each in listed] == [created["id"], ended["id"]]

    def test_a_cursor_is_of_one_list(self, daemon: Node, http: httpx.Client, mine: str) -> None:
        for _ in range(3):
            made(http, labels=labelled(mine))
        by_name, by_state = (
            http.get("/v1/jobs", params={"label": mine, "sort": sort, "limit": 1}).links["next"]["url"]
            for sort in ("name", "state")
        )
        for wrong in (by_name.replace("sort=name", "sort=created"), by_name + "x", by_name.split("&cursor=")[0]
                      + "&cursor=eyJ9", by_state.replace("sort=state", "sort=memory")):  # fmt: skip
            assert (answer := http.get(wrong)).status_code == 422, wrong
            assert answer.json()["code"] == "bad_cursor"
        assert request_as(daemon, 60_010, "GET", by_state)[0] == 410  # another user's order
        daemon.kill()
        daemon.start()
        with daemon.http() as again:
            assert len(again.get(by_name).json()) == 1
            refused = again.get(by_state)
            assert (refused.status_code, refused.json()["code"]) == (410, "cursor_expired")

    def test_what_is_older_is_of_the_newest_first(self, http: httpx.Client, mine: str) -> None:
        first, second = (made(http, labels=labelled(mine)) for _ in range(2))
        listed = http.get("/v1/jobs", params={"label": mine, "before": second["id"]}).json()
        assert [each["id"] for each in listed] == [first["id"]]
        assert http.get("/v1/jobs", params={"before": second["id"], "sort": "name"}).status_code == 422
