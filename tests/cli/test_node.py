"""Devices, tokens and the audit on the command line, against a running daemon; and the daemon over the network."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.daemon.conftest import MakeNode
from tests.daemon.node import Node, Program, until
from xmigd.cli.common import parse_time
from xmigd.cli.exits import CommandError, Exit
from xmigd.cli.faults import Kind, Point
from xmigd.cli.tokens import Scope
from xmigd.process import events
from xmigd.security import callers
from xmigd.users import user_name

from .conftest import ctl


def test_choices_are_the_daemons() -> None:
    assert tuple(Kind) == events.InjectKind.__args__  # type: ignore[attr-defined]
    assert tuple(Point) == events.InjectPoint.__args__  # type: ignore[attr-defined]
    assert tuple(Scope) == callers.SCOPES


def test_devices(node: Node) -> None:
    done = ctl(node, "device", "list")
    assert ("cpu:0" in done.stdout, "ready" in done.stdout) == (True, True)
    assert [row["id"] for row in json.loads(ctl(node, "device", "list", "-o", "json").stdout)] == ["cpu:0", "cpu:1"]
    done = ctl(node, "device", "cordon", "cpu:1", "--reason", "a fan fails")
    assert done.stdout == "cpu:1 is cordoned; 0 process(es) stay\n"
    assert "a fan fails" in ctl(node, "device", "show", "cpu:1").stdout
    assert json.loads(ctl(node, "device", "show", "cpu:1", "-o", "json").stdout)["cordoned"] is True
    assert ctl(node, "device", "uncordon", "cpu:1").stdout == "cpu:1 takes new processes\n"
    done = ctl(node, "device", "cordon", "cpu:7")
    assert (done.returncode, "there is no device" in done.stderr) == (Exit.NOT_FOUND, True)


def test_audit(node: Node) -> None:
    assert ctl(node, "device", "cordon", "cpu:1").returncode == 0
    until(lambda: "outcome" in ctl(node, "audit").stdout, "the outcome is written")
    rows = json.loads(ctl(node, "audit", "-o", "json").stdout)
    assert {row["entry"] for row in rows} == {"intent", "outcome"}
    assert "nothing was requested" in ctl(node, "audit", "--requestor", "nobody").stdout


def test_tokens(node: Node) -> None:
    done = ctl(node, "token", "create", "ci", "--scope", "operate", "--lifetime", "12h")
    secret = done.stdout.strip()
    assert (done.returncode, "not shown again" in done.stderr) == (0, True)
    address = node.get("/v1/node")["tcp_address"]
    assert json.loads(ctl(node, "--url", address, "--token", secret, "ps", "-o", "json").stdout) == []
    done = ctl(node, "--url", address, "--token", secret, "device", "cordon", "cpu:0")
    assert done.returncode == Exit.NOT_ALLOWED
    done = ctl(node, "--url", address, "ps")
    assert (done.returncode, "token" in done.stderr) == (Exit.NOT_ALLOWED, True)
    (row,) = json.loads(ctl(node, "token", "list", "-o", "json").stdout)
    assert (row["name"], row["scope"], round(row["expires_at"] - row["created_at"])) == ("ci", "operate", 12 * 3600)
    assert secret not in json.dumps(row)
    assert "is revoked" in ctl(node, "token", "revoke", row["id"][:8]).stdout
    done = ctl(node, "--url", address, ps := "ps", XMIG_TOKEN=secret)
    assert (ps, done.returncode) == ("ps", Exit.NOT_ALLOWED)
    for_ever = json.loads(ctl(node, "token", "create", "x", "--lifetime", "never", "-o", "json").stdout)
    assert for_ever["expires_at"] is None
    assert ctl(node, "token", "create", "x", "--lifetime", "soon").returncode == Exit.USAGE


@pytest.mark.parametrize(("text", "expected"), [("30d", 2_592_000), ("1.5h", 5400), ("90m", 5400), ("10", 10)])
def test_times(text: str, expected: float) -> None:
    assert parse_time(text) == expected
    with pytest.raises(CommandError, match="is no time"):
        parse_time(f"-{text}")


def test_over_tls(make_node: MakeNode, tmp_path: Path) -> None:
    """A daemon with a certificate; one that nobody signed is not believed."""
    certificate = tmp_path / "node.pem"
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", certificate,
         "-out", tmp_path / "only.pem"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    with certificate.open("a") as file:
        file.write((tmp_path / "only.pem").read_text())
    node = make_node(XMIG_TLS_CERT=str(certificate))
    node.start()
    address = node.get("/v1/node")["tcp_address"]
    assert address.startswith("https://")
    secret = ctl(node, "token", "create", "tls").stdout.strip()
    given = ("--url", address, "--token", secret)
    with Program(node) as program:
        assert program.welcome()[0] == 0
        done = ctl(node, *given, "--ca-file", str(tmp_path / "only.pem"), "ps", "-o", "json")
        assert [row["pid"] for row in json.loads(done.stdout)] == [program.pid], done.stderr
    done = ctl(node, *given, "ps")
    assert (done.returncode, "certificate" in done.stderr) == (Exit.NO_DAEMON, True)
    assert ctl(node, *given, "--ca-file", "/nowhere", "ps").returncode == Exit.FAILED


def test_policies(node: Node) -> None:
    done = ctl(node, "policy", "list")
    assert ("max_attempts" in done.stdout, "circuit-breaker" in done.stdout) == (True, True)
    assert re.search(r"snapshot_cost +0\.01 +0\.01 +share", done.stdout), done.stdout
    done = ctl(node, "policy", "set", "recovery", "max_attempts=9", "hang_timeout=60")
    assert done.stdout == "recovery: max_attempts is 9\nrecovery: hang_timeout is 60.0\n", done.stderr
    assert json.loads(ctl(node, "policy", "show", "recovery", "-o", "json").stdout)["settings"]["max_attempts"] == 9
    assert "max_attempts is 5" in ctl(node, "policy", "set", "recovery", "max_attempts=default").stdout
    assert ctl(node, "policy", "set", "recovery", "max_attempts=-1").returncode == Exit.USAGE
    assert ctl(node, "policy", "set", "recovery", "max_attempts").returncode == Exit.USAGE
    assert ctl(node, "policy", "show", "nothing").returncode == Exit.NOT_FOUND


def test_policies_say_what_their_values_mean(node: Node) -> None:
    done = ctl(node, "policy", "show", "devices")
    assert "0: report, 1: cordon, 2: drain, 3: lose" in done.stdout, done.stderr
    assert ("unless the circuit breaker is open." in done.stdout, "\\x0a" in done.stdout) == (True, False)
    assert "0: report, 1: cordon" in ctl(node, "policy", "list").stdout
    ctl(node, "policy", "set", "devices", "max_faults=7")
    assert re.search(rf"max_faults +7 .* {user_name(os.geteuid())} ", ctl(node, "policy", "list").stdout)


def test_no_confirmation_of_a_device_that_is_not_there(node: Node) -> None:
    done = ctl(node, "drain", "cpu:77")  # nobody is there who would answer
    assert (done.returncode, "this node has no device cpu:77" in done.stderr) == (Exit.NOT_FOUND, True), done


def test_a_reason_stays_until_somebody_gives_another_one(node: Node) -> None:
    def reason(*arguments: str) -> str:
        done = ctl(node, "device", *arguments, "cpu:0", "-o", "json")
        assert done.returncode == 0, done.stderr
        return str(json.loads(done.stdout)["cordon_reason"])

    assert reason("cordon", "--reason", "a fan") == "a fan"
    assert reason("cordon") == "a fan"
    assert ctl(node, "drain", "cpu:0", "--yes").returncode == 0
    assert reason("cordon") == "a fan"
    assert reason("cordon", "--reason", "another fan") == "another fan"
    assert reason("uncordon") == ""
    assert ctl(node, "drain", "cpu:0", "--yes").returncode == 0
    assert reason("cordon") == "drained"


def test_a_cordoned_device_is_not_free(node: Node) -> None:
    assert node.get("/v1/fleet")["totals"]["free_devices"] == 2
    assert ctl(node, "device", "cordon", "cpu:0").returncode == 0
    until(lambda: node.get("/v1/fleet")["totals"]["free_devices"] == 1, "one is left")
    assert re.search(r" 2 +1 +0 ", ctl(node, "fleet", "list").stdout)  # devices, free, unhealthy


def test_whose_requests(node: Node) -> None:
    """A user is meant by the name that the list shows."""
    assert ctl(node, "device", "uncordon", "cpu:0").returncode == 0
    name = user_name(os.geteuid())
    for by in (name, str(os.geteuid()), f"user {os.geteuid()}"):
        listed = ctl(node, "audit", "--requestor", by)
        assert ("/v1/devices/cpu:0" in listed.stdout, name in listed.stdout) == (True, True), by
    assert "nothing was requested" in ctl(node, "audit", "--requestor", "token none").stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("peer", "add", "two", "two", "0" * 64), "body.address: write HOST:PORT, or [ADDRESS]:PORT for IPv6"),
        (("peer", "add", "two", "two:7460", "abc"), "body.fingerprint: it has 64 hexadecimal digits"),
        (("peer", "add", "Two!", "two:7460", "0" * 64), "body.name: a node's name has up to 64 small letters"),
        (("webhook", "add", "ftp://x"), "body.url: write http://HOST:PORT/PATH or https://HOST:PORT/PATH"),
        (("webhook", "add", "http://x:0/"), "body.url: there is no port 0"),
        (("ps", "--label", "=="), "query.label.0: a label's key has 1 to 63 of A-Z a-z 0-9"),
    ],
)
def test_what_is_written_wrong_is_answered_in_words(node: Node, arguments: tuple[str, ...], words: str) -> None:
    done = ctl(node, *arguments)
    assert (done.returncode, done.stderr.startswith(f"xmigctl: {words}")) == (Exit.USAGE, True), done.stderr


def test_breaker(node: Node) -> None:
    assert "closed: xMIG acts by itself" in ctl(node, "breaker", "show").stdout
    done = ctl(node, "breaker", "reset")
    assert (done.returncode, "--yes" in done.stderr) == (Exit.USAGE, True)
    assert ctl(node, "breaker", "reset", "--yes").stdout == "the circuit breaker is closed\n"
    assert json.loads(ctl(node, "breaker", "show", "-o", "json").stdout)["state"] == "closed"
