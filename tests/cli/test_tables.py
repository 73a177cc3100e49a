"""What a new user sees: names first, people's units, and a table that fits the terminal."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import pwd
import re
import struct
import sys
import termios
import time

import pytest

from tests.daemon.node import Node, Program, until
from xmigd.cli.output import job_label, process_label
from xmigd.words import exit_text

from .conftest import Scripted, ctl

ME = pwd.getpwuid(os.geteuid()).pw_name


def in_a_terminal(node: Node | Scripted, width: int, *arguments: str) -> str:
    """What it prints in a terminal as wide as this."""
    pid, terminal = pty.fork()
    if pid == 0:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
        environment = {name: value for name, value in node.environment.items() if name not in ("COLUMNS", "LINES")}
        os.execve(sys.executable, [sys.executable, "-m", "xmigd.cli", *arguments], environment | {"TERM": "xterm"})
    reported = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while more := os.read(terminal, 1 << 16):
            reported += more
    os.close(terminal)
    assert os.waitpid(pid, 0)[1] == 0, reported.decode()
    return re.sub(r"\x1b\[[0-9;]*m", "", reported.decode().replace("\r\n", "\n"))


def fitted(node: Node | Scripted, width: int, *arguments: str) -> list[str]:
    reported = in_a_terminal(node, width, *arguments)
    lines = [line.rstrip() for line in reported.splitlines()]
    assert max(len(line) for line in lines) <= width, reported
    assert "…" not in reported
    return lines


def recovered(node: Node, program: Program) -> None:
    assert program.welcome()[0] == 0
    process = node.wait_for_standby()
    assert ctl(node, "fault", "inject", process["job_id"], "--kind", "kill").returncode == 0
    until(lambda: [r for r in node.get("/v1/recoveries") if r["outcome"] == "resumed"], "resumed")


@pytest.mark.parametrize("width", [80, 120])
def test_tables_fit_the_terminal(node: Node, width: int) -> None:
    with Program(node) as program:
        recovered(node, program)
        head, first, *_ = fitted(node, width, "ps")
        assert head.split()[:3] == ["JOB", "PROCESS", "PID"]
        assert ("STATE" in head, "DEVICE" in head, first.split()[0]) == (True, True, "a")
        head, first, *_ = fitted(node, width, "fault", "list")
        assert (head.split()[:3], "WHAT" in head) == (["FAULT", "TIME", "JOB"], True)
        head, first, *_ = fitted(node, width, "recoveries")
        assert {"TIME", "JOB", "OUTCOME", "RESUMED"} <= set(head.split())
        assert re.search(r"\d (ms|s)\b", first), first
        for command in ("job list", "device list", "migrations", "token list", "op list"):
            fitted(node, width, *command.split())


def test_what_has_no_room_is_reported(node: Node) -> None:
    with Program(node) as program:
        assert program.welcome()[0] == 0
        narrow, wide = (in_a_terminal(node, width, "ps") for width in (80, 240))
        assert ("GENERATION" in wide, "no room" in wide) == (True, False)
        assert "GENERATION" not in narrow.splitlines()[0]
        assert "no room for GENERATION" in narrow


def test_users_have_names(node: Node) -> None:
    with Program(node) as program:
        assert program.welcome()[0] == 0
        (process,) = node.processes(live=True)
        assert (process["uid"], process["user"]) == (os.geteuid(), ME)
        assert node.get("/v1/jobs")[0]["user"] == ME
        assert f" {ME} " in ctl(node, "ps").stdout
        assert ME in ctl(node, "job", "list").stdout
    assert ctl(node, "token", "create", "ci").returncode == 0
    assert f"user {os.geteuid()}" not in ctl(node, "token", "list").stdout
    until(lambda: ME in ctl(node, "audit").stdout, "the audit")


def test_tokens_have_dates(node: Node) -> None:
    secret = ctl(node, "token", "create", "used", "--scope", "operate", "--lifetime", "40d").stdout.strip()
    assert ctl(node, "token", "create", "idle", "--lifetime", "never").returncode == 0
    address = node.get("/v1/node")["tcp_address"]
    before = time.time()
    assert ctl(node, "--url", address, "--token", secret, "ps").returncode == 0

    def tokens(column: str) -> dict[str, float | None]:
        return {row["name"]: row[column] for row in json.loads(ctl(node, "token", "list", "-o", "json").stdout)}

    def used() -> dict[str, float | None]:
        return tokens("last_used_at")

    assert before <= (used()["used"] or 0) <= time.time()
    assert used()["idle"] is None
    shown = {line.split()[0]: line for line in ctl(node, "token", "list").stdout.splitlines()[1:]}
    expires = tokens("expires_at")["used"] or 0
    assert expires == pytest.approx(before + 40 * 86_400, abs=3600)
    assert time.strftime("%Y-%m-%d", time.localtime(expires)) in shown["used"]
    assert shown["idle"].count("never") == 2
    at = used()["used"]
    node.kill(15)
    node.start()
    assert used()["used"] == at


def test_a_job_is_meant_by_its_name(node: Node) -> None:
    with node.http() as http:
        made = [http.post("/v1/jobs", json={"name": "twice"}).json() for _ in range(2)]
    tokens = [job["environment"]["XMIG_JOB"] for job in made]
    with Program(node, tokens[0]) as first:
        assert first.welcome()[0] == 0
        # The one that lives is meant, not the newer one.
        assert json.loads(ctl(node, "job", "show", "twice", "-o", "json").stdout)["id"] == made[0]["id"]
        with Program(node, tokens[1]) as second:
            assert second.welcome()[0] == 0
            done = ctl(node, "stop", "twice")
            assert done.returncode == 2
            assert all(job["id"][:12] in done.stderr for job in made)
            lines = ctl(node, "ps").stdout
            assert all(f"twice ({job['id'][:12]})" in lines for job in made)


def test_labels() -> None:
    assert job_label("train", "0123456789abcdef", {"train": {"0"}}) == "train"
    assert job_label("train", "0123456789abcdef", {"train": {"0", "1"}}) == "train (0123456789ab)"
    assert process_label({"id": "0123456789abcdef", "job_name": "train"}) == "train · 0123456789ab"
    assert process_label({"id": "pid:17"}) == "pid:17"
    assert exit_text({"exit_code": 0, "exit_signal": None}) == "0"
    assert exit_text({"exit_code": None, "exit_signal": 11}) == "SIGSEGV (139)"
    assert exit_text({"exit_code": None, "exit_signal": None}) is None


def test_a_process_of_a_job_that_is_suspended_is_not_running(scripted: Scripted) -> None:
    job = {"id": "1" * 32, "name": "j", "state": "suspended", "uid": 0, "user": "root", "device": None,
           "created_at": 1.0, "duration_s": None, "faults": 0, "recoveries": 0, "exit_code": None,
           "exit_signal": None, "command": "c"}  # fmt: skip
    scripted.answer = lambda *_: (200, [job])
    shown = ctl(scripted, "job", "list").stdout
    assert ("suspended" in shown, "running" in shown) == (True, False)
