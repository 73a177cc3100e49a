"""Those who ask the daemon, as a program of their own: `load.py requests|clients|listeners SOCKET`; answers in JSON.

Plain sockets and one thread: an HTTP library would measure itself. `requests` are sent by the clock, not when the last
one was answered; what waits in the daemon or behind it counts as the request's time. `clients` ask again as soon as
they are answered: what the daemon does when so many always wait.
"""

from __future__ import annotations

import argparse
import json
import re
import selectors
import socket
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from statistics import median

LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
EVENT_ID = re.compile(rb"^id: ?(\d+)\r?$", re.MULTILINE)
EVENT_AT = re.compile(rb'"at": ?([0-9.]+)')


@dataclass
class Connection:
    sock: socket.socket
    sent_at: float | None = None  # when the request in flight was due
    data: bytearray = field(default_factory=bytearray)


def connect(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(path)
    return sock


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def take_answer(data: bytearray) -> int | None:
    """The status of a whole answer at the front of `data`, which is taken away."""
    end = data.find(b"\r\n\r\n")
    if end < 0:
        return None
    length = LENGTH.search(data, 0, end)
    whole = end + 4 + (int(length[1]) if length else 0)
    if len(data) < whole:
        return None
    status = int(data[9:12])
    del data[:whole]
    return status


def request_of(options: argparse.Namespace) -> bytes:
    body: bytes = options.body.encode()
    head = f"{options.method} {options.path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    if body:
        head += "Content-Type: application/json\r\n"
    return head.encode() + b"\r\n" + body


def result(statuses: dict[int, int], late: list[float], took: float) -> dict[str, object]:
    good = sum(number for status, number in statuses.items() if status < 300)
    return {
        "sent": len(late), "good": good, "statuses": statuses, "per_s": good / took, "median_ms": 1e3 * median(late),
        "p99_ms": 1e3 * percentile(late, 0.99), "slowest_ms": 1e3 * max(late),
    }  # fmt: skip


def requests(options: argparse.Namespace) -> dict[str, object]:
    request = request_of(options)
    selector = selectors.DefaultSelector()
    free: deque[Connection] = deque()  # in turn: one that rests for seconds is closed by the daemon
    for _ in range(options.connections):
        connection = Connection(connect(options.socket))
        selector.register(connection.sock, selectors.EVENT_READ, connection)
        free.append(connection)
    start = time.perf_counter() + 0.05
    count = int(options.rate * options.seconds)
    due = 0
    late: list[float] = []
    statuses: dict[int, int] = {}
    while len(late) < count:
        now = time.perf_counter()
        while due < count and free and start + due / options.rate <= now:
            connection = free.popleft()
            connection.sent_at = start + due / options.rate
            connection.sock.sendall(request)
            due += 1
        wait = 0.0 if due < count and not free else start + due / options.rate - now if due < count else 5.0
        ready = selector.select(max(0.0, wait) if free else 5.0)
        if not ready and due == count:
            break
        for key, _ in ready:
            connection = key.data
            piece = connection.sock.recv(1 << 16)
            if not piece:
                raise SystemExit("the daemon closed a connection")
            connection.data += piece
            while (status := take_answer(connection.data)) is not None:
                statuses[status] = statuses.get(status, 0) + 1
                late.append(time.perf_counter() - connection.sent_at)
                free.append(connection)
    return result(statuses, late, time.perf_counter() - start) | {"sent": due}


def clients(options: argparse.Namespace) -> dict[str, object]:
    request = request_of(options)
    selector = selectors.DefaultSelector()
    late: list[float] = []
    statuses: dict[int, int] = {}
    start = time.perf_counter()
    for _ in range(options.connections):
        connection = Connection(connect(options.socket), time.perf_counter())
        selector.register(connection.sock, selectors.EVENT_READ, connection)
        connection.sock.sendall(request)
    asking = options.connections
    while asking:
        ready = selector.select(10.0)
        if not ready:
            raise SystemExit("the daemon does not answer")
        for key, _ in ready:
            connection = key.data
            piece = connection.sock.recv(1 << 16)
            if not piece:
                raise SystemExit("the daemon closed a connection")
            connection.data += piece
            if (status := take_answer(connection.data)) is None:
                continue
            now = time.perf_counter()
            statuses[status] = statuses.get(status, 0) + 1
            late.append(now - connection.sent_at)
            connection.sent_at = now
            if now - start < options.seconds:
                connection.sock.sendall(request)
            else:
                asking -= 1
    return result(statuses, late, time.perf_counter() - start)


def listeners(options: argparse.Namespace) -> dict[str, object]:
    """Listens until standard input ends; then says what each listener has got."""
    selector = selectors.DefaultSelector()
    seen: list[list[int]] = []
    rest: list[bytes] = []
    delays: list[float] = []
    for number in range(options.count):
        sock = connect(options.socket)
        sock.sendall(b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\nAccept: text/event-stream\r\n\r\n")
        seen.append([])
        rest.append(b"")
        selector.register(sock, selectors.EVENT_READ, number)
    waiting = set(range(options.count))
    selector.register(sys.stdin, selectors.EVENT_READ, -1)
    ended = False
    quiet_since = time.perf_counter()
    while not ended or time.perf_counter() - quiet_since < 2.0:
        for key, _ in selector.select(0.1):
            if key.data < 0:
                ended = True
                selector.unregister(sys.stdin)
                continue
            piece = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
            if not piece:
                selector.unregister(key.fileobj)
                continue
            if key.data in waiting:
                waiting.discard(key.data)
                if not waiting:
                    print("listening", flush=True)
            quiet_since = time.perf_counter()
            lines = rest[key.data] + piece
            whole = lines.rfind(b"\n") + 1
            rest[key.data] = lines[whole:]
            found = [int(id) for id in EVENT_ID.findall(lines[:whole])]
            seen[key.data] += found
            if key.data == 0 and found:
                now = time.time()
                delays += [now - float(at) for at in EVENT_AT.findall(lines[:whole])]
    first = max((ids[0] for ids in seen if ids), default=0)
    last = max((ids[-1] for ids in seen if ids), default=0)
    wanted = list(range(first, last + 1))
    return {
        "events": len(wanted), "delivered": sum(map(len, seen)),
        "incomplete": sum([id for id in ids if id >= first] != wanted for ids in seen),
        "p99_ms": 1e3 * percentile(delays, 0.99), "median_ms": 1e3 * (median(delays) if delays else 0.0),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    kinds = parser.add_subparsers(dest="kind", required=True)
    for kind in ("requests", "clients"):
        asking = kinds.add_parser(kind)
        asking.add_argument("socket")
        asking.add_argument("--method", default="GET")
        asking.add_argument("--path", default="/v1/jobs")
        asking.add_argument("--body", default="")
        asking.add_argument("--rate", type=float, default=1000)
        asking.add_argument("--seconds", type=float, default=10)
        asking.add_argument("--connections", type=int, default=16)
    listening = kinds.add_parser("listeners")
    listening.add_argument("socket")
    listening.add_argument("--count", type=int, default=200)
    options = parser.parse_args()
    work = {"requests": requests, "clients": clients, "listeners": listeners}[options.kind]
    print(json.dumps(work(options)))


if __name__ == "__main__":
    main()
