"""Processes that end TLS for connections with pieces of content (pump.py)."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from pathlib import Path

from xmigd.peers.certificates import Identity
from xmigd.transfers import pump

SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33  # of Linux; Python does not know them
ROOM = 4 << 20  # bytes on their way between the processes


def start_pump(
    sock: socket.socket, identity: Identity, certificate: str
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """For a connection of who has this certificate (PEM): the process, and a socket for what comes and goes. Raises
    OSError."""
    ours, theirs = socket.socketpair()
    with contextlib.ExitStack() as stack:
        stack.callback(ours.close)
        with theirs:
            for option in (SO_SNDBUFFORCE, SO_RCVBUFFORCE):
                with contextlib.suppress(OSError):  # not root: it is slower
                    ours.setsockopt(socket.SOL_SOCKET, option, ROOM)
                    theirs.setsockopt(socket.SOL_SOCKET, option, ROOM)
            numbers = sock.fileno(), theirs.fileno()
            command = [sys.executable, "-I", "-S", str(Path(pump.__file__).resolve()), *map(str, numbers)]
            process = subprocess.Popen(
                [*command, str(identity.file.resolve()), certificate], pass_fds=numbers, stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        stack.pop_all()
    return process, ours


def read_first(sock: socket.socket, length: int) -> bytes:
    """What comes before TLS. Raises OSError, ValueError: it ends before."""
    content = b""
    while len(content) < length:
        more = sock.recv(length - len(content))
        if not more:
            raise ValueError("the connection ended before it had begun")
        content += more
    return content
