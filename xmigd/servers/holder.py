"""Holds the descriptors of a suspended process, so that its memory lives while no server and perhaps no daemon does.

It uses the servers' protocol (docs/protocol.md), does no work, and needs nothing but the standard library: the daemon
starts it by its path. When the daemon goes away it announces itself to the next one. It ends with its program.

    python holder.py --control-fd N --runtime-dir DIR
"""

from __future__ import annotations

import argparse
import array
import contextlib
import json
import os
import resource
import select
import socket
import sys
import time
from typing import Any

MAX_MESSAGE = 64 << 10
MAX_FDS = 5
RETRY_AFTER = 0.02


class Holder:
    def __init__(self, sock: socket.socket, runtime_dir: str) -> None:
        self._sock = sock
        self._runtime_dir = runtime_dir
        self._job: dict[str, Any] | None = None
        self._fds: list[int] = []
        self._memory: list[tuple[bytes, int]] = []
        self._client = -1
        self._complete = False

    def run(self) -> int:
        self._send("hello", pid=os.getpid(), device="holder", warm_ms=0.0, device_bytes=0)
        while True:
            poll = select.poll()  # not select: it holds more descriptors than select can number
            poll.register(self._sock, select.POLLIN)
            if self._client >= 0:
                poll.register(self._client, select.POLLIN)
            if self._client in [fd for fd, _ in poll.poll()]:
                return 0
            data, fds = self._receive()
            if data:
                self._take(json.loads(data), data, fds)
            elif not self._complete or not self._next_daemon():
                return 0

    def _take(self, message: dict[str, Any], data: bytes, fds: list[int]) -> None:
        if message["type"] == "assign":
            self._job, self._fds = message, fds
            self._client = os.pidfd_open(message["client_pid"])
        elif message["type"] == "memory":
            self._memory.append((data, fds[0]))
        elif message["type"] == "go":
            self._complete = True
            self._send("kept")
        elif message["type"] == "output":
            os.dup2(fds[0], 1)
            os.dup2(fds[0], 2)
            os.close(fds[0])
        elif message["type"] == "stop":
            sys.exit(0)

    def _next_daemon(self) -> bool:
        """Announce everything to the next daemon. False: the program has exited meanwhile."""
        self._sock.close()
        while True:
            poll = select.poll()
            poll.register(self._client, select.POLLIN)
            if poll.poll(0):
                return False
            self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                self._sock.connect(f"{self._runtime_dir}/control.sock")
                break
            except OSError:
                self._sock.close()
                time.sleep(RETRY_AFTER)
        assert self._job is not None
        self._send(
            "announce", self._fds, job=self._job["job"], pid=os.getpid(), device="holder",
            client_pid=self._job["client_pid"], generation=self._job["generation"], keeps=self._job["keeps"],
            snapshot=self._job.get("snapshot"), takes_output=True,
        )  # fmt: skip
        for message, fd in self._memory:
            self._send_bytes(message, [fd])
        self._send("announced")
        return True

    def _receive(self) -> tuple[bytes, list[int]]:
        try:
            space = socket.CMSG_SPACE(MAX_FDS * 4)
            data, ancillary, _, _ = self._sock.recvmsg(MAX_MESSAGE, space, socket.MSG_CMSG_CLOEXEC)
        except OSError:
            return b"", []
        fds: array.array[int] = array.array("i")
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
        return data, list(fds)

    def _send(self, type: str, fds: list[int] | None = None, **fields: Any) -> None:
        self._send_bytes(json.dumps({"type": type, **fields}).encode(), fds or [])

    def _send_bytes(self, message: bytes, fds: list[int]) -> None:
        with contextlib.suppress(OSError):  # the daemon has gone: what is received next says so
            socket.send_fds(self._sock, [message], fds)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--runtime-dir", required=True)
    options = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    sys.exit(Holder(socket.socket(fileno=options.control_fd), options.runtime_dir).run())


if __name__ == "__main__":
    main()
