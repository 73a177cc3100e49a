"""xmigctl check-movable: a row for each obstacle, what the other node needs, and an exit code."""

from __future__ import annotations

import json
from typing import Any

from tests.daemon.node import Node, Program
from xmigd.cli.exits import Exit

from .conftest import Answer, Scripted, ctl

JOB, PROCESS = "5" * 32, "7" * 32


def obstacle(stops: str, what: str) -> dict[str, Any]:
    return {"code": "device", "pid": 7, "what": what, "why": "[red]because", "hint": "close it", "stops": stops}


def answers(scripted: Scripted, *obstacles: dict[str, Any]) -> dict[str, Any]:
    stops = {each["stops"] for each in obstacles}
    verdict = {"dumpable": "here" not in stops, "movable": stops <= {"depends"}}
    program = {"process_id": PROCESS, "pid": 7, "pids": [7], "obstacles": list(obstacles)} | verdict
    found = {"job": JOB, "programs": [program]} | verdict

    def answer(method: str, path: str, body: Any) -> Answer:
        if path == f"/v1/jobs/{JOB}/movable":
            return 200, found
        return 200, [{"id": JOB, "name": "trains", "processes": 1}]

    scripted.answer = answer
    return found


class TestCheckMovable:
    def test_a_row_for_each_obstacle(self, scripted: Scripted) -> None:
        answers(
            scripted, obstacle("here", "descriptor 3: /dev/kvm"), obstacle("elsewhere", "descriptor 4: pipe"),
            obstacle("depends", "2 files"), obstacle("depends", "2 files"),
        )  # fmt: skip
        done = ctl(scripted, "check-movable", "trains")
        assert (done.returncode, done.stderr) == (Exit.REFUSED, "")
        lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
        assert lines == [
            "PROCESS PID STOPS WHAT WHY HINT",
            f"{PROCESS[:12]} 7 the dump descriptor 3: /dev/kvm [red]because close it",
            f"{PROCESS[:12]} 7 moving descriptor 4: pipe [red]because close it",
            "",
            "the other node needs the same:",
            "2 files; close it",
        ]

    def test_nothing_is_in_the_way(self, scripted: Scripted) -> None:
        answers(scripted)
        done = ctl(scripted, "check-movable", JOB[:5])
        assert (done.returncode, done.stdout.strip()) == (Exit.OK, "nothing stands in the way")

    def test_what_the_other_node_needs_is_no_obstacle(self, scripted: Scripted) -> None:
        answers(scripted, obstacle("depends", "2 files"))
        done = ctl(scripted, "check-movable", "trains")
        assert done.returncode == Exit.OK
        assert done.stdout.splitlines()[0] == "nothing stands in the way"

    def test_json(self, scripted: Scripted) -> None:
        found = answers(scripted, obstacle("here", "descriptor 3: /dev/kvm"))
        done = ctl(scripted, "check-movable", "trains", "--output", "json")
        assert (done.returncode, json.loads(done.stdout)) == (Exit.REFUSED, found)

    def test_of_a_daemon(self, node: Node) -> None:
        assert ctl(node, "check-movable", "nothing").returncode == Exit.NOT_FOUND
        with Program(node) as program:
            assert program.welcome()[0] == 0
            (process,) = node.processes(live=True)
            done = ctl(node, "check-movable", process["job_id"])
        assert done.returncode == Exit.REFUSED
        assert "descriptor 0: pipe:" in done.stdout
