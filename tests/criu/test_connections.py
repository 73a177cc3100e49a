"""Connections of a program that CRIU has read: they are as they were before."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from xmigd.checkpoints import connections

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root reads connections of others")

# The address of one end only may be used again.
PROGRAM = """
import socket
listening = socket.create_server(("127.0.0.1", 0))
listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
one = socket.create_connection(listening.getsockname())
two, _ = listening.accept()
two.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
print("ready", flush=True)
input()
one.sendall(b"content")
print(two.recv(7), *(each.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR) for each in (one, two)), flush=True)
"""
# What CRIU does where it leaves a program stopped. Its exit code: how many there are.
READING = """
import socket, sys
from xmigd.checkpoints.connections import TCP_REPAIR, _connections
count = 0
for _, sock in _connections(int(sys.argv[1])):
    if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        sock.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 1)
        count += 1
sys.exit(count)
"""


@pytest.mark.parametrize("with_connections", [True, False])
def test_they_work_afterwards(with_connections: bool) -> None:
    """Without that, nothing can be sent: it is what CRIU leaves behind."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        reading = [sys.executable, "-c", READING, str(program.pid)]
        first = [sys.executable, "-I", "-S", connections.__file__, str(program.pid)] if with_connections else []
        done = subprocess.run([*first, *reading], check=False)
        assert done.returncode == 2  # what the command returns
        out, errors = program.communicate("\n", timeout=60)
    assert (out == "b'content' 0 1\n") is with_connections, errors
    assert ("Invalid argument" in errors) is not with_connections


def test_without_sockets_it_imports_little() -> None:
    """A program stands still meanwhile."""
    with subprocess.Popen(["sleep", "60"], stdin=subprocess.DEVNULL, close_fds=True) as program:
        command = [sys.executable, "-I", "-S", "-X", "importtime", connections.__file__, str(program.pid), "true"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        program.kill()
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert imported.isdisjoint({"contextlib", "ctypes", "socket", "_socket", "typing"}), imported
