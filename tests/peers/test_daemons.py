"""Real daemons that know each other: how that is entered, who is refused, and what restarts and standstills do."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import ctl
from tests.harness import make_certificate, stop, wait_until
from tests.peers.nodes import PeerNode, connected, daemons
from xmigd.cli.exits import Exit
from xmigd.client import Refused
from xmigd.peers.certificates import FILE as IDENTITY
from xmigd.peers.known import FILE as KNOWN


@pytest.fixture
def pair(native_dir: Path) -> Iterator[list[PeerNode]]:
    """Two that are connected."""
    with daemons(native_dir, "a", "b") as (a, b):
        a.knows(b)
        b.knows(a)
        connected(a, b)
        yield [a, b]


def test_entered_on_the_command_line(native_dir: Path) -> None:
    with daemons(native_dir, "one.example", "other-2") as (one, other):
        shown = {node.name: json.loads(ctl(node, "peer", "show", "-o", "json").stdout) for node in (one, other)}
        assert [shown[name]["node"] for name in shown] == ["one.example", "other-2"]
        assert shown["other-2"]["address"] == other.address
        assert other.fingerprint in ctl(other, "peer", "show").stdout
        assert ctl(one, "peer", "list").stdout == "no peers\n"
        colons = ":".join(other.fingerprint.upper()[at : at + 2] for at in range(0, 64, 2))
        done = ctl(one, "peer", "add", "other-2", other.address, colons)
        assert done.stdout == f"other-2 at {other.address} is known\n"
        one.until("other-2", "refused", "may not know")
        assert ctl(other, "peer", "add", "one.example", one.address, one.fingerprint).returncode == 0
        connected(one, other)
        listed = ctl(one, "peer", "list").stdout
        assert ("other-2" in listed, "connected" in listed) == (True, True)
        done = ctl(one, "peer", "add", "other-2", other.address, other.fingerprint)
        assert (done.returncode, "peer rm" in done.stderr) == (Exit.REFUSED, True)
        assert ctl(one, "peer", "rm", "other-2").stdout == "other-2 is removed\n"
        assert ctl(one, "peer", "rm", "other-2").returncode == Exit.NOT_FOUND
        other.until("one.example", "refused")
        for state in (one.folder, other.folder):
            for file in (IDENTITY, KNOWN):
                assert stat.S_IMODE((state / file).stat().st_mode) == 0o600


def test_three_daemons_and_messages_between_all(native_dir: Path) -> None:
    with daemons(native_dir, "a", "b", "c") as nodes:
        for here in nodes:
            for there in nodes:
                if here is not there:
                    here.knows(there)
        connected(*nodes)
        for here in nodes:
            for there in nodes:
                if here is not there:
                    assert here.send(there, 500, 100) == 500
        for here in nodes:
            for there in nodes:
                if here is not there:
                    heard = here.until_heard(there, 500)
                    assert (heard["wrong"], heard["last"]) == ([], 500)


def test_a_wrong_fingerprint_is_refused_on_both_sides(native_dir: Path) -> None:
    with daemons(native_dir, "a", "b") as (a, b):
        b.knows(a)
        a.client.post("/v1/peers", {"name": "b", "address": b.address, "fingerprint": "0" * 64})
        why = a.until("b", "refused", "another fingerprint")["why"]
        assert b.fingerprint in why
        b.until("a", "refused")
        assert not a.send(b, 1)
        assert "a peer is refused" in a.log.read_text()
        assert "claims_to_be=b" in a.log.read_text()


def test_a_peer_with_another_certificate_is_refused(pair: list[PeerNode]) -> None:
    """As if somebody else had taken its address: its identity is made anew."""
    a, b = pair
    b.stop()
    (b.folder / IDENTITY).unlink()
    b.start()
    a.until("b", "refused", "not the known one")
    wait_until(lambda: "claims_to_be=b" in a.log.read_text(), "the refusal is in the log")
    assert a.heard(b)["events"][2].startswith("down")
    assert "up" not in a.heard(b)["events"][3:]


def test_strangers_are_refused(pair: list[PeerNode], tmp_path: Path) -> None:
    a, b = pair
    host, _, port = a.address.partition(":")
    with socket.create_connection((host, int(port))) as plain:
        plain.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert plain.recv(100) == b""
    wait_until(lambda: "a connection to this node is refused" in a.log.read_text(), "it is in the log")

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    reads_nothing(context, host, int(port))  # no certificate
    certificate, key = make_certificate(tmp_path)
    context.load_cert_chain(certificate, key)
    reads_nothing(context, host, int(port))  # one that nobody knows
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    old.load_cert_chain(a.folder / IDENTITY)
    with pytest.raises(OSError, match=r"\w"), socket.create_connection((host, int(port))) as s, old.wrap_socket(s):
        pass
    connected(a, b)
    assert a.heard(b)["events"] == ["session", "up"]


def reads_nothing(context: ssl.SSLContext, host: str, port: int) -> None:
    with socket.create_connection((host, port)) as plain:
        try:
            with context.wrap_socket(plain) as tls:
                tls.sendall(b"x")
                assert tls.recv(100) == b""
        except OSError:
            pass  # refused with an alert


def test_silent_strangers_do_not_keep_peers_out(pair: list[PeerNode]) -> None:
    a, b = pair
    host, _, port = a.address.partition(":")
    silent = [socket.create_connection((host, int(port))) for _ in range(20)]
    b.stop()
    b.start()
    connected(a, b)
    for sock in silent:
        sock.close()


def test_garbage_after_the_handshake_ends_the_connection_only(pair: list[PeerNode]) -> None:
    """Who has a peer's key may still send anything."""
    a, b = pair
    b.stop()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.load_cert_chain(b.folder / IDENTITY)
    host, _, port = a.address.partition(":")
    for garbage in (b"\xff" * 100, b"\0" * 13, os.urandom(5000), b"\0\0\0\2\1" + bytes(7) + b"\1[]"):
        with socket.create_connection((host, int(port))) as plain, context.wrap_socket(plain) as tls:
            tls.settimeout(30)
            assert tls.recv(5)  # a leads, and begins
            tls.sendall(garbage)
            try:
                while tls.recv(4096):
                    pass
            except (ConnectionError, ssl.SSLError):
                pass
    a.until("b", "unreachable")
    assert "it sent what is not allowed" in a.log.read_text()
    assert "Traceback" not in a.log.read_text()
    b.start()
    connected(a, b)


def test_a_killed_daemon_begins_a_new_session(pair: list[PeerNode]) -> None:
    a, b = pair
    assert a.send(b, 10) == 10
    b.until_heard(a, 10)
    b.kill()
    a.until("b", "unreachable")
    assert a.send(b, 5) == 5  # nobody knows yet that there will be no such session
    b.start()
    connected(a, b)
    events = a.heard(b)["events"]
    assert events[:2] + events[3:] == ["session", "up", "session", "up"]
    assert events[2].startswith("down: ")
    assert b.heard(a) == {"events": ["session", "up"], "wrong": [], "last": 0}  # and not the five
    assert a.send(b, 3) == 3
    assert b.until_heard(a, 3)["wrong"] == []


def test_a_stopped_daemon_is_down_and_up_again_without_loss(pair: list[PeerNode]) -> None:
    a, b = pair
    assert b.process is not None
    stop(b.process.pid)
    try:
        a.until("b", "unreachable")
        assert any("silent for 5 s" in event for event in a.heard(b)["events"])
        assert a.send(b, 1000, 500) == 1000
    finally:
        os.kill(b.process.pid, signal.SIGCONT)
    heard = b.until_heard(a, 1000)
    assert (heard["wrong"], heard["events"].count("session")) == ([], 1)
    connected(a, b)
    events = a.heard(b)["events"]
    assert (events.count("session"), events.count("up")) == (1, 2)


def test_who_is_behind_for_too_long_begins_anew(pair: list[PeerNode]) -> None:
    a, b = pair
    assert b.process is not None
    stop(b.process.pid)
    try:
        sent = a.send(b, 2000, 100_000)
        assert 600 < sent < 700  # 64 MiB
        assert not a.send(b, 1)
        wait_until(lambda: any("64 MiB" in event for event in a.heard(b)["events"]), "its users hear why")
    finally:
        os.kill(b.process.pid, signal.SIGCONT)
    wait_until(lambda: a.heard(b)["events"].count("session") == 2, "a new session begins")
    assert a.send(b, 10) == 10
    wait_until(lambda: b.heard(a)["events"].count("session") == 2 and b.heard(a)["last"] == 10, "it arrives")
    assert b.heard(a)["wrong"] == []


def test_a_peer_that_only_connects(native_dir: Path) -> None:
    """It listens nowhere; so its certificate is entered."""
    with daemons(native_dir, "a") as (a,), daemons(native_dir, "z") as (z,):
        z.stop()
        z.environment["XMIG_PEER_PORT"] = "-1"
        z.start()
        own = z.client.get("/v1/identity")
        assert own["address"] is None
        body = {"name": "z", "address": "127.0.0.1:1", "fingerprint": own["fingerprint"]}
        with pytest.raises(Refused, match="another fingerprint"):
            a.client.post("/v1/peers", body | {"certificate": a.client.get("/v1/identity")["certificate"]})
        a.client.post("/v1/peers", body | {"certificate": own["certificate"]})
        z.knows(a)
        connected(a, z)
        assert a.send(z, 10) == z.until_heard(a, 10)["last"]


def test_names_that_differ_are_reported(native_dir: Path) -> None:
    with daemons(native_dir, "a", "b") as (a, b):
        a.client.post("/v1/peers", {"name": "bee", "address": b.address, "fingerprint": b.fingerprint})
        b.knows(a)
        a.until("bee", "refused", "'bee'")


def test_what_cannot_be_a_peer(native_dir: Path) -> None:
    with daemons(native_dir, "a") as (a,):
        good = {"name": "b", "address": "b:1", "fingerprint": "0" * 64}
        wrong = (
            {"name": "B"}, {"name": ""}, {"name": "x" * 65}, {"address": "b"}, {"address": "b:0"},
            {"address": "b:99999"}, {"fingerprint": "0" * 63}, {"certificate": "x"}, {"name": "a"},
            {"fingerprint": a.fingerprint},
        )  # fmt: skip
        for each in wrong:
            with pytest.raises(Refused):
                a.client.post("/v1/peers", good | each)
        assert a.client.get("/v1/peers") == []
