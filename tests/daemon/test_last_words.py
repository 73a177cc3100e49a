"""What a server says last is heard, whatever it leaves unread in its socket."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

from tests.harness import stop
from xmigd.ipc.channel import Channel, Received
from xmigd.native import SERVER

from .node import Node, Program, until


def everything(sock: socket.socket) -> list[dict[str, Any]]:
    """All messages until the other end closes. Raises ConnectionResetError where the kernel says that before them."""
    reported = []
    while data := sock.recv(65536):
        reported.append(json.loads(data))
    return reported


def test_a_server_takes_what_it_has_not_read_with_it(native_dir: Path) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(60)
    with ours, theirs:
        server = subprocess.Popen(
            [native_dir / SERVER, "--device", "cpu:0", "--control-fd", str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
        )
        theirs.close()
        while (first := json.loads(ours.recv(65536))["type"]) == "log":  # of the device that it opens
            pass
        assert first == "hello"
        stop(server.pid)
        ours.send(b'{"type":"stop","reason":"in the middle of a sentence"}')
        for _ in range(5):
            ours.send(b'{"type":"snapshot"}')
        os.kill(server.pid, signal.SIGCONT)
        assert [message["text"] for message in everything(ours)] == ["stopped: in the middle of a sentence"]
        assert server.wait(60) == 0


def test_a_peer_that_was_killed_with_messages_unread_is_heard_to_the_end() -> None:
    heard: list[Any] = []

    async def listen() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ended = asyncio.Event()

        def closed(reason: str, by_peer: bool) -> None:
            heard.append((reason, by_peer))
            ended.set()

        def received(message: Received) -> None:
            heard.append(message.data)

        channel = Channel(asyncio.get_running_loop(), ours, received, closed)
        channel.send(b"never read")
        for number in range(3):
            theirs.send(b"%d" % number)
        theirs.close()
        async with asyncio.timeout(60):
            await ended.wait()

    asyncio.run(listen())
    assert heard == [b"0", b"1", b"2", ("it closed its connection", True)]


def test_the_cause_is_recorded(node: Node) -> None:
    """An illegal address, while the server has not read what the daemon says."""
    with Program(node) as program, node.http() as http:
        assert program.welcome()[0] == 0
        process = node.wait_for_standby()
        node.behave(inject="fault")
        stop(process["server_pid"])
        for _ in range(3):
            answer = http.post(f"/v1/jobs/{process['job_id']}/faults:inject", json={"kind": "kill"})
            assert answer.status_code == 202
        os.kill(process["server_pid"], signal.SIGCONT)
        until(lambda: node.get("/v1/faults"), "a fault")
        (fault,) = [fault for fault in node.get("/v1/faults") if fault["kind"] != "injected"]
        assert (fault["error"], fault["text"]) == (700, "an illegal address")
