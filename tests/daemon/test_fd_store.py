"""The store has a process's memory whoever hands it in again: a server after a restart of the daemon, a move, a
recovery. With systemd itself: tests/packages."""

from __future__ import annotations

import os
from typing import cast

from xmigd.native import Layout
from xmigd.supervisor import messages as m
from xmigd.supervisor.fd_store import FdStore
from xmigd.supervisor.fds import Fd, Handle, JobMemory, same_file
from xmigd.supervisor.moving import make_handle
from xmigd.systemd import ServiceManager

PROCESS = "0123456789abcdef"


class Manager:
    """Keeps descriptors as systemd does: an open file once, under the first name that it came with."""

    present = True

    def __init__(self) -> None:
        self.store: dict[str, Fd] = {}

    def keep(self, name: str, fd: Fd, process: str = "") -> None:
        if not any(same_file(fd.fileno(), kept.fileno()) for kept in self.store.values()):
            self.store[name] = again(fd)

    def drop(self, name: str) -> None:
        self.store.pop(name, None)

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
    return JobMemory(*(memfd(name) for name in ("journal", "staging", "pinned", "cut0", "cut1")))


def announced(memory: JobMemory, handles: list[Handle]) -> tuple[JobMemory, list[Handle]]:
    """The same from its server."""
    return JobMemory(*map(again, memory.all)), [handle(h.id, again(h.fd)) for h in handles]


def assert_all_there(store: FdStore, memory: JobMemory, handles: list[Handle]) -> None:
    left = store.left(PROCESS)
    assert not isinstance(left, str), left
    assert all(same_file(a.fileno(), b.fileno()) for a, b in zip(left.memory.all, memory.all, strict=True))
    assert left.handles.keys() == {h.id for h in handles}
    assert all(same_file(left.handles[h.id].fd.fileno(), h.fd.fileno()) for h in handles)


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
