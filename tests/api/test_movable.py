"""GET /v1/jobs/{job}/movable: which programs, and who may look."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

from tests.daemon.node import Node, Program, until
from tests.harness import needs_root
from xmigd.ipc.handshake import pack_hello

from .callers import request_as

USER = 60_010
# It has a server as root: those of tests cannot always be executed by other users.
BECOMES_THE_USER = """
import os, socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as s:
    s.connect(sys.argv[1])
    s.send(bytes.fromhex(sys.argv[2]))
    socket.recv_fds(s, 4096, 8)
user = int(sys.argv[3])
os.setgroups([]), os.setgid(user), os.setuid(user)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def program(daemon: Node) -> Iterator[Program]:
    """Its input and output are pipes to this process, whose session it is in."""
    with daemon.http() as http:
        made = http.post("/v1/jobs", json={"name": "trains"}).json()
    with Program(daemon, made["environment"]["XMIG_JOB"]) as program:
        assert program.welcome()[0] == 0
        yield program


def path_of(daemon: Node, program: Program) -> tuple[str, str]:
    """Of the resource; and the process's id."""
    (process,) = (one for one in daemon.processes(live=True) if one["pid"] == program.pid)
    return f"/v1/jobs/{process['job_id']}/movable", process["id"]


class TestMovable:
    def test_each_program(self, daemon: Node, http: httpx.Client, program: Program) -> None:
        path, process = path_of(daemon, program)
        found = http.get(path).json()
        assert (found["dumpable"], found["movable"]) == (True, False)
        (one,) = found["programs"]
        assert (one["process_id"], one["pid"], one["pids"]) == (process, program.pid, [program.pid])
        assert (one["dumpable"], one["movable"]) == (True, False)
        stops = {each["code"]: each["stops"] for each in one["obstacles"]}
        assert stops["session"] == "depends"
        assert stops["pipe"] == "elsewhere"
        assert stops["files"] == "depends"
        assert {each["pid"] for each in one["obstacles"]} == {program.pid}

    def test_a_program_that_has_ended(self, daemon: Node, http: httpx.Client, program: Program) -> None:
        path, _ = path_of(daemon, program)
        os.kill(program.pid, signal.SIGKILL)
        until(lambda: http.get(path).status_code == 404, "nothing of it runs")
        problem = http.get(path).json()
        assert problem["code"] == "not_found"
        assert "no running process" in problem["detail"]

    def test_a_job_without_programs(self, http: httpx.Client) -> None:
        made = http.post("/v1/jobs", json={"name": "alone"}).json()
        answer = http.get(f"/v1/jobs/{made['id']}/movable")
        assert (answer.status_code, answer.json()["code"]) == (404, "not_found")

    def test_there_is_no_such_job(self, http: httpx.Client) -> None:
        answer = http.get("/v1/jobs/nothing/movable")
        assert (answer.status_code, answer.json()["code"]) == (404, "not_found")


@needs_root
class TestOwners:
    def test_others_see_nothing(self, daemon: Node, program: Program) -> None:
        path, _ = path_of(daemon, program)
        status, problem = request_as(daemon, USER, "GET", path)
        assert (status, problem["code"]) == (404, "not_found")
        assert request_as(daemon, USER, "GET", path, groups=(60_001,))[0] == 200

    def test_they_see_their_own(self, daemon: Node) -> None:
        _, made = request_as(daemon, USER, "POST", "/v1/jobs", body={"name": "theirs"})
        arguments = (daemon.runtime_dir / "client.sock", pack_hello(made["environment"]["XMIG_JOB"], "a test").hex())
        with subprocess.Popen(
            [sys.executable, "-c", BECOMES_THE_USER, *arguments, str(USER)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as program:  # fmt: skip
            assert program.stdout is not None
            assert program.stdout.readline() == b"ready\n"
            status, found = request_as(daemon, USER, "GET", f"/v1/jobs/{made['id']}/movable")
            program.kill()
        assert (status, found["programs"][0]["pid"]) == (200, program.pid)

    def test_not_what_runs_as_another_user(self, daemon: Node) -> None:
        """As in /proc: what a program with another user's rights has open is not for them."""
        _, made = request_as(daemon, USER, "POST", "/v1/jobs", body={"name": "theirs"})
        with Program(daemon, made["environment"]["XMIG_JOB"]) as program:
            assert program.welcome()[0] == 0
            path, _ = path_of(daemon, program)
            status, problem = request_as(daemon, USER, "GET", path)
            assert (status, problem["code"]) == (403, "forbidden")
            assert str(program.pid) in problem["detail"]
            assert request_as(daemon, USER, "GET", path, groups=(60_001,))[0] == 200
