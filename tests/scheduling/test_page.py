"""docs/schedulers.md: every example does what the page says."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.migration.moves import info
from tests.recovery.conftest import Starter
from xmigd.demo.node import Node
from xmigd.webhooks.sender import signature

PAGE = harness.ROOT / "docs" / "schedulers.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.M | re.S)


def test_the_examples(daemon: Node, start: Starter, tmp_path: Path) -> None:
    for tool in ("curl", "jq"):
        if shutil.which(tool) is None:
            pytest.skip(f"there is no {tool}")
    program = start("stepwise", device="cpu:0")
    harness.go(program)
    assert harness.steps(program, 5)
    labels = {"queue": "night", "team": "vision"}
    daemon.client.patch(f"/v1/jobs/{program.job}", {"labels": labels, "external_id": "slurm:1"}, "*")
    script = "set -euo pipefail\n" + "\n".join(blocks("sh")).replace("/run/xmig/", f"{daemon.folder}/")
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=120, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr}"
    assert 'rel="next"' in done.stdout
    assert daemon.client.get(f"/v1/jobs/{program.job}")["labels"] == {"queue": "day"}
    (plan,) = re.findall(r'\{\n  "moves".*?^\}$', done.stdout, re.M | re.S)
    assert json.loads(plan)["stuck"] == 0
    assert daemon.client.get("/v1/webhooks") == []
    program.until("running")
    assert info(program)["device"] == "cpu:1"
    assert harness.steps(program, 5)
    harness.output(program)


def test_the_signature() -> None:
    names: dict[str, Any] = {}
    exec("\n".join(blocks("python")), names)
    now = str(int(names["time"].time()))
    secret, body = "sixteen or more characters", b'{"id":5}'
    headers = {"Xmig-Timestamp": now, "Xmig-Signature": signature(secret, now, body)}
    is_genuine = names["is_genuine"]
    assert is_genuine(secret, headers, body)
    assert not is_genuine(secret, headers, b'{"id":6}')
    assert not is_genuine("another secret", headers, body)
    assert not is_genuine(secret, {**headers, "Xmig-Timestamp": "5"}, body)
