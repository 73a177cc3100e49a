"""Every endpoint, with what Schemathesis makes up, against a real daemon: no failure of ours, nothing that the document
does not say; then in sequences that follow the document's links."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import schemathesis

from tests.api.contract import CHECKS, Sequences, examples, schema
from tests.daemon.conftest import in_memory
from tests.daemon.node import Node


@pytest.fixture(scope="module")
def served(peer_native: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Address, and headers of a caller who may do everything."""
    folder = Path(tempfile.mkdtemp(prefix="xmig-", dir=in_memory()))
    node = Node(folder, peer_native, XMIG_REQUEST_RATE="0", XMIG_LOG_LEVEL="info")
    node.start()
    with node.http() as http:
        token = http.post("/v1/tokens", json={"name": "contract", "scope": "admin"}).json()["token"]
        http.post("/v1/jobs", json={"name": "job"})
    yield node.get("/v1/node")["tcp_address"], {"Authorization": f"Bearer {token}"}
    node.close()
    assert "failed inside xmigd" not in node.log.read_text()
    shutil.rmtree(folder)


@schema.parametrize()
@examples(8)
def test_each_endpoint(case: schemathesis.Case, served: tuple[str, dict[str, str]]) -> None:
    address, headers = served
    case.call_and_validate(base_url=address, headers=headers, checks=CHECKS)


def test_sequences(served: tuple[str, dict[str, str]]) -> None:
    class OfThisDaemon(Sequences):
        address, headers = served

        def setup(self) -> None:
            """Each sequence finds what the others found: of peers and webhooks there are only so many, and one each."""
            with httpx.Client(base_url=self.address, headers=self.headers, trust_env=False, timeout=60) as http:
                for kind, name in (("peers", "name"), ("webhooks", "id")):
                    for each in http.get(f"/v1/{kind}").json():
                        http.delete(f"/v1/{kind}/{each[name]}")

    OfThisDaemon.run(settings=examples(15, stateful_step_count=8))
