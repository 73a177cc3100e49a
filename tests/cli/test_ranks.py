"""xmigctl ranks: a table, a time line with a row for each rank, recoveries of all together."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from tests.daemon.node import Node, Program, until
from xmigd.timeline import draw

from .conftest import Scripted, ctl

JOB = "5" * 32


def span(at: float, ms: float | None, activity: str) -> dict[str, Any]:
    return {"at": at, "ms": ms, "activity": activity, "round": None, "waited_for": None}


def rank(number: int, *timeline: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "rank": number, "process_id": str(number) * 32, "job_id": JOB, "pid": 7, "device": "cpu:0", "state": "running",
        "activity": "running", "since": 0.0, "waits_for": None, "communicators": [], "timeline": list(timeline),
    } | more  # fmt: skip


def test_a_row_for_each_rank() -> None:
    lines = draw(
        [
            rank(9, span(100.0, 5000, "running"), span(105.0, 100, "ending"), span(105.1, 400, "restoring"),
                 span(105.5, None, "running")),
            rank(10, span(102.0, 1000, "running"), span(103.0, 100, "holding"), span(103.1, None, "running")),
        ],
        30, 110.0,
    )  # fmt: skip
    assert lines == [
        "         0                10 s",
        "rank 9   ··········Xr·········",
        "rank 10      ··s··············",
        "         X its server is lost, or killed because another rank's is, r is restored, s snapshot, · runs",
    ]
    assert draw([rank(0, span(100.0, None, "ended"))], 30, 110.0) == []


def test_of_a_daemon(node: Node) -> None:
    node.behave(ranks=2)
    with node.http() as http, contextlib.ExitStack() as stack:
        made = http.post("/v1/jobs", json={"name": "trains"}).json()
        assert ctl(node, "ranks", "trains").stdout == "none of its processes has a communicator\n"
        for _ in range(2):
            program = stack.enter_context(Program(node, made["environment"]["XMIG_JOB"]))
            assert program.welcome()[0] == 0
        until(lambda: node.get(f"/v1/jobs/{made['id']}/ranks")["total"] == 2 or None, "both")
        shown = ctl(node, "ranks", "trains").stdout
        assert [line.split()[0] for line in shown.splitlines()[:3]] == ["RANK", "0", "1"]
        assert "rank 0  ·" in shown
        assert "no snapshot of all ranks yet" in shown
        page = ctl(node, "ranks", "trains", "--limit", "1")
        assert "rank 1" not in page.stdout
        assert "2 ranks in all: --from-rank 1 has the next" in page.stderr
        assert json.loads(ctl(node, "ranks", "trains", "-o", "json").stdout)["total"] == 2


def test_what_befell_them_together(scripted: Scripted) -> None:
    lost = {"rank": 3, "cause": "the server was lost: killed by SIGKILL"}
    recovery = {
        "at": 100.0, "outcome": "resumed", "ranks": 4, "lost": [lost], "attempts": 1, "together_ms": 20.0,
        "resumed_ms": 45.0, "last_to_resume": 1, "of_ranks": [],
    }  # fmt: skip
    snapshots = [
        {"outcome": "given_up", "committed_ms": None, "why": "rank 2 could not: [it] moves"},
        {"outcome": "taken", "committed_ms": 14.0, "why": ""},
    ]
    waits = rank(0, span(100.0, None, "stopped"), activity="stopped", waits_for="rank 1 to stop")

    def answer(method: str, path: str, body: Any) -> tuple[int, Any]:
        if path.startswith(f"/v1/jobs/{JOB}/ranks"):
            return 200, {
                "job_id": JOB, "total": 1, "next_rank": None, "ranks": [waits], "communicators": [],
                "snapshots": snapshots, "recoveries": [recovery],
            }  # fmt: skip
        return 200, [{"id": JOB, "name": "trains", "processes": 1}]

    scripted.answer = answer
    shown = ctl(scripted, "ranks", "trains").stdout
    assert "rank 1 to stop" in shown
    (line,) = [line for line in shown.splitlines() if "SIGKILL" in line]
    assert line.split()[-15:-7] == ["3", "resumed", "4", "20", "ms", "45", "ms", "1"]
    assert "1 were given up; the others took 14 ms" in shown
    assert "given up: rank 2 could not: [it] moves" in shown
