"""A peer for tests of the control protocol: says what xmig-server says, and does no work.

It hands over memfds as its device memory and checks that they come back at a recovery. What it shall do wrong is read
from `behaviour.json` in the runtime directory: {"<point>": "<what>"}, where the point is `hello`, `assign`, `inject` or
`go`, and what is `exit`, `garbage`, `hang`, `fault`, `unavailable`, `close`, `linger`, or a number: so often `exit`,
then good.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import select
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

GRANULE = 2 << 20
SYS_EXIT = 60  # of one thread; x86-64


class Peer:
    def __init__(self, options: argparse.Namespace) -> None:
        self.device = options.device
        self.runtime_dir = Path(options.runtime_dir)
        self.sock = socket.socket(fileno=options.control_fd)
        self.job: dict[str, Any] | None = None
        self.fds: list[int] = []
        self.memory: dict[int, tuple[dict[str, Any], int]] = {}
        self.client: int | None = None
        self.generation = 0
        self.cuts = 0

    def behave(self, point: str) -> None:
        path = self.runtime_dir / "behaviour.json"
        what = json.loads(path.read_text()).get(point) if path.exists() else None
        if isinstance(what, int):
            path.write_text(json.dumps({point: what - 1} if what > 1 else {}))
            what = "exit"
        if what == "exit":
            sys.exit(3)
        if what == "garbage":
            self.sock.send(b"\x00not json")
        if what == "unavailable":
            self.send("unavailable", error=46, text="another process has the device")
            sys.exit(1)
        if what == "hang":
            time.sleep(600)
        if what == "close":
            self.sock.close()
            time.sleep(600)
        if what == "linger":
            # The process is on its way out, and its connection closed, while another thread of it still lives.
            threading.Thread(target=time.sleep, args=(600,)).start()
            self.sock.close()
            ctypes.CDLL(None).syscall(SYS_EXIT, 0)
        if what == "fault":
            self.send(
                "fault", sequence=7, op="xmLaunch", error=700, text="an illegal address", t=time.monotonic_ns(),
                after=0, until=0,
            )  # fmt: skip
            sys.exit(70)

    def send(self, type: str, *, fds: list[int] | None = None, **fields: Any) -> None:
        socket.send_fds(self.sock, [json.dumps({"type": type, **fields}).encode()], fds or [])

    def add_memory(self, number: int) -> None:
        fd = os.memfd_create("memory")
        os.ftruncate(fd, GRANULE)
        os.pwrite(fd, f"generation {self.generation}".encode(), 0)
        fields = {
            "op": "add", "id": number, "kind": "device", "ordinal": 0, "address": 0x200000000000 + number * GRANULE,
            "bytes": GRANULE, "name": "",
        }  # fmt: skip
        self.memory[number] = (fields, fd)
        self.send("memory", fds=[fd], **fields)

    def take(self, message: dict[str, Any], fds: list[int]) -> None:
        match message["type"]:
            case "assign":
                self.job, self.fds = message, fds
                self.client = os.pidfd_open(message["client_pid"])
                self.behave("assign")
                if message["mode"] == "lost":
                    sys.exit(0)
                if message["mode"] == "fresh":
                    self.generation = 1
                    for number in (1, 2, 3):
                        self.add_memory(number)
                    del self.memory[3]
                    self.send("memory", op="drop", id=3)
                    self.send("ready", generation=1, t=time.monotonic_ns())
            case "memory":
                content = os.pread(fds[0], 12, 0)
                assert content == b"generation 1", content
                self.memory[message["id"]] = ({k: v for k, v in message.items() if k != "type"}, fds[0])
            case "go":
                self.behave("go")
                assert sorted(self.memory) == [1, 2], sorted(self.memory)
                assert self.job is not None
                for name in ("mapped", "restored"):
                    self.send("phase", name=name, t=time.monotonic_ns())
                self.send(
                    "phase", name="redone", t=time.monotonic_ns(), records=10, compared=4, differing=0,
                    first_difference=None,
                )  # fmt: skip
                if self.job["deliver"] is not None:
                    self.send("program_error", **self.job["deliver"])
                self.send("phase", name="resumed", t=time.monotonic_ns())
            case "inject":
                self.behave("inject")
                self.send("injected", id=message["id"])
                os.kill(os.getpid(), 9)
            case "cut":
                self.cuts += 1
                self.send(
                    "cut", number=self.cuts, position=100, sequence=5, ms=0.5, chunks=1, copied_bytes=GRANULE,
                    live_bytes=GRANULE, journal_bytes=100, objects=2, reason="asked",
                )  # fmt: skip
            case "stop":
                sys.exit(0)

    def reconnect(self) -> None:
        while self.job is not None:
            if self.client is not None and select.select([self.client], [], [], 0)[0]:
                sys.exit(0)
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                self.sock.connect(str(self.runtime_dir / "control.sock"))
                break
            except OSError:
                self.sock.close()
                time.sleep(0.02)
        if self.job is None:
            sys.exit(0)
        self.send(
            "announce", fds=self.fds, job=self.job["job"], pid=os.getpid(), device=self.device,
            client_pid=self.job["client_pid"], generation=self.generation,
        )  # fmt: skip
        for fields, fd in self.memory.values():
            self.send("memory", fds=[fd], **fields)
        self.send("announced")

    def run(self) -> None:
        self.behave("hello")
        self.send("hello", pid=os.getpid(), device=self.device, warm_ms=1.5, device_bytes=5)
        while True:
            watched: list[Any] = [self.sock] if self.client is None else [self.sock, self.client]
            ready = select.select(watched, [], [])[0]
            if self.client in ready:
                self.send("bye", reason="the program has exited")
                sys.exit(0)
            try:
                data, fds, _, _ = socket.recv_fds(self.sock, 65536, 8)
            except ConnectionResetError:  # the daemon died with messages unread
                data, fds = b"", []
            if data:
                self.take(json.loads(data), list(fds))
            else:
                self.sock.close()
                self.reconnect()


def main() -> None:
    if sys.argv[1:] == ["--layout"]:
        print(json.dumps({"layout_version": 1, "header_bytes": 2 << 20, "staging_bytes": 16 << 20,
                          "pinned_bytes": 1 << 38}))  # fmt: skip
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("--device")
    parser.add_argument("--control-fd", type=int)
    parser.add_argument("--memory", type=int)
    parser.add_argument("--runtime-dir")
    Peer(parser.parse_args()).run()


if __name__ == "__main__":
    main()
