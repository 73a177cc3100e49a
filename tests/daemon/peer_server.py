"""A peer for tests of the control protocol: says what xmig-server says, and does no work.

It hands over memfds as its device memory and checks that they come back at a recovery, or reach the target of a move.
What it shall do wrong is read from `behaviour.json` in the runtime directory: {"<point>": "<what>"}, where the point is
`hello`, `assign`, `inject`, `go`, `pause`, or one of a move's (`foreign`, `round`, `host`, `handover`, `handed_over`,
`take`, `took`, `resumed`, `prepare`, `suspend`, `suspended`, `announced`), and what is `exit`, `garbage`, `hang`,
`hold` (until that is taken back), `fault`, `unavailable`, `close`, `linger`, `refuse` and `no_peer` (of a move's),
`kill` (the daemon), `source_first` (of two servers that announce themselves, the one that had the program begins, and
does not come to the end), a number: so often `exit`, then good; or a list: one after the other, then good.
With `ranks`, a number, each process is another rank of a communicator of so many.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

GRANULE = 2 << 20
SYS_EXIT = 60  # of one thread; x86-64


def leave(code: int) -> NoReturn:
    """At once, as servers do: what Python tidies up on its way out ends the connection long before the process."""
    os._exit(code)


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
        self.snapshots = 0
        self.mode = ""
        self.entered = True  # if it was instructed to prepare only: has it been instructed to enter?
        self.next_id = 1
        self.took = False
        self.off_device = False  # its shadow
        self.stopped: dict[str, Any] | None = None  # what it reported when it stopped for a move

    def wanted(self, point: str) -> Any:
        path = self.runtime_dir / "behaviour.json"
        return json.loads(path.read_text()).get(point) if path.exists() else None

    def behave(self, point: str) -> str:
        what = self.wanted(point)
        if isinstance(what, int):
            self.behave_next({point: what - 1} if what > 1 else {})
            what = "exit"
        if isinstance(what, list):
            what, *rest = what
            self.behave_next({point: rest} if rest else {})
        if what == "exit":
            leave(3)
        if what == "garbage":
            self.sock.send(b"\x00not json")
        if what == "unavailable":
            self.send("unavailable", error=46, text="another process has the device")
            leave(1)
        if what == "hang":
            time.sleep(600)
        while what == "hold":
            time.sleep(0.01)
            what = self.wanted(point)
        if what == "kill":
            self.behave_next({})
            os.kill(os.getppid(), signal.SIGKILL)
        if what == "close":
            self.sock.close()
            time.sleep(600)
        if what == "linger":
            threading.Thread(target=self.linger).start()
            ctypes.CDLL(None).syscall(SYS_EXIT, 0)
        if what == "fault":
            self.send(
                "fault", sequence=7, op="xmLaunch", error=700, text="an illegal address", t=time.monotonic_ns(),
                after=0, until=0,
            )  # fmt: skip
            leave(70)
        return str(what)

    def linger(self) -> None:
        """The process is on its way out, and its connection closed, while this thread of it still lives."""
        first = Path(f"/proc/self/task/{os.getpid()}/stat")
        while first.read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.001)
        self.sock.close()
        time.sleep(600)

    def behave_next(self, behaviour: dict[str, Any]) -> None:
        written = self.runtime_dir / f"behaviour.{os.getpid()}"
        written.write_text(json.dumps(behaviour))
        written.replace(self.runtime_dir / "behaviour.json")  # other servers may be reading it

    def send(self, type: str, *, fds: list[int] | None = None, **fields: Any) -> None:
        """What a daemon that has just died does not hear is lost; its end is seen at the next receive."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.tell(type, fds=fds, **fields)

    def tell(self, type: str, *, fds: list[int] | None = None, **fields: Any) -> None:
        socket.send_fds(self.sock, [json.dumps({"type": type, **fields}).encode()], fds or [])

    def next_rank(self) -> int:
        """That no other process has been."""
        for rank in itertools.count():
            with contextlib.suppress(FileExistsError):
                (self.runtime_dir / f"rank.{rank}").touch(exist_ok=False)
                return rank
        raise AssertionError("unreachable")

    def add_memory(self, number: int, kind: str = "device", name: str = "") -> None:
        fd = os.memfd_create("memory")
        os.ftruncate(fd, GRANULE)
        os.pwrite(fd, f"generation {self.generation}".encode(), 0)
        fields = {
            "op": "add", "id": number, "kind": kind, "ordinal": 0, "address": 0x200000000000 + number * GRANULE,
            "bytes": GRANULE, "name": name,
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
                    leave(0)
                self.mode, self.next_id = message["mode"], message.get("first_id", 1)
                self.entered = not message.get("ahead", False)
                if message["mode"] == "fresh":
                    self.generation = 1
                    for number in (1, 2, 3):
                        self.add_memory(number)
                    self.add_memory(4, kind="shadow")
                    self.add_memory(5, kind="image", name="a1")
                    del self.memory[3]
                    self.send("memory", op="drop", id=3)
                    self.send("ready", generation=1, t=time.monotonic_ns())
                    if size := self.wanted("ranks"):
                        self.send("communicator", name="a" * 64, rank=self.next_rank(), ranks=size, state="joined")
            case "memory" if message["op"] == "drop":
                del self.memory[message["id"]]
            case "memory":
                content = os.pread(fds[0], 12, 0)
                assert content == b"generation 1", content
                if message.get("foreign") and self.mode == "move":
                    self.look(self.behave("foreign"))
                self.memory[message["id"]] = ({k: v for k, v in message.items() if k != "type"}, fds[0])
            case "go" if not self.entered:
                pass
            case "go" | "enter":
                assert self.entered == (message["type"] == "go")
                self.entered = True
                self.behave("go")
                kinds = sorted(fields["kind"] for fields, _ in self.memory.values())
                if self.mode == "resume":
                    assert kinds == ["image", "shadow"], kinds
                    if self.behave("take") == "refuse":
                        self.send("resume_failed", code="no_room", text="the device is full")
                        leave(1)
                    self.grow()
                else:
                    assert kinds == ["device", "device", "image", "shadow"], kinds
                assert self.job is not None
                for name in ("mapped", "restored"):
                    self.send("phase", name=name, t=time.monotonic_ns())
                self.send(
                    "phase", name="replayed", t=time.monotonic_ns(), records=10, compared=4, differing=0,
                    first_difference=None,
                )  # fmt: skip
                if self.job["deliver"] is not None:
                    self.send("program_error", **self.job["deliver"])
                self.send("phase", name="resumed", t=time.monotonic_ns())
            case "inject":
                self.behave("inject")
                self.send("injected", id=message["id"])
                os.kill(os.getpid(), 9)
            case "snapshot":
                if message.get("host") and self.behave("host") == "refuse":
                    self.send("handover_failed", text="host memory has no room")
                    return
                if "host" in message and message["host"] != self.off_device:
                    self.off_device = message["host"]
                    old, new = (4, 7) if self.off_device else (7, 4)
                    self.add_memory(new, kind="shadow", name="host" if self.off_device else "")
                    del self.memory[old]
                    self.send("memory", op="drop", id=old)
                self.snapshots += 1
                self.send(
                    "snapshot", number=self.snapshots, position=100, sequence=5, ms=0.5, chunks=1, copied_bytes=GRANULE,
                    live_bytes=GRANULE, journal_bytes=100, objects=2, off_device=self.off_device, reason="requested",
                )  # fmt: skip
            case "pause":
                self.behave("pause")
                self.client = None  # whose exit is not its end now
                self.send("paused", position=100, t=time.monotonic_ns())
            case "stop":
                leave(0)
            case _:
                self.move(message, fds)

    def look(self, what: str) -> None:
        """As the target of a move."""
        if what in ("refuse", "no_peer"):
            code, text = ("no_room", "the device is full") if what == "refuse" else (what, "there is no way to it")
            self.send("move_failed", code=code, text=text)
            leave(1)

    def grow(self) -> None:
        """Memory of its own, as the target of a move or of a resumption."""
        self.generation = 1  # of the content
        for number in (self.next_id, self.next_id + 1):
            self.add_memory(number)

    def move(self, message: dict[str, Any], fds: list[int]) -> None:
        t = time.monotonic_ns()
        match message["type"]:
            case "round":
                self.look(self.behave("round"))
                if message["number"] == 1:
                    self.grow()
                self.send("round_progress", number=message["number"], copied_bytes=GRANULE // 2)
                self.send(
                    "round", number=message["number"], snapshot=message["snapshot"], total_bytes=2 * GRANULE,
                    copied_bytes=GRANULE, settled_bytes=2 * GRANULE, differing_bytes=0, ms=1.0, loading_ms=0.0,
                )  # fmt: skip
            case "handover":
                if self.behave("handover") == "refuse":
                    self.send("handover_failed", text="there is no memory for a snapshot")
                    return
                self.stop(
                    "handed_over", snapshot=self.snapshots, position=100, t=t, stopped_t=t, drained_t=t, snapshot_ms=0.5
                )
            case "take":
                self.behave("take")
                assert sorted(f["kind"] for f, _ in self.memory.values()) == ["device", "device", "image", "shadow"]
                self.took = True
                if self.behave("took") == "kill":
                    return  # there is nobody to tell
                for name in ("mapped", "restored", "replayed", "resumed"):
                    self.send("phase", name=name, t=time.monotonic_ns())
                self.behave("resumed")
            case "continue":
                if self.stopped is not None:
                    self.stopped = None
                    self.send("continued", position=100, t=t)
            case "prepare_suspend":
                assert len(fds) == (message["to"] == "file")
                if self.behave("prepare") == "refuse":
                    self.send("suspend_failed", text="no space left on device")
                    return
                self.send("suspend_progress", done_bytes=GRANULE, total_bytes=GRANULE)
                if fds:
                    name, self.shadow_file = "file:s1", os.open("s1", os.O_CREAT | os.O_RDWR, 0o600, dir_fd=fds[0])
                    os.pwrite(self.shadow_file, b"generation 1", 0)
                    os.ftruncate(self.shadow_file, GRANULE)
                    fields = self.memory[4][0] | {"id": 6, "name": name}
                    self.memory[6] = (fields, self.shadow_file)
                    self.send("memory", fds=[self.shadow_file], **fields)
                    del self.memory[4]
                    self.send("memory", op="drop", id=4)
                if self.behave("prepare") != "wait":
                    self.send("prepared", ms=1.0)
            case "abort_suspend" | "preload":
                pass
            case "profile" | "trace" | "end_trace":  # it does no work of which there were something to write
                for fd in fds:
                    os.close(fd)
            case "suspend":
                if self.behave("suspend") == "refuse":
                    self.send("suspend_failed", text="no space left on device")
                    return
                self.stop("suspended", snapshot=self.snapshots, position=100, bytes=GRANULE, t=t, ms=0.5)
            case other:
                raise AssertionError(other)

    def stop(self, type: str, **fields: Any) -> None:
        """It stands; `kill`: the daemon dies before it hears that, and not shortly afterwards."""
        self.stopped = {"type": type, **fields}
        if self.wanted(type) != "kill":
            self.send(**self.stopped)
        self.behave(type)

    def reconnect(self) -> None:
        if (self.mode == "move" and not self.took) or not self.entered:
            leave(0)  # it has not been instructed to take
        while self.job is not None:
            if self.client is not None and select.select([self.client], [], [], 0)[0]:
                leave(0)
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                self.sock.connect(str(self.runtime_dir / "control.sock"))
                self.announce(self.job)
                return
            except OSError:  # no daemon yet, or one that is dying: its listening socket may outlive its connections
                self.sock.close()
                time.sleep(0.02)
        leave(0)

    def announce(self, job: dict[str, Any]) -> None:
        source_first = self.behave("announced") == "source_first"
        begun = self.runtime_dir / "source_announces"
        while source_first and self.took and not begun.exists():
            time.sleep(0.005)
        self.tell(
            "announce", fds=self.fds, job=job["job"], pid=os.getpid(), device=self.device,
            client_pid=job["client_pid"], generation=self.generation,
        )  # fmt: skip
        for fields, fd in self.memory.values():
            self.tell("memory", fds=[fd], **fields)
        if source_first and not self.took:
            begun.touch()
            signal.pause()
        self.tell("announced")
        if self.stopped is not None:
            self.tell(**self.stopped)

    def run(self) -> None:
        self.behave("hello")
        self.send("hello", pid=os.getpid(), device=self.device, warm_ms=1.5, device_bytes=5)
        while True:
            watched: list[Any] = [self.sock] if self.client is None else [self.sock, self.client]
            ready = select.select(watched, [], [])[0]
            if self.client in ready:
                self.send("bye", reason="the program has exited")
                leave(0)
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
        print(json.dumps({"layout_version": 3, "header_bytes": 2 << 20, "staging_bytes": 16 << 20,
                          "pinned_bytes": 1 << 38}))  # fmt: skip
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("--device")
    parser.add_argument("--control-fd", type=int)
    parser.add_argument("--memory", type=int)
    parser.add_argument("--open", default="first")
    parser.add_argument("--runtime-dir")
    Peer(parser.parse_args()).run()


if __name__ == "__main__":
    main()
