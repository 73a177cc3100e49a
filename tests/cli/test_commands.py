"""The command line against a running daemon."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.daemon.node import Node, Program, until
from xmigd.users import user_name

from .conftest import ctl, ctl_process


def test_the_command_line(node: Node) -> None:
    done = ctl(node, "ps")
    assert (done.returncode, done.stdout.strip()) == (0, "no program that you may see runs under xMIG")
    with Program(node) as program:
        assert program.welcome()[0] == 0
        process = node.wait_for_standby()
        done = ctl(node, "ps")
        assert process["id"][:12] in done.stdout
        assert "running" in done.stdout
        assert json.loads(ctl(node, "ps", "-o", "json").stdout)[0]["id"] == process["id"]
        assert ctl(node, "fault", "list").stdout.strip() == "no faults"
        done = ctl(node, "fault", "inject", process["job_id"][:8], "--kind", "kill")
        assert done.returncode == 0, done.stderr
        until(lambda: node.get("/v1/recoveries"), "a recovery")
        until(lambda: node.get("/v1/recoveries")[0]["outcome"] == "resumed", "resumed")
        assert "injected" in ctl(node, "fault", "list").stdout
        (fault,) = json.loads(ctl(node, "fault", "list", "--open", "-o", "json").stdout)
        assert f"was acknowledged by {user_name(os.geteuid())}\n" in ctl(node, "fault", "ack", str(fault["id"])).stdout
        assert user_name(os.geteuid()) in ctl(node, "fault", "list").stdout
        (device,) = json.loads(ctl(node, "job", "show", process["job_id"], "-o", "json").stdout)["devices"]
        assert (device, f" {device} " in ctl(node, "job", "list").stdout) == (process["device"], True)
        assert ctl(node, "fault", "list", "--open").stdout.strip() == "no faults"
        done = ctl(node, "fault", "ack", "999999")
        assert (done.returncode, "xmigctl fault list" in done.stderr) == (4, True)
        done = ctl(node, "recoveries", "--job", process["job_id"])
        assert "resumed" in done.stdout
        assert "yes" in done.stdout
        assert ctl(node, "fault", "inject", process["job_id"], "--kind", "bite").returncode == 2
        done = ctl(node, "stop", process["job_id"])
        assert "1 program(s)" in done.stdout
    assert ctl(node, "stop", "nothing").returncode == 4
    assert ctl(node, "nonsense").returncode == 2


def test_run_becomes_the_program(node: Node) -> None:
    # The peer's shims are empty files: the loader says so and goes on.
    names = ("LD_PRELOAD", "XMIG_SOCKET", "XMIG_JOB")
    code = f"import os,sys; print(*(os.environ[name] for name in {names})); sys.exit(7)"
    done = ctl_process(node, "run", "--name", "seven", "--", sys.executable, "-c", code)
    assert done.returncode == 7
    preload, socket_path, job = done.stdout.split()
    shims = ("libcuda.so.1", "libnvidia-ml.so.1", "libnccl.so.2", "libxmig-loader.so")
    assert preload == ":".join(str(node.native / name) for name in shims)
    assert socket_path == str(node.runtime_dir / "client.sock")
    assert node.get("/v1/jobs/" + job.partition(":")[0])["name"] == "seven"
    done = ctl_process(node, "run", "--", "/nothing/here")
    assert (done.returncode, done.stderr) == (127, "xmigctl: there is no program '/nothing/here'\n")
    assert ctl_process(node, "run", "--device", "cpu:9", "--", "true").returncode == 5


def test_run_chooses_allocators_unless_somebody_did(node: Node) -> None:
    code = "import os; print(os.environ.get('XLA_PYTHON_CLIENT_ALLOCATOR'))"

    def chosen(**more: str) -> str:
        return ctl_process(node, "run", "--", sys.executable, "-c", code, **more).stdout.strip()

    assert chosen() == "cuda_async"
    assert chosen(XLA_PYTHON_CLIENT_ALLOCATOR="platform") == "platform"
    assert chosen(XMIG_CACHED_BLOCKS="keep") == "None"


def test_arguments_that_are_not_utf8(node: Node) -> None:
    """The program gets the bytes that were given; what shows them has them written out."""
    word = b"data-\xff\xfe.bin"
    code = "import os, sys; sys.exit(0 if os.fsencode(sys.argv[1]) == bytes.fromhex(sys.argv[2]) else 9)"
    run: list[str | bytes] = [sys.executable, "-m", "xmigd.cli", "run"]
    command = [*run, "--", sys.executable, "-c", code, word, word.hex()]
    done = subprocess.run(command, env=node.environment, capture_output=True, check=False)
    assert (done.returncode, done.stderr.count(b"Traceback")) == (0, 0), done.stderr
    assert r"data-\xff\xfe.bin" in node.get("/v1/jobs")[0]["command"]
    named = [*run, "--name", b"n\xff", "--", "true"]
    assert subprocess.run(named, env=node.environment, capture_output=True, check=False).returncode == 0
    assert node.get("/v1/jobs")[0]["name"] == r"n\xff"


def test_no_daemon(node: Node) -> None:
    node.kill()
    for arguments in (["ps"], ["run", "--", "true"], ["recoveries"]):
        done = ctl_process(node, *arguments)
        assert done.returncode == 3
        assert done.stderr.startswith(f"xmigctl: no xmigd answers at {node.runtime_dir}/api.sock\n  start it with")


def test_a_path_without_a_daemon_is_not_created(tmp_path: Path, node: Node) -> None:
    node.environment["XMIG_RUNTIME_DIR"] = str(tmp_path / "nowhere")
    assert ctl_process(node, "ps").returncode == 3
    assert not (tmp_path / "nowhere").exists()
