"""op and events, against a running daemon: an operation that an earlier one left behind, and what happens meanwhile."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.daemon.node import Node, Program, until
from xmigd.cli.exits import Exit

from .conftest import Scripted, ctl, ctl_process

ID = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def interrupted(node: Node) -> Node:
    """It finds an operation in its database that nobody works at."""
    node.kill()
    connection = sqlite3.connect(node.database)
    columns = [row[1] for row in connection.execute("PRAGMA table_info(operations)")]
    values = {
        "id": ID, "kind": "drain", "state": "running", "phase": "moving", "subject_type": "device",
        "subject_id": "cpu:0", "requestor": "user 0", "request": "{}", "created_at": time.time(),
        "started_at": time.time(), "may_cancel": 1, "may_cancel_why": "", "owner": 0,
    }  # fmt: skip
    row = {name: value for name, value in values.items() if name in columns}
    marks = ", ".join("?" for _ in row)
    connection.execute(f"INSERT INTO operations ({', '.join(row)}) VALUES ({marks})", list(row.values()))
    connection.commit()
    connection.close()
    node.start()
    until(lambda: node.get(f"/v1/operations/{ID}")["state"] == "failed", "it is resolved")
    return node


def test_op(interrupted: Node) -> None:
    node = interrupted
    done = ctl(node, "op", "list", "--state", "failed")
    assert ("drain" in done.stdout, "device cpu:0" in done.stdout) == (True, True), done
    assert json.loads(ctl(node, "op", "list", "-o", "json").stdout)[0]["id"] == ID
    assert "no operations" in ctl(node, "op", "list", "--kind", "migration").stdout
    assert "interrupted" in ctl(node, "op", "show", ID[:6]).stdout
    for command in ("watch", "wait"):
        done = ctl(node, "op", command, ID)
        assert done.returncode == Exit.OPERATION_FAILED
        assert "xmigctl: the drain failed in phase moving: xmigd ended in the middle of it\n  ask for" in done.stderr
    done = ctl(node, "op", "wait", ID, "-o", "json")
    assert (done.returncode, json.loads(done.stdout)["state"]) == (Exit.OPERATION_FAILED, "failed")
    done = ctl(node, "op", "cancel", ID)
    assert (done.returncode, "already" in done.stderr) == (Exit.REFUSED, True)
    assert ctl(node, "op", "show", "nothing").returncode == Exit.NOT_FOUND


def test_op_cancel(scripted: Scripted) -> None:
    running = {"id": "77", "kind": "drain", "state": "running", "phase": "moving"}
    states = iter([running, running, running | {"state": "cancelled"}])
    scripted.answer = lambda method, path, body: (202 if method == "DELETE" else 200, next(states))
    done = ctl(scripted, "op", "cancel", "77")
    assert (done.returncode, done.stdout) == (0, "the drain was cancelled\n")


def test_events(node: Node) -> None:
    with Program(node) as program:
        assert program.welcome()[0] == 0
        process = node.wait_for_standby()
    until(lambda: not node.processes(live=True), "the program's end")
    done = ctl(node, "events")
    assert "job.created" in done.stdout
    rows = json.loads(ctl(node, "events", "-o", "json").stdout)
    assert [row["id"] for row in rows] == sorted(row["id"] for row in rows)
    rows = json.loads(ctl(node, "events", "--type", "process", "--job", process["job_id"], "-o", "json").stdout)
    assert {row["type"] for row in rows} == {"process.state"}
    assert ctl(node, "events", "--after", str(10**9)).stdout == "no events\n"


def test_events_are_followed_across_a_restart(node: Node) -> None:
    follower = subprocess.Popen(
        [sys.executable, "-m", "xmigd.cli", "events", "--follow", "--type", "job.created", "-o", "json"],
        env=node.environment, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert follower.stdout is not None
    try:
        for name in ("one", "two"):
            assert ctl_process(node, "run", "--name", name, "--", "true").returncode == 0
            event = json.loads(follower.stdout.readline())
            assert (event["type"], event["data"]["name"]) == ("job.created", name)
            node.kill()
            node.start()
    finally:
        follower.send_signal(signal.SIGINT)
        follower.communicate(timeout=60)
    assert follower.returncode == 0


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(scripted: Scripted, shell: str) -> None:
    script = ctl(scripted, "completion", shell)
    assert script.returncode == 0
    assert "_XMIGCTL_COMPLETE" in script.stdout


def test_bash_completes(scripted: Scripted, tmp_path: Path) -> None:
    command = tmp_path / "xmigctl"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m xmigd.cli "$@"\n')
    command.chmod(0o755)
    script = ctl(scripted, "completion", "bash").stdout
    lines = f"{script}\nCOMP_WORDS=(xmigctl op wa); COMP_CWORD=2; _xmigctl_completion xmigctl; echo ${{COMPREPLY[@]}}"
    environment = scripted.environment | {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(
        ["bash", "-c", lines], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["watch", "wait"], done
