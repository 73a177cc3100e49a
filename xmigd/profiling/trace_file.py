"""A trace as a file that Perfetto and chrome://tracing open: the JSON of the Trace Event Format, times in microseconds.

A process of the file is a process of the job; its threads are streams of the devices, and one more for what xMIG does.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from xmigd.ipc.fds import Fd
from xmigd.profiling.pages import OF_XMIG, Event, Kind, read_trace, read_trace_head

XMIG_THREAD = 0
CATEGORIES = {
    Kind.kernel: "kernel", Kind.to_device: "copy", Kind.to_host: "copy", Kind.on_device: "copy",
    Kind.between_devices: "copy", Kind.fill: "memset", Kind.graph: "graph", Kind.collective: "collective",
    Kind.snapshot: "xmig", Kind.replay: "xmig", Kind.restore: "xmig",
}  # fmt: skip
DIRECTIONS = {
    Kind.to_device: "host to device", Kind.to_host: "device to host", Kind.on_device: "on the device",
    Kind.between_devices: "between devices",
}  # fmt: skip


@dataclass(slots=True)
class TracedServer:
    number: int
    page: Fd
    given_at: int  # CLOCK_MONOTONIC, ns
    had_program: bool = False
    lost_at: int | None = None


@dataclass(slots=True)
class TracedProcess:
    id: str
    pid: int
    devices: list[str]
    rank: int | None = None
    servers: list[TracedServer] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    bytes: int
    events: int
    dropped: int
    kinds: dict[str, int]


class _Document:
    def __init__(self, file: TextIO, began: int) -> None:
        self._file = file
        self._began = began
        self._first = True
        self.events = 0
        self.kinds: dict[str, int] = {}

    def at(self, ns: int) -> float:
        return (ns - self._began) / 1e3

    def add(self, record: dict[str, Any]) -> None:
        self._file.write(("" if self._first else ",\n") + json.dumps(record, ensure_ascii=False, separators=(",", ":")))
        self._first = False

    def name(self, what: str, pid: int, text: str, *, thread: int = 0, order: int | None = None) -> None:
        self.add({"ph": "M", "name": f"{what}_name", "pid": pid, "tid": thread, "args": {"name": text}})
        if order is not None:
            self.add(
                {"ph": "M", "name": f"{what}_sort_index", "pid": pid, "tid": thread, "args": {"sort_index": order}}
            )

    def instant(self, text: str, pid: int, ns: int) -> None:
        self.add({
            "ph": "i", "s": "p", "name": text, "cat": "xmig", "pid": pid, "tid": XMIG_THREAD, "ts": self.at(ns),
        })  # fmt: skip

    def event(self, event: Event, pid: int, thread: int, server: int) -> None:
        arguments: dict[str, Any] = {"server": server}
        if event.sequence:
            arguments["record"] = event.sequence
        if event.kind is Kind.kernel:
            arguments |= {"grid": event.grid, "block": event.block, "shared_bytes": event.shared_bytes}
        elif event.kind not in OF_XMIG and event.kind is not Kind.graph:
            arguments["bytes"] = event.bytes
        if event.kind in DIRECTIONS:
            arguments["direction"] = DIRECTIONS[event.kind]
        if event.replayed:
            arguments["replayed"] = True
        self.add({
            "ph": "X", "name": event.name, "cat": CATEGORIES[event.kind] + (",replayed" if event.replayed else ""),
            "pid": pid, "tid": thread, "ts": self.at(event.began), "dur": event.took / 1e3, "args": arguments,
        })  # fmt: skip
        self.events += 1
        kind = CATEGORIES[event.kind]
        self.kinds[kind] = self.kinds.get(kind, 0) + 1


def write_trace(
    path: Path, processes: Sequence[TracedProcess], *, began: int, job_name: str, about: dict[str, Any]
) -> Written:
    """Into a new file, which only its owner may read; it is there once it is whole. Raises OSError."""
    unfinished = path.with_suffix(".unfinished")
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    dropped = 0
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit":"ns","traceEvents":[\n')
            document = _Document(file, began)
            for number, process in enumerate(processes, start=1):
                dropped += _write_process(document, number, process, job_name)
            other = json.dumps(about | {"dropped": dropped}, ensure_ascii=False)
            file.write(f'\n],"otherData":{other}}}\n')
        unfinished.rename(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    return Written(bytes=path.stat().st_size, events=document.events, dropped=dropped, kinds=document.kinds)


def _write_process(document: _Document, number: int, process: TracedProcess, job_name: str) -> int:
    which = f"process {process.id[:8]}" if process.rank is None else f"rank {process.rank}"
    document.name("process", number, f"{job_name}, {which} (pid {process.pid})", order=number)
    document.name("thread", number, "xMIG", thread=XMIG_THREAD, order=0)
    threads: dict[tuple[int, int], int] = {}
    dropped = 0
    for place, server in enumerate(process.servers):
        head = read_trace_head(server.page)
        dropped += 0 if head is None else head.dropped
        for event in read_trace(server.page):
            thread = XMIG_THREAD
            if event.kind not in OF_XMIG:
                key = event.ordinal, event.stream
                if key not in threads:
                    threads[key] = len(threads) + 1
                    known = event.ordinal < len(process.devices)
                    device = process.devices[event.ordinal] if known else f"device {event.ordinal}"
                    document.name(
                        "thread", number, f"{device} stream {event.stream}", thread=threads[key], order=threads[key]
                    )
                thread = threads[key]
            document.event(event, number, thread, server.number)
        if server.lost_at is not None:
            later = next((each for each in process.servers[place + 1 :] if each.had_program), None)
            then = "no other one follows in this trace" if later is None else f"server {later.number} goes on"
            document.instant(f"server {server.number} is gone; {then}", number, server.lost_at)
    return dropped
