"""With what a job has ended: `xmigctl run` lets the daemon know it, in each of its two ways, and ends the same way."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.conftest import MakeNode
from tests.daemon.node import Node, Program, until
from xmigd.ipc.exits import kernel_tells

from .conftest import Answer, Scripted, ctl, ctl_process

ENDINGS = [("exit 0", 0, None), ("exit 3", 3, None), ("kill -TERM $$", None, 15), ("kill -KILL $$", None, 9)]


def ended(node: Node, name: str) -> dict[str, Any]:
    def over() -> dict[str, Any] | None:
        jobs = node.get("/v1/jobs")
        return next((job for job in jobs if job["name"] == name and job["ended_at"] is not None), None)

    return until(over, "the job's end")


# A kernel before 6.15, whose zombies are always gone before anybody has looked.
OLD_KERNEL = """
from xmigd.ipc import exits
exits._of_reaped = lambda pidfd: None
exits._of_zombie = lambda pid, started: None
"""


@pytest.fixture(params=[True, False], ids=["the kernel tells", "run reports"])
def way(request: pytest.FixtureRequest, make_node: MakeNode, tmp_path: Path) -> Node:
    if request.param and not kernel_tells():
        pytest.skip("this kernel tells nobody but a parent how a process ended")
    node = make_node()
    if not request.param:
        (tmp_path / "sitecustomize.py").write_text(OLD_KERNEL)
        node.environment["PYTHONPATH"] += f":{tmp_path}"
    node.start()
    return node


@pytest.mark.parametrize(("script", "code", "number"), ENDINGS)
def test_the_end_is_known(way: Node, script: str, code: int | None, number: int | None) -> None:
    before = time.time()
    done = ctl_process(way, "run", "--name", "j", "--", "sh", "-c", f"sleep 0.05; {script}")
    assert done.returncode == (code if number is None else -number), done.stderr
    job = ended(way, "j")
    assert (job["state"], job["exit_code"], job["exit_signal"]) == ("ended", code, number)
    assert before < job["created_at"] < job["ended_at"] < time.time()
    assert job["duration_s"] == pytest.approx(job["ended_at"] - job["created_at"])
    assert job["duration_s"] >= 0.05
    shown = ctl(way, "job", "list").stdout
    assert ({0: "0", 3: "3"}.get(code, "") if code is not None else signal.Signals(number or 0).name) in shown


def test_what_cannot_be_started_has_ended(way: Node) -> None:
    assert ctl_process(way, "run", "--name", "j", "--", "/nothing/here").returncode == 127
    assert ended(way, "j")["exit_code"] == 127


def test_a_job_of_several_processes_ends_with_its_runner(way: Node) -> None:
    """A script that goes on after its first program, whose end is not the job's."""
    script = "import socket,sys;print('ready',flush=True);sys.stdin.readline();sys.exit(5)"
    runner = subprocess.Popen(
        [sys.executable, "-m", "xmigd.cli", "run", "--name", "j", "--", sys.executable, "-c",
         f"import os;print(os.environ['XMIG_JOB'],flush=True);{script}"],
        env=way.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert runner.stdout is not None
    token = runner.stdout.readline().strip()
    for _ in range(2):
        with Program(way, token) as program:
            assert program.welcome()[0] == 0
            (job,) = way.get("/v1/jobs")
            assert (job["state"], job["processes"]) == ("running", 1)
        until(lambda: not way.processes(live=True), "its program has ended")
        (job,) = way.get("/v1/jobs")
        assert (job["state"], job["processes"], job["ended_at"], job["exit_code"]) == ("running", 0, None, None)
    runner.communicate("\n", timeout=60)
    assert runner.returncode == 5
    assert ended(way, "j")["exit_code"] == 5
    assert len(way.processes()) == 2


def begun(node: Node, script: str) -> subprocess.Popen[str]:
    """`xmigctl run`, which has got its answer, and whose program has begun."""
    runner = subprocess.Popen(
        [sys.executable, "-m", "xmigd.cli", "run", "--name", "j", "--", "sh", "-c", f"echo begun; {script}"],
        env=node.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert runner.stdout is not None
    assert runner.stdout.readline() == "begun\n"
    return runner


def test_the_end_is_known_across_a_restart(way: Node) -> None:
    runner = begun(way, "read line; exit 4")
    way.kill()
    way.start()
    runner.communicate("\n", timeout=60)
    assert runner.returncode == 4
    assert ended(way, "j")["exit_code"] == 4


def test_nobody_saw_the_end(node: Node) -> None:
    """Runner and daemon are killed: that it has ended is known, and nothing else."""
    runner = begun(node, "read line")
    node.kill()
    runner.kill()
    runner.communicate(timeout=60)
    node.start()
    job = ended(node, "j")
    assert (job["state"], job["exit_code"], job["exit_signal"]) == ("ended", None, None)


def test_a_program_that_came_by_itself(node: Node) -> None:
    with Program(node) as program:
        assert program.welcome()[0] == 0
        (job,) = node.get("/v1/jobs")
        assert (job["state"], job["ended_at"], job["duration_s"]) == ("running", None, None)
    job = until(lambda: next((j for j in node.get("/v1/jobs") if j["ended_at"]), None), "the end")
    assert (job["state"], job["exit_code"], job["exit_signal"]) == ("ended", None, None)
    assert job["duration_s"] > 0


class TestReporting:
    """Where the kernel does not tell the daemon."""

    @contextlib.contextmanager
    def running(self, scripted: Scripted, *command: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
        made = {"id": "0" * 32, "name": "j", "environment": {}, "preload": "", "watched": False}

        def answer(method: str, path: str, body: Any) -> Answer:
            return (201, made) if path == "/v1/jobs" else (202, {"id": "x"})

        scripted.answer = answer
        with subprocess.Popen(
            [sys.executable, "-m", "xmigd.cli", "run", "--", *command], env=scripted.environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options,
        ) as runner:  # fmt: skip
            yield runner

    def reported(self, scripted: Scripted) -> list[Any]:
        return [body for _, path, body, _ in scripted.requests if path.endswith(":exited")]

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
    def test_signals_are_the_programs(self, scripted: Scripted, number: signal.Signals) -> None:
        code = (
            "import signal,sys\n"
            "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 30))\n"
            "print('ready', flush=True)\n"
            "got = signal.sigwaitinfo(range(1, 30))\n"
            "sys.exit(100 + got.si_signo)\n"
        )
        with self.running(scripted, sys.executable, "-c", code) as runner:
            assert runner.stdout is not None
            assert runner.stdout.readline() == "ready\n"
            runner.send_signal(number)
            assert runner.wait(60) == 100 + number
        assert self.reported(scripted) == [{"exit_code": 100 + number}]

    def test_a_terminals_interrupt_comes_once(self, scripted: Scripted) -> None:
        code = (
            "import signal,sys,time\n"
            "count = 0\n"
            "def on(*_):\n    global count; count += 1\n"
            "signal.signal(signal.SIGINT, on)\n"
            "print('ready', flush=True)\n"
            "while not count: time.sleep(0.05)\n"
            "end = time.monotonic() + 0.5\n"
            "while time.monotonic() < end: time.sleep(0.05)\n"
            "sys.exit(count)\n"
        )
        with self.running(scripted, "true"):
            pass
        pid, terminal = pty.fork()
        if pid == 0:
            os.execve(
                sys.executable, [sys.executable, "-m", "xmigd.cli", "run", "--", sys.executable, "-c", code],
                scripted.environment,
            )  # fmt: skip
        reported = b""
        while b"ready" not in reported:
            reported += os.read(terminal, 1024)
        os.write(terminal, b"\x03")
        _, status = os.waitpid(pid, 0)
        os.close(terminal)
        assert os.waitstatus_to_exitcode(status) == 1

    def test_killing_it_kills_the_program(self, scripted: Scripted) -> None:
        with self.running(scripted, "sh", "-c", "echo $$; exec sleep 1000") as runner:
            assert runner.stdout is not None
            program = int(runner.stdout.readline())
            runner.kill()
            with contextlib.suppress(ProcessLookupError):
                pidfd = os.pidfd_open(program)
                signal.pidfd_send_signal(pidfd, 0)
                until(lambda: not os.path.exists(f"/proc/{program}/fd/0"), "the program has ended")
                os.close(pidfd)

    def test_a_daemon_that_is_away_is_reported_later(self, scripted: Scripted) -> None:
        with self.running(scripted, "sh", "-c", "echo begun; read line; exit 6") as runner:
            assert runner.stdout is not None
            assert runner.stdout.readline() == "begun\n"
            answer, sock = scripted.answer, scripted.folder / "api.sock"
            sock.rename(scripted.folder / "away.sock")
            runner.communicate("\n", timeout=60)
            assert runner.returncode == 6  # at once, whoever reads its output included
            scripted.answer = answer
            (scripted.folder / "away.sock").rename(sock)
            until(lambda: self.reported(scripted), "it is informed")
        assert self.reported(scripted) == [{"exit_code": 6}]


@pytest.mark.parametrize("body", [{}, {"exit_code": 1, "exit_signal": 9}, {"exit_code": 256}, {"exit_signal": 0}])
def test_an_end_that_is_none(node: Node, body: dict[str, int]) -> None:
    with node.http() as http:
        job = http.post("/v1/jobs", json={"name": "j"}).json()["id"]
        assert http.post(f"/v1/jobs/{job}:exited", json=body).status_code == 422
        assert http.post("/v1/jobs/nothing:exited", json={"exit_code": 1}).status_code == 404


def test_an_end_is_believed_once(node: Node) -> None:
    with node.http() as http:
        job = http.post("/v1/jobs", json={"name": "j"}).json()["id"]
        assert http.get(f"/v1/jobs/{job}").json()["state"] == "created"
        first = http.post(f"/v1/jobs/{job}:exited", json={"exit_code": 2})
        assert first.status_code == 202
        again = http.post(f"/v1/jobs/{job}:exited", json={"exit_signal": 9}).json()
        assert (again["exit_code"], again["exit_signal"], again["state"]) == (2, None, "ended")
        assert again["ended_at"] == first.json()["ended_at"]
    assert json.loads(ctl(node, "job", "show", "j", "-o", "json").stdout)["exit_code"] == 2
