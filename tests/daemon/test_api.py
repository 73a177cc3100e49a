"""The REST API and the command line against a running daemon."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from .node import Node, Program, until


def ctl(node: Node, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "xmigd.cli", *arguments], env=node.environment, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip


def test_resources(node: Node) -> None:
    info = node.get("/v1/node")
    assert info["devices"] == ["cpu:0", "cpu:1"]
    assert info["pid"] == node.pid
    assert [d["id"] for d in node.get("/v1/devices")] == ["cpu:0", "cpu:1"]
    assert node.get("/v1/devices/cpu:1")["ordinal"] == 1
    for path in ("jobs", "processes", "faults", "recoveries"):
        assert node.get(f"/v1/{path}") == []
    assert node.get("/readyz") == {"status": "ok", "detail": ""}


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
            ("POST", "/v1/jobs", {"more": 5}, 422, "invalid"),
            ("POST", "/v1/jobs", {"device": "cpu:7"}, 400, "no_such_device"),
            ("POST", "/v1/jobs", {"name": "a\nb"}, 422, "invalid"),
            ("GET", "/v1/faults?limit=0", None, 422, "invalid"),
        ):
            answer = http.request(method, path, json=body)
            assert answer.headers["content-type"] == "application/problem+json", (method, path)
            problem = answer.json()
            assert (answer.status_code, problem["status"], problem["code"]) == (status, status, code), problem
            assert problem["detail"]


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


def test_tcp_reads_only(node: Node) -> None:
    address = node.get("/v1/node")["tcp_address"]
    with httpx.Client(base_url=address) as http:
        assert http.get("/v1/node").status_code == 200
        for method, path in (("POST", "/v1/jobs"), ("DELETE", "/v1/jobs/x"), ("POST", "/v1/jobs/x/faults:inject")):
            answer = http.request(method, path)
            assert (answer.status_code, answer.json()["code"]) == (403, "read_only")
        answer = http.get("/v1/node", headers={"host": "evil.example"})
        assert (answer.status_code, answer.json()["code"]) == (421, "wrong_host")


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
    assert done.stdout.startswith("HTTP/1.1 403")


def test_openapi_is_generated(node: Node) -> None:
    paths = node.get("/openapi.json")["paths"]
    assert "/v1/jobs/{job}/faults:inject" in paths


def test_the_command_line(node: Node) -> None:
    done = ctl(node, "ps")
    assert (done.returncode, done.stdout.strip()) == (0, "nothing runs under xMIG")
    with Program(node) as program:
        assert program.welcome()[0] == 0
        process = node.wait_for_standby()
        done = ctl(node, "ps")
        assert process["id"][:12] in done.stdout
        assert "running" in done.stdout
        assert json.loads(ctl(node, "ps", "-o", "json").stdout)[0]["id"] == process["id"]
        assert ctl(node, "faults").stdout.strip() == "no faults"
        done = ctl(node, "faults", "inject", process["job_id"][:8], "--kind", "kill")
        assert done.returncode == 0, done.stderr
        until(lambda: node.get("/v1/recoveries"), "a recovery")
        until(lambda: node.get("/v1/recoveries")[0]["outcome"] == "resumed", "resumed")
        assert "injected" in ctl(node, "faults", "list").stdout
        done = ctl(node, "recoveries", "--job", process["job_id"])
        assert "resumed" in done.stdout
        assert "yes" in done.stdout
        assert ctl(node, "faults", "inject", process["job_id"], "--kind", "bite").returncode == 1
        done = ctl(node, "stop", process["job_id"])
        assert "1 program(s)" in done.stdout
    assert ctl(node, "stop", "nothing").returncode == 1
    assert ctl(node, "nonsense").returncode == 2


def test_run_becomes_the_program(node: Node) -> None:
    # The peer's shims are empty files: the loader says so and goes on.
    names = ("LD_PRELOAD", "XMIG_SOCKET", "XMIG_JOB")
    code = f"import os,sys; print(*(os.environ[name] for name in {names})); sys.exit(7)"
    done = ctl(node, "run", "--name", "seven", "--", sys.executable, "-c", code)
    assert done.returncode == 7
    preload, socket_path, job = done.stdout.split()
    assert preload == f"{node.native / 'libcuda.so.1'}:{node.native / 'libnvidia-ml.so.1'}"
    assert socket_path == str(node.runtime_dir / "client.sock")
    assert node.get("/v1/jobs/" + job.partition(":")[0])["name"] == "seven"
    done = ctl(node, "run", "--", "/nothing/here")
    assert (done.returncode, done.stderr) == (127, "xmigctl: there is no program '/nothing/here'\n")
    assert ctl(node, "run", "--device", "cpu:9", "--", "true").returncode == 1


def test_no_daemon(node: Node) -> None:
    node.kill()
    for arguments in (["ps"], ["run", "--", "true"], ["recoveries"]):
        done = ctl(node, *arguments)
        assert done.returncode == 3
        assert done.stderr.startswith(f"xmigctl: no xmigd answers at {node.runtime_dir}/api.sock; start it with")


def test_a_path_without_a_daemon_is_not_created(tmp_path: Path, node: Node) -> None:
    node.environment["XMIG_RUNTIME_DIR"] = str(tmp_path / "nowhere")
    assert ctl(node, "ps").returncode == 3
    assert not (tmp_path / "nowhere").exists()
