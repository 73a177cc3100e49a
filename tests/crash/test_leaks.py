"""Programs, requests and stored snapshots come and go; the daemon holds as much as before."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.daemon.conftest import MakeNode
from tests.daemon.conftest import make_node as make_node  # fixtures
from tests.daemon.conftest import peer_native as peer_native
from tests.daemon.node import Node, Program, until

ROUNDS = 12


def held(node: Node) -> dict[str, int]:
    """Descriptors by kind, threads and mapped shared memory of the daemon, and its servers."""
    fds = node.descriptors()
    maps = Path(f"/proc/{node.pid}/maps").read_text()
    return {
        "descriptors": len(fds),
        "memfds": sum("memfd:" in fd for fd in fds),
        "pidfds": sum("pidfd" in fd for fd in fds),
        "threads": len(os.listdir(f"/proc/{node.pid}/task")),
        "mapped": maps.count("memfd:"),
        "servers": len(node.servers()),
    }


def one_round(node: Node) -> None:
    with Program(node) as program, node.http() as http:
        assert program.welcome()[0] == 0
        process = node.wait_for_standby()
        assert http.get("/v1/nothing").status_code == 404
        assert http.post("/v1/jobs", json={"nonsense": 1}).status_code == 422
        assert http.post("/v1/jobs", json={"name": "x"}).status_code == 201
        for path in ("/v1/processes", "/v1/recoveries", "/v1/events", f"/v1/processes/{process['id']}/segments"):
            assert http.get(path).status_code == 200
        os.kill(process["server_pid"], signal.SIGKILL)
        node.wait_for_standby(after=process["server_pid"])
    until(lambda: not node.processes(live=True) and not node.servers(), "the program's end has been noticed")


def test_nothing_is_left_behind(make_node: MakeNode) -> None:
    node = make_node()
    node.start()
    for _ in range(3):  # the pool of threads fills up to its size
        one_round(node)
    before = held(node)
    for _ in range(ROUNDS):
        one_round(node)

    def as_before() -> bool:
        now = held(node)
        # The pool of threads may still have grown to its size; per round it would grow by more than that.
        return now["threads"] <= before["threads"] + 4 and all(
            now[what] <= before[what] for what in ("descriptors", "memfds", "pidfds", "mapped", "servers")
        )

    until(as_before, f"it holds no more than {before}")
