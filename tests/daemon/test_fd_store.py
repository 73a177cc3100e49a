"""The store has a process's memory whoever hands it in again: a server after a restart of the daemon, a move, a
recovery. With systemd itself: tests/packages."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest

from xmigd.ipc import messages as m
from xmigd.ipc.fds import Fd, same_file
from xmigd.memory.fd_store import FdStore
from xmigd.memory.handles import Handle, JobMemory, make_handle
from xmigd.native import Layout
from xmigd.servers.server import Server
from xmigd.supervisor.process import Process
from xmigd.systemd import ServiceManager

PROCESS = "0123456789abcdef"


class Manager:
    """Keeps descriptors as systemd does: an open file once, under the first name that it came with."""

    present = True

    def __init__(self) -> None:
        self.store: dict[str, Fd] = {}
        self.full = False

    def keep(self, name: str, fd: Fd, process: str = "") -> None:
        if not self.full and not any(same_file(fd.fileno(), kept.fileno()) for kept in self.store.values()):
            self.store[name] = again(fd)

    def drop(self, name: str) -> None:
        self.store.pop(name, None)

    def when_renewed(self, then: Callable[[], None]) -> None:
        pass

    def when_reported(self, then: Callable[[], None]) -> None:
        if not self.full:
            then()

    def take_kept(self) -> list[tuple[str, Fd]]:
        return [(name, again(fd)) for name, fd in self.store.items()]


def again(fd: Fd) -> Fd:
    """As it arrives on the other side of a socket."""
    return Fd(os.dup(fd.fileno()))


def memfd(name: str) -> Fd:
    fd = Fd(os.memfd_create(name))
    os.ftruncate(fd.fileno(), 4096)
    return fd


def handle(number: int, fd: Fd) -> Handle:
    message = {"type": "memory", "op": "add", "id": number, "kind": "device", "ordinal": 0,
               "address": number << 21, "bytes": 4096}  # fmt: skip
    return make_handle(m.MemoryAdd.model_validate(message), fd)


def start(manager: Manager) -> FdStore:
    return FdStore(cast(ServiceManager, manager), Layout())


def make_memory() -> JobMemory:
    return JobMemory(*(memfd(name) for name in ("journal", "staging", "pinned", "snapshot0", "snapshot1")))


def announced(memory: JobMemory, handles: list[Handle]) -> tuple[JobMemory, list[Handle]]:
    """The same from its server."""
    return JobMemory(*map(again, memory.all)), [handle(h.id, again(h.fd)) for h in handles]


def assert_all_there(store: FdStore, memory: JobMemory, handles: list[Handle]) -> None:
    left = store.left(PROCESS)
    assert not isinstance(left, str), left
    assert all(same_file(a.fileno(), b.fileno()) for a, b in zip(left.memory.all, memory.all, strict=True))
    assert left.handles.keys() == {h.id for h in handles}
    assert all(same_file(left.handles[h.id].fd.fileno(), h.fd.fileno()) for h in handles)


def test_what_is_lost_with_its_device_is_no_change() -> None:
    """The server has given nothing up: what the store has besides is all that there is, also for the next daemon."""
    manager = Manager()
    store = start(manager)
    memory, handles = make_memory(), [handle(number, memfd("device")) for number in (1, 2, 3)]
    store.all(PROCESS, memory, handles, 3)
    os.pwrite(memory.journal.fileno(), struct.pack("<Q", 3), Layout().memory_changes_at)
    store.lost(PROCESS, [1, 3, 7])
    assert_all_there(start(manager), memory, [handles[1]])


def test_what_is_handed_in_again_stays() -> None:
    manager = Manager()
    store = start(manager)
    memory, handles = make_memory(), [handle(number, memfd("device")) for number in (1, 2)]
    store.all(PROCESS, memory, handles, 0)
    # A move: the target's memory in the place of one piece, the rest as it was.
    handles = [handles[0], handle(3, memfd("device"))]
    store.all(PROCESS, memory, handles, 0)
    assert len(manager.store) == 1 + 5 + 2  # the index, the five, the handles
    assert_all_there(start(manager), memory, handles)


def test_a_server_that_outlives_daemons() -> None:
    manager = Manager()
    memory, handles = make_memory(), [handle(1, memfd("device"))]
    start(manager).all(PROCESS, memory, handles, 0)
    for _ in range(3):
        store = start(manager)
        store.all(PROCESS, *announced(memory, handles), 0)
        store.settled()
        assert len(manager.store) == 1 + 5 + 1
    assert_all_there(start(manager), memory, handles)


def test_what_came_from_the_store_and_then_moves() -> None:
    manager = Manager()
    memory, handles = make_memory(), [handle(1, memfd("device"))]
    start(manager).all(PROCESS, memory, handles, 0)
    store = start(manager)
    left = store.left(PROCESS)
    assert not isinstance(left, str), left
    store.settled()
    store.all(PROCESS, left.memory, left.handles.values(), 0)
    assert_all_there(start(manager), memory, handles)
    store.forget(PROCESS)
    assert len(manager.store) == 1


def say(server: Fd, change: int, number: int, fd: Fd | None = None) -> None:
    """As a server says it; without a descriptor: it gives that memory up."""
    if fd is None:
        data = m.pack("memory", op="drop", id=number, change=change)
    else:
        data = m.pack(**(json.loads(handle(number, fd).message) | {"change": change}))
    with socket.socket(fileno=os.dup(server.fileno())) as sock:
        socket.send_fds(sock, [data], [] if fd is None else [fd.fileno()])


def count(memory: JobMemory, changes: int) -> None:
    """As the server does, in the journal's header."""
    os.pwrite(memory.journal.fileno(), struct.pack("<Q", changes), Layout().memory_changes_at)


def with_backlog(manager: Manager) -> tuple[FdStore, JobMemory, Fd]:
    store, memory = start(manager), make_memory()
    store.all(PROCESS, memory, [], 1)
    count(memory, 1)
    made = store.make_backlog()
    assert made is not None
    store.follow(PROCESS, made[0])
    return store, memory, made[1]


def test_what_no_daemon_has_heard_of() -> None:
    manager = Manager()
    store, memory, server = with_backlog(manager)
    heard, unheard = (handle(number, memfd("device")) for number in (1, 2))
    say(server, 2, 1, heard.fd)
    store.add(PROCESS, heard)
    say(server, 3, 2, unheard.fd)
    say(server, 4, 1)
    count(memory, 4)
    assert_all_there(start(manager), memory, [unheard])


@pytest.mark.parametrize(
    "reported",
    [b"", b"{}", b'{"type":"bye","reason":"x"}', m.pack("memory", op="drop", id=1, change=2**70),
     m.pack("memory", op="drop", id=7, change=9), b"\xff" * 4096],
)  # fmt: skip
def test_what_a_server_says_there_that_makes_no_sense(reported: bytes) -> None:
    manager = Manager()
    _, memory, server = with_backlog(manager)
    with socket.socket(fileno=os.dup(server.fileno())) as sock:
        sock.send(reported)
    one = handle(1, memfd("device"))
    say(server, 2, 1, one.fd)
    count(memory, 2)
    left = start(manager).left(PROCESS)
    if reported and b'change":9' not in reported:
        assert_all_there(start(manager), memory, [one])
    else:  # nothing is read behind what comes too early, or behind the end
        assert left == "its memory changed while no daemon was there, and nobody has what came"


def test_a_change_that_is_missing_in_the_backlog() -> None:
    """It was full, or given up."""
    manager = Manager()
    _, memory, server = with_backlog(manager)
    say(server, 3, 2, memfd("device"))
    count(memory, 3)
    assert start(manager).left(PROCESS) == "its memory changed while no daemon was there, and nobody has what came"


def test_what_the_index_has_and_the_store_has_not() -> None:
    """The daemon died between the two."""
    manager = Manager()
    store, memory, server = with_backlog(manager)
    one = handle(1, memfd("device"))
    say(server, 2, 1, one.fd)
    count(memory, 2)
    manager.full = True
    store.add(PROCESS, one)
    manager.full = False
    assert_all_there(start(manager), memory, [one])


def test_the_backlog_holds_only_what_is_nowhere_else() -> None:
    manager = Manager()
    store, _, server = with_backlog(manager)
    one = handle(1, memfd("device"))
    say(server, 2, 1, one.fd)
    store.add(PROCESS, one)
    say(server, 3, 2, memfd("device"))
    reading = store._backlogs[PROCESS]
    assert [change.change for change, _ in reading.take(9)] == [3]


def test_who_keeps_a_backlog_has_it_before_the_server() -> None:
    """What a server says where nobody keeps it would be lost with the daemon."""
    seen: list[object] = []
    store = SimpleNamespace(make_backlog=lambda: ("ours", "theirs"))
    server = SimpleNamespace(send=lambda _, fds: seen.append(fds[0]))
    Process.give_backlog(cast(Process, SimpleNamespace(fd_store=store)), cast(Server, server), seen.append)
    assert seen == ["ours", "theirs"]
