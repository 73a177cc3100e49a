"""One user takes thousands of connections, at every socket that strangers come to: nobody else notices."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import harness
from tests.api.callers import become
from tests.connections.callers import HOG, MANY, OTHER, ask, crowd, delay, times
from tests.daemon.conftest import MakeNode, make_node, peer_native
from tests.daemon.node import Node, Program, send_raw, until
from tests.web.front import Front
from xmigd.ipc.handshake import pack_hello, unpack_welcome

__all__ = ["make_node", "peer_native"]

EACH, LOBBY = 128, 2  # xmigd.settings, xmigd.connections.quotas
HEALTH_REQUESTS = 200  # of the hog's, at most: `idle` does, and gets that without a place
# Seconds of a processor of its own for 99 of 100 answers; what it is meant to be is measured by `make bench`.
GENEROUS = 2.0


def descriptors(node: Node) -> int:
    return len(os.listdir(f"/proc/{node.pid}/fd"))


@harness.needs_root
@pytest.mark.parametrize("kind", ["silent", "slow", "idle"])
@pytest.mark.parametrize("where", ["unix", "tcp", "web"])
def test_others_are_served(make_node: MakeNode, where: str, kind: str) -> None:
    patient = {"request_timeout": "600", "idle_timeout": "600"}  # what is silent stays until it is instructed to go
    node = make_node(**{f"XMIG_{name.upper()}": value for name, value in patient.items()})
    node.start()
    before = descriptors(node)
    with contextlib.ExitStack() as stack:
        target: str | Path = node.runtime_dir / "api.sock"
        path, token, pid = "/v1/node", "", node.pid
        if where == "tcp":
            with node.http() as http:
                token = http.post("/v1/tokens", json={"name": "t"}).json()["token"]
            target = node.get("/v1/node")["tcp_address"].removeprefix("http://")
        elif where == "web":
            front = stack.enter_context(Front(node, **patient))
            assert front.process is not None
            pid = front.process.pid
            target, path = front.address.removeprefix("http://"), "/login"
        end = stack.enter_context(crowd(kind, target, MANY, HOG))

        def once() -> None:
            assert ask(target, path, uid=OTHER, token=token)[0] == 200

        times_longer = delay(pid)
        assert times(100, once) < GENEROUS * times_longer()
        assert ask(target, path, token=token)[0] == 200  # root
        for uid in (0, OTHER):
            assert ask(target, "/healthz", uid=uid)[0] == 200
        assert descriptors(node) < before + EACH + 40
        status, problem = ask(target, path, uid=HOG, token=token)
        assert (status, problem.get("code")) == (429, "too_many_connections")
        assert problem["detail"].startswith(f"user {HOG} has {EACH} connections open")
        assert "USER_CONNECTIONS" in problem["hint"]
        found = end()
        assert found["open"] <= EACH + LOBBY, found
        assert found["statuses"]["429"] > MANY - EACH - HEALTH_REQUESTS, found
        assert json.loads(found["why"])["code"] == "too_many_connections"
        until(lambda: ask(target, path, uid=HOG, token=token)[0] == 200, "its places are free again")


@harness.needs_root
def test_programs_of_others_shake_hands(make_node: MakeNode) -> None:
    node = make_node()
    node.start()
    with crowd("handshakes", node.runtime_dir / "client.sock", MANY, HOG):
        with Program(node) as program:
            welcome = program.welcome()
            assert welcome[0] == 0, welcome

        def reported() -> bool:
            """Not if the crowd has the places for those who have none, too."""
            with become(HOG):
                reported = send_raw(node.runtime_dir / "client.sock", pack_hello("", "x"))
            return bool(reported) and unpack_welcome(reported)[3].startswith(
                f"user {HOG} has 128 unfinished handshakes open"
            )

        until(reported, "it gets the reason")
    with become(HOG):
        until(
            lambda: "no job" in unpack_welcome(send_raw(node.runtime_dir / "client.sock", pack_hello("j", "x")))[3],
            "its places are free again",
        )


@harness.needs_root
def test_a_program_says_what_it_was_reported(make_node: MakeNode, native_dir: Path) -> None:
    """The real library, of a user who has too many handshakes open: one line for whoever has started the program."""
    node = make_node(native_dir, XMIG_DEVICES="cpu:0")
    node.start()
    code = (
        "import ctypes, os, sys\n"
        f"os.setgroups([]); os.setgid({HOG}); os.setuid({HOG})\n"
        "status = os.fstat(2); os.environ['XMIG_STDERR'] = f'{status.st_dev}:{status.st_ino}'\n"
        "sys.exit(ctypes.CDLL(sys.argv[1]).cuInit(0) == 0)\n"
    )
    environment = node.environment | {"XMIG_SOCKET": str(node.runtime_dir / "client.sock")}

    def says() -> str | None:
        """None: it was let in, at a moment at which the daemon had closed some of the others."""
        with tempfile.TemporaryFile("w+") as reported:  # a pipe of ours is none that the other user can open anew
            done = subprocess.run(
                [sys.executable, "-c", code, str(native_dir / "libcuda.so.1")], env=environment, stderr=reported,
                timeout=60, check=False,
            )  # fmt: skip
            reported.seek(0)
            text = reported.read()
        assert done.returncode == (1 if text == "" else 0), text
        return text or None

    with crowd("handshakes", node.runtime_dir / "client.sock", MANY, HOG):
        reported = [until(says, "one is refused") for _ in range(5)]
    for line in reported:
        assert f"xmigd refused this process: user {HOG} has 128 unfinished handshakes open" in line
        assert "start fewer programs at once" in line


@harness.needs_root
def test_descriptors_are_left_for_devices_memory(make_node: MakeNode) -> None:
    """With 256 in all. Everybody at once, at every socket: programs start nevertheless."""
    node = make_node()
    node.start("prlimit", "--nofile=256:256")
    with contextlib.ExitStack() as stack:
        tcp = node.get("/v1/node")["tcp_address"].removeprefix("http://")
        for number in range(6):
            for kind, target in (("silent", node.runtime_dir / "api.sock"), ("silent", tcp),
                                 ("handshakes", node.runtime_dir / "client.sock")):  # fmt: skip
                stack.enter_context(crowd(kind, target, 300, HOG + number))
        programs = [stack.enter_context(Program(node)) for _ in range(4)]
        for program in programs:
            assert program.welcome()[0] == 0
        until(lambda: [p["standby"] for p in node.processes(live=True)] == ["warm"] * 4, "standbys")
        api = node.runtime_dir / "api.sock"
        until(lambda: ask(api, "/healthz", uid=OTHER)[0] == 200, "the crowd's last have left the lobby")
        assert ask(api, "/v1/node")[0] == 200
        assert "cannot be taken" not in node.log.read_text()


@harness.needs_root
def test_a_reserve_for_root_and_for_health(make_node: MakeNode) -> None:
    """Several users have taken everything together."""
    node = make_node(XMIG_CONNECTIONS="16", XMIG_USER_CONNECTIONS="6")
    node.start()
    api = node.runtime_dir / "api.sock"
    with crowd("idle", api, 20, HOG), crowd("idle", api, 20, HOG + 1):
        status, problem = ask(api, "/v1/node", uid=OTHER)
        assert (status, problem["code"]) == (503, "connections_full")
        assert "XMIG_CONNECTIONS" in problem["hint"]
        for path in ("/healthz", "/readyz"):
            until(lambda path=path: ask(api, path, uid=OTHER)[0] == 200, "the crowd's last have left the lobby")  # type: ignore[misc]
        assert ask(api, "/v1/node")[0] == 200
        metrics = node_metrics(node)
        assert metrics['xmigd_connections{kind="ordinary"}'] == 12
        assert metrics['xmigd_connections_refused_total{limit="user"}'] >= 28
    until(lambda: ask(api, "/v1/node", uid=OTHER)[0] == 200, "the places are free again")


def test_the_dashboards_health(make_node: MakeNode) -> None:
    node = make_node()
    node.start()
    with Front(node) as front, httpx.Client(base_url=front.address, timeout=60) as http:
        for path in ("/healthz", "/readyz"):
            answer = http.get(path)
            assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
        assert node.kill() < 0
        assert http.get("/healthz").status_code == 200
        answer = http.get("/readyz")
        assert (answer.status_code, answer.json()["code"]) == (503, "no_daemon")


def test_idle_connections_are_closed(make_node: MakeNode) -> None:
    """At every door: after a request, when nothing follows; and when a request does not get on, with the reason."""
    # More than anybody takes to send a line, however busy this machine is. All wait at the same time.
    times = {"request_timeout": "5", "idle_timeout": "5"}
    node = make_node(**{f"XMIG_{name.upper()}": value for name, value in times.items()})
    node.start()
    with Front(node, **times) as front, contextlib.ExitStack() as stack:
        doors: list[Any] = [str(node.runtime_dir / "api.sock")]
        for address in (node.get("/v1/node")["tcp_address"], front.address):
            host, _, port = address.removeprefix("http://").rpartition(":")
            doors.append((host, int(port)))
        waiting: list[tuple[socket.socket, bytes]] = []
        whole = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
        part = b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n123"
        for door in doors:
            # Whoever asks for what needs a token is informed that first.
            for begun in (whole, b"", b"GET /healthz HTTP/1.1\r\nHost:", *([part] if isinstance(door, str) else [])):
                sock = stack.enter_context(socket.socket(socket.AF_UNIX if isinstance(door, str) else socket.AF_INET))
                sock.settimeout(60)
                sock.connect(door)
                sock.sendall(begun)
                waiting.append((sock, begun))
        for sock, begun in waiting:
            reported = read(sock)
            if begun is whole:
                assert reported.startswith(b"HTTP/1.1 200 ")
                assert reported.count(b"HTTP/1.1") == 1  # it has got what it requested, and nothing else
                continue
            status, problem = int(reported[9:12]), json.loads(reported.partition(b"\r\n\r\n")[2])
            assert (status, problem["code"]) == (408, "request_timeout"), reported
            assert problem["hint"] == "send headers and body without a pause"


def read(sock: socket.socket) -> bytes:
    """Until it ends."""
    reported = b""
    while piece := sock.recv(1 << 16):
        reported += piece
    return reported


def node_metrics(node: Node) -> dict[str, float]:
    with node.http() as http:
        lines = re.findall(r"^(\w+(?:\{.*\})?) (\S+)$", http.get("/metrics").text, re.MULTILINE)
    return {name: float(value) for name, value in lines}


@harness.needs_root
def test_streams_count_apart(make_node: MakeNode) -> None:
    node = make_node(XMIG_USER_STREAMS="3", XMIG_USER_CONNECTIONS="2")
    node.start()

    def client() -> httpx.Client:
        transport = httpx.HTTPTransport(uds=str(node.runtime_dir / "api.sock"), verify=False)
        return httpx.Client(transport=transport, base_url="http://localhost", timeout=60)

    events: Any = {"method": "GET", "url": "/v1/events", "headers": {"accept": "text/event-stream"}}
    with client() as http, client() as others, contextlib.ExitStack() as streams:
        with become(HOG):
            first = [streams.enter_context(http.stream(**events)) for _ in range(3)]
            assert {answer.status_code for answer in first} == {200}
            fourth = http.request(**events)
            assert (fourth.status_code, fourth.json()["code"]) == (429, "too_many_streams")
            assert f"user {HOG} listens to events 3 times" in fourth.json()["detail"]
            assert http.get("/v1/node").status_code == 200  # they are no ordinary connections
        with become(OTHER), others.stream(**events) as other:
            assert other.status_code == 200
        streams.close()
        with become(HOG):

            def again() -> bool:
                with http.stream(**events) as answer:
                    return answer.status_code == 200

            until(again, "its streams are free again")
