"""The dashboard finds the daemon where `xmigctl` does."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.daemon.conftest import make_node, node, peer_native
from tests.daemon.node import Node
from tests.web.front import PATIENCE, Front

__all__ = ["make_node", "node", "peer_native"]


@pytest.mark.parametrize("by", ["environment", "file"])
def test_the_runtime_directory(node: Node, tmp_path: Path, by: str) -> None:
    front = Front(node)
    del front.environment["XMIG_WEB_API"]
    if by == "environment":
        front.environment["XMIG_RUNTIME_DIR"] = str(node.runtime_dir)
    else:
        file = tmp_path / "xmigd.toml"
        file.write_text(f'runtime_dir = "{node.runtime_dir}"\n')
        front.environment["XMIG_CONFIG"] = str(file)
    with front:
        assert f"api=unix:{node.runtime_dir}/api.sock" in front.log.read_text()
        answer = httpx.get(f"{front.address}/readyz", trust_env=False, timeout=PATIENCE)
        assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
        page = httpx.get(f"{front.address}/jobs", follow_redirects=True, trust_env=False, timeout=PATIENCE)
        assert page.status_code == 200
