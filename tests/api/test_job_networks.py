"""Jobs that are to have a network of their own, and get none."""

from __future__ import annotations

import httpx

from tests.api.callers import request_as
from tests.daemon.node import Node


def test_what_is_refused(http: httpx.Client, daemon: Node) -> None:
    """Users' jobs have none, nor those whose end nobody would see, nor those of one node."""
    body = {"command": "train", "network": True}
    status, problem = request_as(daemon, 60_010, "POST", "/v1/jobs", body=body | {"watch": True})
    assert (status, problem["code"]) == (403, "forbidden")
    for fields in ({}, {"watch": True}):
        refused = http.post("/v1/jobs", json=body | fields)
        assert (refused.status_code, refused.json()["code"]) == (422, "invalid")
    assert http.get("/v1/jobs").json() == []
