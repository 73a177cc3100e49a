"""One user who takes as many connections as there are: `crowd.py KIND TARGET COUNT [UID]`.

TARGET: the path of a socket, or HOST:PORT. KIND is silent: nothing is sent. slow: a byte of a request's headers now and
then. idle: a whole request, and another one long after it. busy: a page, and the next when it is there, until each has
had one. handshakes: at the programs' socket, and again when they are closed. It prints "open" when it has them, and
when its standard input has ended and everything is read that was sent to it, what became of them; of pages also how
many there were, and the median of their seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import selectors
import socket
import sys
import time

REQUEST = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
PAGE = b"GET /login HTTP/1.1\r\nHost: localhost\r\n\r\n"
SLOWLY = b"GET /v1/node HTTP/1.1\r\nHost: localhost\r\nX-Slow: " + b"x" * 4000
PACE = 1.0  # seconds between two bytes, or two attempts
REST = 20.0  # seconds between two requests: that all of them have to be answered is another matter (busy)
requested: dict[socket.socket, float] = {}  # when its page was
took: list[float] = []  # seconds of each page


def connect(target: str, kind: str) -> socket.socket:
    while True:
        if target.startswith("/"):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET if kind == "handshakes" else socket.SOCK_STREAM)
            address: str | tuple[str, int] = target
        else:
            host, _, port = target.rpartition(":")
            sock, address = socket.socket(), (host, int(port))
        try:
            sock.connect(address)
        except (BlockingIOError, InterruptedError):  # more wait to be accepted than the kernel keeps
            sock.close()
            time.sleep(0.001)
            continue
        sock.setblocking(False)
        return sock


def main() -> None:
    kind, target, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if len(sys.argv) > 4:
        os.setgroups([])
        os.setgid(int(sys.argv[4]))
        os.setuid(int(sys.argv[4]))
    selector = selectors.DefaultSelector()
    socks = [connect(target, kind) for _ in range(count)]
    reported: dict[socket.socket, bytearray] = {sock: bytearray() for sock in socks}
    ended: set[socket.socket] = set()
    for sock in socks:
        selector.register(sock, selectors.EVENT_READ)
    selector.register(sys.stdin, selectors.EVENT_READ)
    for sock in socks if kind == "busy" else ():
        requested[sock] = time.monotonic()
        sock.send(PAGE)
    print("open", flush=True)
    step, due, reported_to_end = 0, time.monotonic(), False
    while True:
        if time.monotonic() >= due and not reported_to_end and kind in ("slow", "idle"):
            for sock in socks:
                if sock not in ended:
                    with contextlib.suppress(OSError):
                        sock.send(
                            REQUEST if kind == "idle" else SLOWLY[:30] if step == 0 else SLOWLY[29 + step : 30 + step]
                        )
            step, due = step + 1, time.monotonic() + (REST if kind == "idle" else PACE)
        if time.monotonic() >= due and not reported_to_end and kind == "handshakes":
            for sock in ended:
                reported[again := connect(target, kind)] = bytearray()
                selector.register(again, selectors.EVENT_READ)
                reported.pop(sock)
                sock.close()
            ended, due = set(), time.monotonic() + PACE
        ready = selector.select(0.1)
        if reported_to_end and (len(took) > count if kind == "busy" else not ready):
            print(json.dumps(summary(reported, ended)), flush=True)
            return
        for key, _ in ready:
            if key.fileobj is sys.stdin:
                selector.unregister(sys.stdin)
                reported_to_end = True
                continue
            sock = key.fileobj  # type: ignore[assignment]
            try:
                piece = sock.recv(1 << 16)
            except OSError:
                piece = b""
            if kind == "busy" and piece:
                answered(sock, reported[sock], piece)
                continue
            reported[sock] += piece
            if not piece:
                selector.unregister(sock)
                ended.add(sock)


def answered(sock: socket.socket, reported: bytearray, piece: bytes) -> None:
    """A page ends with the end of its document."""
    reported[:] = (reported + piece)[-2000:]
    if b"</html>" in reported:
        reported.clear()
        took.append(time.monotonic() - requested[sock])
        requested[sock] = time.monotonic()
        with contextlib.suppress(OSError):
            sock.send(PAGE)


def summary(reported: dict[socket.socket, bytearray], ended: set[socket.socket]) -> dict[str, object]:
    """How many connections have ended with which status of HTTP, and the last words of one that was refused."""
    statuses: dict[str, int] = {}
    why = b""
    for sock in ended:
        last = bytes(reported[sock]).rpartition(b"HTTP/1.1 ")[2]
        statuses[last[:3].decode(errors="replace")] = statuses.get(last[:3].decode(errors="replace"), 0) + 1
        if last.startswith(b"429"):
            why = last.rpartition(b"\r\n\r\n")[2]
    page = sorted(took)[len(took) // 2] if took else 0.0
    return {
        "open": len(reported) - len(ended),
        "statuses": statuses,
        "why": why.decode(),
        "pages": len(took),
        "page": page,
    }


if __name__ == "__main__":
    main()
