"""xmigctl consolidate: what it prints and with which code it ends; who may use it."""

from __future__ import annotations

import json
from typing import Any

from tests.api.callers import request_as
from tests.cli.conftest import ctl
from tests.daemon.conftest import make_node, peer_native
from tests.daemon.conftest import node as scripted
from tests.daemon.node import Node, Program, until
from tests.daemon.test_supervision import started
from tests.harness import needs_root
from xmigd.cli.exits import Exit

__all__ = ["make_node", "peer_native", "scripted"]


def both_run(node: Node) -> list[dict[str, Any]]:
    return [row for row in node.get("/v1/processes") if row["state"] == "running" and row["standby"] == "warm"]


def test_packing_with_the_command_line(scripted: Node) -> None:
    node = scripted
    nothing = ctl(node, "consolidate", "plan")
    assert (nothing.returncode, "devices freed: none; moves: 0" in nothing.stdout) == (Exit.OK, True)
    with Program(node) as first, Program(node) as second:
        for program in (first, second):
            started(node, program)
        until(lambda: len(both_run(node)) == 2, "the daemon has written both down, and both have memory")
        job = both_run(node)[0]["job_id"]
        assert "devices freed: none" in ctl(node, "consolidate", "plan", "--alone", job).stdout
        assert ctl(node, "consolidate", "plan", "--job", "nobody").returncode == Exit.NOT_FOUND
        assert ctl(node, "consolidate", "apply", "nothing").returncode == Exit.NOT_FOUND
        shown = ctl(node, "consolidate", "plan", "--assume-busy", "0")
        assert shown.returncode == Exit.OK, shown.stderr
        assert [word for word in ("BEFORE", "AFTER", "FROM", "SLOW-DOWN") if word not in shown.stdout] == []
        made = json.loads(ctl(node, "consolidate", "plan", "--assume-busy", "0", "-o", "json").stdout)
        (move,) = made["moves"]
        unanswered = ctl(node, "consolidate", "apply", made["id"])
        assert (unanswered.returncode, "say --yes" in unanswered.stderr) == (Exit.USAGE, True)
        node.behave(round="refuse")
        failed = ctl(node, "consolidate", "apply", made["id"], "--yes", "--guard", "0")
        assert failed.returncode == Exit.OPERATION_FAILED
        assert "the device is full; the moves before it were undone" in failed.stderr
        node.behave()
        done = ctl(node, "consolidate", "apply", made["id"][:12], "--yes", "--guard", "1")
        assert done.returncode == Exit.OK, done.stderr
        assert f"{move['source']} → {move['target']}" in done.stdout
        assert f"1 process(es) were moved; devices freed: {move['source']}" in done.stdout
        assert "was not judged" in done.stdout
        stale = ctl(node, "consolidate", "apply", made["id"], "--yes")
        assert (stale.returncode, "the node has changed" in stale.stderr) == (Exit.REFUSED, True)
        back = json.loads(ctl(node, "consolidate", "plan", "--balance", "--assume-busy", "0.3", "-o", "json").stdout)
        assert len(back["moves"]) == 1
        empty = ctl(node, "consolidate", "plan", "--job", job, "--exclude-job", job, "-o", "json")
        assert ctl(node, "consolidate", "apply", json.loads(empty.stdout)["id"], "--yes").returncode == Exit.REFUSED


@needs_root
def test_only_operators_plan_and_apply(scripted: Node) -> None:
    for path in ("/v1/consolidation-plans", "/v1/consolidation-plans/some/apply"):
        status, problem = request_as(scripted, 60_010, "POST", path, body={})
        assert (status, problem["code"]) == (403, "operators_only")
    status, problem = request_as(scripted, 60_010, "GET", "/v1/consolidation-plans")
    assert (status, problem["code"]) == (403, "operators_only")
