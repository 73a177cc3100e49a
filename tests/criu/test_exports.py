"""An encrypted checkpoint on its way from one daemon to another one, by the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.criu.stopping import stop_at_checkpoint
from tests.criu.test_client_dump import ROOT, STEPS, criu_or_skip, let_end, start, wait_for_lines
from tests.migration.moves import ended, succeeded
from xmigd.client import Refused
from xmigd.demo.node import Node

pytestmark = pytest.mark.criu


def xmigctl(node: Node, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "xmigd.cli", *map(str, arguments)], env=node.environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


def answer(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_with_a_key(native_dir: Path, tmp_path: Path) -> None:
    output, undisturbed = tmp_path / "steps", tmp_path / "undisturbed"
    key, other_key = tmp_path / "key", tmp_path / "other"
    for path, digits in ((key, "ab" * 32), (other_key, "cd" * 32)):
        path.write_text(digits)
        path.chmod(0o600)
    let_end(undisturbed)
    with harness.own_node(native_dir, port=-1, criu=criu_or_skip()) as node:
        assert start(node, native_dir, undisturbed, 0).finish()[0] == 0
        program = start(node, native_dir, output, 0.02)
        wait_for_lines(output, STEPS // 4)
        checkpoint = stop_at_checkpoint(program)
        key.chmod(0o644)
        with pytest.raises(Refused) as caught:
            node.client.post(f"/v1/checkpoints/{checkpoint}:export", {"key_file": str(key)})
        assert caught.value.code == "bad_key"
        key.chmod(0o600)
        done = answer(xmigctl(node, "checkpoint", "export", checkpoint, "--key-file", key, "-o", "json"))
        assert done["result"]["encrypted"]
        file = Path(done["result"]["path"])
        assert (file.stat().st_mode & 0o777, b"XMPIECE" in file.read_bytes()) == (0o600, False)
        carried = file.read_bytes()
        # The key is nowhere but in its file.
        assert ("ab" * 32) not in node.log.read_text() + json.dumps(node.client.get("/v1/audit", limit=1000))

    with harness.own_node(native_dir, port=-1, criu=criu_or_skip()) as other:
        (other.folder / "checkpoints" / "exported").mkdir(parents=True)
        (other.folder / "checkpoints" / "exported" / file.name).write_bytes(carried)
        for body in ({"key_file": str(other_key)}, {}):
            failed = ended(other, other.client.post("/v1/checkpoints:import", {"file": file.name} | body))
            assert (failed["state"], failed["error"]["code"]) == ("failed", "bad_key")
        assert other.client.get("/v1/checkpoints") == []
        answer(xmigctl(other, "checkpoint", "import", file.name, "--key-file", key, "-o", "json"))
        succeeded(other, other.client.post(f"/v1/checkpoints/{checkpoint}:restore", {"devices": []}))
        let_end(output)
        wait_for_lines(output, STEPS)
        assert output.read_text() == undisturbed.read_text()
