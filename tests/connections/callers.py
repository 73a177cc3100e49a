"""Several users at the daemon's doors: one who takes what there is, and others who want to be served."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.api.callers import become

HOG, OTHER = 12_345, 65_534  # users
MANY = 3_000  # connections


@contextlib.contextmanager
def crowd(
    kind: str, target: object, count: int, uid: int, *, open: bool = True
) -> Iterator[Callable[[], dict[str, Any]]]:
    """A user with so many connections; what it yields ends them and says what became of them. `open`: wait until it
    has them."""
    program = Path(__file__).with_name("crowd.py")
    process = subprocess.Popen(
        [sys.executable, str(program), kind, str(target), str(count), str(uid)], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None

    def end() -> dict[str, Any]:
        out, _ = process.communicate(timeout=120)
        found: dict[str, Any] = json.loads(out.splitlines()[-1])
        return found

    try:
        if open:
            assert process.stdout.readline() == "open\n"
        yield end
    finally:
        process.kill()
        process.communicate()


def ask(target: str | Path, path: str, *, uid: int = 0, token: str = "") -> tuple[int, dict[str, Any]]:
    """Status and body of the answer to a GET on a connection of its own."""
    address: Any = str(target)
    if not isinstance(target, Path):
        host, _, port = target.rpartition(":")
        address = (host, int(port))
    with contextlib.ExitStack() as stack:
        with become(uid) if uid else contextlib.nullcontext():  # a socket is its maker's
            sock = stack.enter_context(socket.socket(socket.AF_UNIX if isinstance(target, Path) else socket.AF_INET))
            sock.connect(address)  # waits for its place in the queue, which it does not with a time-out
            sock.settimeout(60)
        bearer = f"Authorization: Bearer {token}\r\n" if token else ""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            sock.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{bearer}\r\n".encode())
        reported = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := sock.recv(1 << 16):
                reported += piece
    head, _, body = reported.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 "), reported
    kind = next((line for line in head.lower().split(b"\r\n") if line.startswith(b"content-type:")), b"")
    return int(head[9:12]), json.loads(body) if b"json" in kind else {}  # any word can stand in a cookie's nonce


def times(count: int, once: Callable[[], object]) -> float:
    """The 99th percentile in seconds."""
    took = []
    for _ in range(count):
        began = time.perf_counter()
        once()
        took.append(time.perf_counter() - began)
    return sorted(took)[int(0.99 * (count - 1))]


def delay(pid: int) -> Callable[[], float]:
    """How many times as long as with a processor of its own everything takes this process from now on. That others want
    one, too, is no matter of its own. /proc/PID/schedstat: nanoseconds on a processor, and of waiting for one."""
    schedstat = Path(f"/proc/{pid}/schedstat")

    def read() -> tuple[int, int]:
        works, waits, _ = map(int, schedstat.read_text().split())
        return works, waits

    before = read()

    def so_far() -> float:
        works, waits = (now - then for now, then in zip(read(), before, strict=True))
        return 1 + waits / max(works, 1)

    return so_far
