"""What systemd is to the daemon, in a few lines: it listens to sd_notify, keeps descriptors, and passes them on."""

from __future__ import annotations

import fcntl
import os
import shlex
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Any

from xmigd.demo.node import Node
from xmigd.ipc.fds import same_file

HIGH = 400  # where descriptors wait that are to become 3, 4, ... in the next daemon


class ManagedNode(Node):
    """A node whose daemon is a service. `stored` is the store; `reported` is every message without descriptors."""

    def __init__(self, folder: Path, **settings: object) -> None:
        super().__init__(folder, **settings)
        self.stored: list[tuple[str, int]] = []
        self.reported: list[str] = []
        self.watchdog_us = 0
        self._lock = threading.Lock()
        self._heard = threading.Event()
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.bind(str(folder / "notify"))
        threading.Thread(target=self._listen, daemon=True).start()

    def __exit__(self, *what: Any) -> None:
        super().__exit__(*what)
        self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        for _, fd in self.stored:
            os.close(fd)

    @property
    def names(self) -> list[str]:
        with self._lock:
            return [name for name, _ in self.stored]

    @property
    def memory(self) -> set[int]:
        """What it has of jobs' memory: the files' inodes."""
        with self._lock:
            links = {fd: os.readlink(f"/proc/self/fd/{fd}") for _, fd in self.stored}
            return {os.fstat(fd).st_ino for fd, link in links.items() if "memfd:xmig-" in link and "index" not in link}

    def lose(self, what: str) -> None:
        """As if there had been no room for those that are such files."""
        with self._lock:
            lost = [name for name, fd in self.stored if what in os.readlink(f"/proc/self/fd/{fd}")]
            assert lost, what
            for name in lost:
                self._remove(name)

    def hear(self) -> None:
        """Everything that was reported until now. A manager looks at that before it sees to a service that has died."""
        heard = threading.Event()
        with self._lock:
            self._heard = heard
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.sendto(b"HEARD=1", str(self.folder / "notify"))
        heard.wait()

    def popen(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        self.hear()
        with self._lock:
            sources = [fcntl.fcntl(fd, fcntl.F_DUPFD, HIGH) for _, fd in self.stored]
            names = ":".join(name for name, _ in self.stored)
        redirections = " ".join(f"{3 + i}<&{fd} {fd}<&-" for i, fd in enumerate(sources))
        command = f"export LISTEN_PID=$$; exec {shlex.quote(sys.executable)} -m xmigd.main {redirections}"
        environment = self.environment | {"NOTIFY_SOCKET": str(self.folder / "notify")}
        if sources:
            environment |= {"LISTEN_FDS": str(len(sources)), "LISTEN_FDNAMES": names}
        if self.watchdog_us:
            environment["WATCHDOG_USEC"] = str(self.watchdog_us)
        process = subprocess.Popen(
            ["bash", "-c", command], env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True, pass_fds=sources,
        )  # fmt: skip
        for fd in sources:
            os.close(fd)
        return process

    def _listen(self) -> None:
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self._sock, 1 << 16, 16)
            except OSError:
                return
            if not data:
                return
            lines = dict(line.split("=", 1) for line in data.decode().split("\n"))
            with self._lock:
                if "FDSTORE" in lines:
                    for fd in fds:
                        self._add(lines["FDNAME"], fd)
                elif "FDSTOREREMOVE" in lines:
                    self._remove(lines["FDNAME"])
                elif "HEARD" in lines:
                    self._heard.set()
                else:
                    self.reported.append(data.decode())

    def _add(self, name: str, fd: int) -> None:
        """An open file is kept once, under its first name."""
        if any(same_file(fd, kept) for _, kept in self.stored):
            os.close(fd)
        else:
            self.stored.append((name, fd))

    def _remove(self, name: str) -> None:
        for stored in [stored for stored in self.stored if stored[0] == name]:
            os.close(stored[1])
            self.stored.remove(stored)
