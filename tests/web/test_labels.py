"""A job's page has its labels and what its scheduler calls it, as text."""

from __future__ import annotations

import httpx

from tests.web.front import PATIENCE, Front
from xmigd.demo.node import Node


def test_labels_on_the_page(node: Node, front: Front) -> None:
    labels = {"queue": "night", "note": "<script>alert(1)</script>"}
    body = {"name": "labelled", "labels": labels, "external_id": "slurm:4711", "priority": "critical"}
    job = node.client.post("/v1/jobs", body)["id"]
    plain = node.client.post("/v1/jobs", {"name": "plain"})["id"]
    page = httpx.get(f"{front.address}/jobs/{job}", trust_env=False, timeout=PATIENCE).text
    assert "queue=night" in page
    assert "slurm:4711" in page
    assert "&lt;script&gt;alert(1)" in page
    assert "<script>alert(1)" not in page
    page = httpx.get(f"{front.address}/jobs/{plain}", trust_env=False, timeout=PATIENCE).text
    assert ("plain" in page, "External id" in page, "Labels" in page) == (True, False, False)
