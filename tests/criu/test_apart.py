"""Checkpoints of programs in namespaces of their own: restored with another pid, beside others, several times."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.criu.apart import checkpoint, client, restored, run_apart
from tests.criu.test_client_dump import ROOT, STEPS, criu_or_skip, let_end, start, wait_for_lines
from tests.ports import free_port
from xmigd.client import Refused
from xmigd.demo.node import Node

pytestmark = pytest.mark.criu


@pytest.fixture(scope="module")
def node(native_dir: Path) -> Iterator[Node]:
    with harness.own_node(native_dir, devices="cpu:0,cpu:1", port=-1, criu=criu_or_skip()) as node:
        yield node


@pytest.fixture(scope="module")
def undisturbed(node: Node, native_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    output = tmp_path_factory.mktemp("undisturbed") / "steps"
    let_end(output)
    assert start(node, native_dir, output, 0).finish()[0] == 0
    return output.read_text()


def test_a_job_is_restored_with_another_pid(node: Node, native_dir: Path, tmp_path: Path, undisturbed: str) -> None:
    output = tmp_path / "steps"
    program = client(node, native_dir, output)
    wait_for_lines(output, STEPS // 4)
    (one,) = node.client.get(f"/v1/jobs/{program.job}/movable")["programs"]
    assert {each["code"] for each in one["obstacles"] if each["stops"] != "depends"} == set(), one["obstacles"]
    made = checkpoint(program, stop=True)
    assert program.process.returncode == -9
    again = restored(node, made)
    assert again["pid"] != one["pid"]
    let_end(output)
    wait_for_lines(output, STEPS)
    assert output.read_text() == undisturbed
    job = f"/v1/jobs/{again['job']}"
    harness.wait_until(lambda: node.client.get(job)["state"] == "ended", "the job is over")
    assert node.client.get(job)["exit_code"] == 0


def test_two_restorations_at_once(node: Node, native_dir: Path, tmp_path: Path, undisturbed: str) -> None:
    """Of two checkpoints between which nothing was written. Both would write to the same file: one is refused."""
    output = tmp_path / "once"
    program = client(node, native_dir, output)
    wait_for_lines(output, 2 * STEPS // 3)
    both = [checkpoint(program), checkpoint(program, stop=True)]

    def restore(made: dict[str, Any]) -> str:
        """Refused at once, or once its work begins."""
        try:
            restored(node, made)
        except (Refused, AssertionError) as refused:
            return "file_in_use" if "file_in_use" in f"{getattr(refused, 'code', '')} {refused}" else str(refused)
        return "restored"

    with ThreadPoolExecutor(2) as threads:
        assert sorted(threads.map(restore, both)) == ["file_in_use", "restored"]
    let_end(output)
    wait_for_lines(output, STEPS)
    assert output.read_text() == undisturbed


def test_copies_run_beside_the_job(node: Node, native_dir: Path, tmp_path: Path, undisturbed: str) -> None:
    """Each with files of its own, and each ends like the job."""
    output = tmp_path / "copied"
    program = client(node, native_dir, output)
    wait_for_lines(output, STEPS // 4)
    made = checkpoint(program)
    with pytest.raises(Refused) as caught:
        restored(node, made)
    assert caught.value.code in ("file_in_use", "file_changed")
    copies = [restored(node, made, devices=[device], own_files=True) for device in ("cpu:1", "cpu:0")]
    infos = [node.client.get(f"/v1/processes/{copy['process']}") for copy in copies]
    infos.append(program.until("running"))
    assert len({one["pid"] for one in infos}) == len({one["server_pid"] for one in infos}) == 3
    let_end(output)
    assert program.finish()[0] == 0
    files = [Path(copy["files"][str(output)]) for copy in copies]
    for file in (output, *files):
        wait_for_lines(file, STEPS)
        assert file.read_text() == undisturbed
    jobs = [f"/v1/jobs/{copy['job']}" for copy in copies]
    harness.wait_until(lambda: {node.client.get(job)["state"] for job in jobs} == {"ended"}, "the copies are over")
    assert [node.client.get(job)["exit_code"] for job in jobs] == [0, 0]


def test_a_server_with_an_open_connection(node: Node, tmp_path: Path) -> None:
    """Its copies count on from the same number, each at a port of its own, and with the connection that it had."""
    output = tmp_path / "served"
    command: list[str | Path] = [sys.executable, ROOT / "tests" / "criu" / "web.py", "8000", output]
    first, *further = (free_port() for _ in range(3))
    program = run_apart(node, command, output, "--publish", f"{first}:8000")
    wait_for_lines(output, 3)
    counted = value_at(first)
    harness.wait_until(lambda: last_value(output) > counted, "it asks itself")
    made = checkpoint(program, stop=True)
    stopped_at = last_value(output)
    copies = [restored(node, made, own_files=True, publish=[f"{port}:8000"]) for port in further]
    for copy, port in zip(copies, further, strict=True):
        file = Path(copy["files"][str(output)])
        harness.wait_until(lambda file=file: last_value(file) > stopped_at + 3, "it asks itself")  # type: ignore[misc]
        values = [json.loads(line)["value"] for line in file.read_text().splitlines()]
        assert value_at(port) > stopped_at
        missing = set(range(7, values[-1])) - set(values)
        assert len(missing) <= 2, values  # of requests by others
    for copy in copies:
        node.client.delete(f"/v1/jobs/{copy['job']}")


def test_a_server_goes_on(node: Node, tmp_path: Path) -> None:
    """What is written down and goes on has its connections, each time: CRIU leaves them so that nothing can be sent."""
    output = tmp_path / "goes-on"
    program = run_apart(node, [sys.executable, ROOT / "tests" / "criu" / "web.py", "8000", output], output)
    wait_for_lines(output, 3)
    for _ in range(2):
        checkpoint(program)
        wait_for_lines(output, len(output.read_text().splitlines()) + 5)
    values = [json.loads(line)["value"] for line in output.read_text().splitlines()]
    assert values == list(range(7, 7 + len(values)))
    node.client.delete(f"/v1/jobs/{program.job}")


def value_at(port: int) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/next", timeout=60) as answer:
        return int(json.load(answer)["value"])


def last_value(output: Path) -> int:
    *_, last = [line for line in output.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return int(json.loads(last)["value"])


def test_run_is_as_without(node: Node, tmp_path: Path) -> None:
    """Exit codes, signals, input and output; and what the program sees."""
    see = "import os, sys; print(sys.stdin.read(), os.getpid(), os.getppid(), os.listdir('/dev/shm'), file=sys.stderr)"
    done = run(node, [sys.executable, "-c", f"{see}; sys.exit(7)"], stdin="words")
    assert (done.returncode, done.stderr) == (7, "words 2 1 []\n")
    assert run(node, ["no-such-program"]).returncode == 127
    log = tmp_path / "log"
    with log.open("w") as file:
        program = ["sh", "-c", "echo out; echo err >&2; kill -TERM $$"]
        words = [sys.executable, "-m", "xmigd.cli", "run", "--movable", "--", *program]
        shell = ["sh", "-c", 'echo before; "$@"; echo after $?', "sh", *words]
        subprocess.run(shell, env=node.environment, stdout=file, stderr=file, cwd=ROOT, check=True, timeout=120)
    assert log.read_text().splitlines()[:3] == ["before", "out", "err"]
    assert log.read_text().splitlines()[-1] == f"after {128 + signal.SIGTERM}"


def test_signals_reach_it(node: Node, tmp_path: Path) -> None:
    output = tmp_path / "signals"
    code = (
        "import signal, sys, time; out = open(sys.argv[1], 'w');"
        "signal.signal(signal.SIGUSR1, lambda *_: (print('USR1', file=out, flush=True), sys.exit(3)));"
        "print('ready', file=out, flush=True); time.sleep(600)"
    )
    program = run_apart(node, [sys.executable, "-c", code, output], output)
    wait_for_lines(output, 1)
    program.process.send_signal(signal.SIGUSR1)
    assert program.process.wait(60) == 3
    assert output.read_text() == "ready\nUSR1\n"


def run(node: Node, command: list[str], *options: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "xmigd.cli", "run", "--movable", *options, "--", *command]
    return subprocess.run(
        words, env=node.environment, input=stdin, capture_output=True, text=True, cwd=ROOT, check=False, timeout=120
    )
