"""The REST API of a running daemon."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import sys
import threading

import pytest

from .node import Node, Program, until


def test_resources(node: Node) -> None:
    info = node.get("/v1/node")
    assert info["devices"] == ["cpu:0", "cpu:1"]
    assert info["pid"] == node.pid
    assert [d["id"] for d in node.get("/v1/devices")] == ["cpu:0", "cpu:1"]
    assert node.get("/v1/devices/cpu:1")["ordinal"] == 1
    for path in ("jobs", "processes", "faults", "recoveries"):
        assert node.get(f"/v1/{path}") == []
    assert node.get("/readyz") == {"status": "ok"}


def test_errors_are_problems(node: Node) -> None:
    with node.http() as http:
        for method, path, body, status, code in (
            ("GET", "/v1/jobs/x", None, 404, "not_found"),
            ("DELETE", "/v1/jobs/x", None, 404, "not_found"),
            ("GET", "/v1/processes/x", None, 404, "not_found"),
            ("GET", "/v1/devices/x", None, 404, "not_found"),
            ("GET", "/nothing", None, 404, "not_found"),
            ("PUT", "/v1/jobs", {}, 405, "method_not_allowed"),
            ("POST", "/v1/jobs", {"name": 5}, 422, "invalid"),
            ("POST", "/v1/jobs", {"more": 5}, 422, "unknown_field"),
            ("POST", "/v1/jobs", {"device": "cpu:7"}, 400, "no_such_device"),
            ("POST", "/v1/jobs", {"name": "a\nb"}, 422, "invalid"),
            ("GET", "/v1/faults?limit=0", None, 422, "invalid"),
        ):
            answer = http.request(method, path, json=body)
            assert answer.headers["content-type"] == "application/problem+json", (method, path)
            problem = answer.json()
            assert (answer.status_code, problem["status"], problem["code"]) == (status, status, code), problem
            assert problem["detail"]


def test_an_answer_has_what_happened_before_it_was_requested_for(node: Node) -> None:
    """A program is let in whether the database takes writes or not; who asks for it then waits until it is written."""
    node.behave(hello="hold")  # to start everything may take longer than anybody waits for a lock
    lock = sqlite3.connect(node.database, isolation_level=None, check_same_thread=False)
    with Program(node) as program, contextlib.closing(lock):
        until(node.processes, "its server is starting")
        lock.execute("BEGIN IMMEDIATE")
        node.behave()
        assert program.welcome()[0] == 0
        release = threading.Timer(0.2, lock.execute, ("ROLLBACK",))
        release.start()
        (process,) = node.processes()
        (job,) = node.get("/v1/jobs")
        release.join()
        assert (process["pid"], process["job_id"], job["processes"]) == (program.pid, job["id"], 1)
        assert process["why"] == "the server is ready"  # as the database has it


def test_jobs(node: Node) -> None:
    with node.http() as http:
        answer = http.post("/v1/jobs", json={"name": "j", "command": "python x", "device": "cpu:1"})
        assert answer.status_code == 201
        job = answer.json()
        assert http.get(answer.headers["location"]).json()["state"] == "created"
        assert http.post(f"/v1/jobs/{job['id']}/faults:inject", json={}).json()["code"] == "not_found"
        with Program(node, job=job["environment"]["XMIG_JOB"]) as program:
            assert program.welcome()[0] == 0
            process = node.wait_for_standby()
            assert (process["job_id"], process["device"], process["job_name"]) == (job["id"], "cpu:1", "j")
            assert http.get(f"/v1/processes/{process['id']}").json()["id"] == process["id"]
            assert http.get(f"/v1/processes/{process['id']}/segments").json() == []
        assert http.delete(f"/v1/jobs/{job['id']}").status_code == 202
    with Program(node, job=job["environment"]["XMIG_JOB"]) as late:
        status, _, _, message = late.welcome()
        assert status == 802
        assert "token" in message


def test_others_jobs_are_not_ours(node: Node) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    with node.http() as http:
        job = http.post("/v1/jobs", json={"name": "j"}).json()
    code = (
        "import os,socket,sys\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "s=socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])\n"
        "s.sendall(f'DELETE /v1/jobs/{sys.argv[2]} HTTP/1.0\\r\\nhost: localhost\\r\\n\\r\\n'.encode())\n"
        "print(s.recv(9000).decode())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(node.runtime_dir / "api.sock"), job["id"]], capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert done.stdout.startswith("HTTP/1.1 404")


def test_openapi_is_generated(node: Node) -> None:
    paths = node.get("/openapi.json")["paths"]
    assert "/v1/jobs/{job}/faults:inject" in paths
