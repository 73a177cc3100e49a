"""xmigctl migrate, migrations, suspend, resume, drain: what they print and with which code they end."""

from __future__ import annotations

import json

from tests.cli.conftest import ctl
from tests.daemon.node import Node, Program
from tests.daemon.test_supervision import started
from xmigd.cli.exits import Exit


def test_moving_with_the_command_line(node: Node) -> None:
    with Program(node) as program:
        row = started(node, program)
        process, process_name = row["id"], row["job_name"]
        plan = ctl(node, "migrate", "--plan", process)
        assert plan.returncode == Exit.OK
        assert "the process is on cpu:0 (same_device)" in plan.stdout
        assert ctl(node, "migrate", "--plan", process, "cpu:0").returncode == Exit.REFUSED
        assert ctl(node, "migrate", process).returncode == Exit.USAGE
        refused = ctl(node, "migrate", process, "cpu:0")
        assert (refused.returncode, "the process is where it was" in refused.stderr) == (Exit.REFUSED, True)
        moved = ctl(node, "migrate", process, "cpu:1")
        assert moved.returncode == Exit.OK, moved.stderr
        assert f"{process[:12]} is on cpu:1: it stood still for" in moved.stdout
        node.behave(round="refuse")
        failed = ctl(node, "migrate", process, "cpu:0")
        assert failed.returncode == Exit.OPERATION_FAILED
        assert "failed in phase copying: the device is full" in failed.stderr
        node.behave()
        suspended = ctl(node, "suspend", process, "-o", "json")
        assert json.loads(suspended.stdout)["result"]["process_location"] == "host"
        assert ctl(node, "suspend", process).returncode == Exit.REFUSED
        resumed = ctl(node, "resume", process, "--device", "cpu:0")
        assert (resumed.returncode, resumed.stdout) == (Exit.OK, f"{process_name} · {process[:12]} goes on, on cpu:0\n")
        drained = ctl(node, "drain", "cpu:0", "--yes")
        assert drained.returncode == Exit.OK, drained.stderr
        assert "1 program(s) were moved; cpu:0 is cordoned" in drained.stdout
        assert ctl(node, "drain", "cpu:1", "--yes").returncode == Exit.OPERATION_FAILED
        listed = ctl(node, "migrations")
        assert [word for word in ("suspend", "resume", "failed", "done") if word not in listed.stdout] == []
