"""Checkpoints on the command line, as far as no program is needed for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.daemon.node import Node
from xmigd.cli.exits import Exit

from .conftest import Scripted, ctl


def shown(node: Node) -> Any:
    return json.loads(ctl(node, "checkpoint", "policy", "show", "trains", "-o", "json").stdout)


def test_policies(node: Node) -> None:
    with node.http() as http:
        http.post("/v1/jobs", json={"name": "trains"})
    assert (shown(node)["source"], shown(node)["every_minutes"]) == ("settings", None)
    done = ctl(node, "checkpoint", "policy", "set", "trains", "--every", "60", "--keep", "2")
    assert done.stdout == "trains: a checkpoint every 60 minutes; the newest 2 are kept\n"
    done = ctl(node, "checkpoint", "policy", "set", "trains", "--before-drain")
    assert done.stdout == "trains: a checkpoint every 60 minutes and one before a drain; the newest 2 are kept\n"
    assert (shown(node)["source"], shown(node)["version"], shown(node)["keep"]) == ("job", 2, 2)
    done = ctl(node, "checkpoint", "policy", "set", "trains", "--every", "0", "--no-before-drain")
    assert done.stdout == "trains: no checkpoints without a request\n"
    done = ctl(node, "checkpoint", "policy", "rm", "trains")
    assert done.stdout == "trains, by the settings: no checkpoints without a request\n"
    assert shown(node)["source"] == "settings"
    assert ctl(node, "checkpoint", "policy", "show", "nothing").returncode == Exit.NOT_FOUND
    assert ctl(node, "checkpoint", "policy", "set", "trains", "--every", "1e9").returncode == Exit.USAGE
    assert ctl(node, "checkpoint", "policy", "set", "trains", "--keep", "0").returncode == Exit.USAGE


def test_the_key_is_not_sent(scripted: Scripted, tmp_path: Path) -> None:
    """Its file's path is, from the root on: the daemon has another working directory."""
    (tmp_path / "key").write_text("ab" * 32)
    checkpoint = {"id": "c" * 32, "job_name": "trains"}

    def answer(method: str, path: str, body: Any) -> tuple[int, Any]:
        if path.startswith("/v1/checkpoints?"):
            return 200, [checkpoint]
        return 202, {"id": "o", "kind": "export", "state": "pending"}

    scripted.answer = answer
    done = ctl(scripted, "checkpoint", "export", "ccc", "--key-file", f"{tmp_path}/./key", "--no-wait")
    assert done.returncode == 0
    method, path, body, _ = scripted.requests[-1]
    assert (method, path) == ("POST", f"/v1/checkpoints/{'c' * 32}:export")
    assert body == {"key_file": str(tmp_path / "key")}


def test_a_key_is_for_files(node: Node, tmp_path: Path) -> None:
    done = ctl(node, "checkpoint", "verify", "ccc", "--key-file", str(tmp_path / "key"))
    assert (done.returncode, "--offline" in done.stderr) == (Exit.USAGE, True)


def test_a_signal_is_not_for_strict_jobs(node: Node) -> None:
    done = ctl(node, "run", "--strict", "--checkpoint-on-signal", "USR1", "--", "true")
    assert (done.returncode, "--strict" in done.stderr) == (Exit.USAGE, True)
