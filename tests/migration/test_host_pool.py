"""The host memory that is kept ready for suspended processes."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import mmap
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import harness
from tests.gpu.moves import pool_bytes
from tests.migration.moves import info, resumed, suspended
from tests.recovery.conftest import PROGRAMS
from xmigd import host_memory
from xmigd.demo.node import Node
from xmigd.ipc.fds import LIBC, Fd
from xmigd.memory import host_pool
from xmigd.memory.host_pool import HostPool

PIECE = 64 << 20
SIZE = 2 * PIECE
STEP = host_pool.STEP


@pytest.fixture
def daemon(native_dir: Path) -> Iterator[Node]:
    """Overrides the one for everybody: with a pool."""
    with harness.own_node(native_dir, device_memory=2 << 30, host_pool_mib=SIZE >> 20) as node:
        yield node


def ready(node: Node) -> int:
    """What the daemon says that it has ready."""
    return pool_bytes(node.client)


def pieces(node: Node) -> set[int]:
    """The inodes of all that the daemon holds, ready or with a process."""
    assert node.process is not None
    found = set()
    for entry in Path(f"/proc/{node.process.pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(entry).startswith("/memfd:xmig-room"):
                found.add(entry.stat().st_ino)
    return found


def test_a_suspension_takes_it_and_it_is_made_again(daemon: Node, kernels: Path) -> None:
    harness.wait_until(lambda: ready(daemon) == SIZE, "the pool is full")
    assert len(pieces(daemon)) == SIZE // PIECE
    quiet, program = (harness.start(daemon, PROGRAMS / "stepwise.py", kernels=kernels) for _ in range(2))
    for each in (quiet, program):
        harness.go(each)
    assert harness.steps(program, 50) == harness.steps(quiet, 50)
    before = pieces(daemon)
    suspended(program)
    harness.ask(program, 50)
    assert ready(daemon) == SIZE - PIECE
    assert pieces(daemon) == before  # one of them is the process's
    holder = info(program)["server_pid"]
    harness.stop(holder)
    daemon.kill()
    daemon.start()
    for _ in range(50):  # nobody knows yet how much the process has
        assert ready(daemon) == 0
    os.kill(holder, signal.SIGCONT)
    harness.wait_until(lambda: bool(info(program)["held_bytes"]), "it is found again")
    harness.wait_until(lambda: ready(daemon) == SIZE - PIECE, "the rest is made again")
    (taken,) = pieces(daemon) & before
    resumed(program)
    assert harness.answer(program) == harness.steps(quiet, 50)
    harness.wait_until(lambda: ready(daemon) == SIZE, "the pool is full again")
    harness.wait_until(lambda: len(pieces(daemon)) == SIZE // PIECE, "the process has none of it")
    assert taken not in pieces(daemon)  # who had it may be reading it still
    for each in (quiet, program):
        harness.output(each)


def test_more_than_there_is(daemon: Node, kernels: Path) -> None:
    """What the pool does not have is taken from the host."""
    harness.wait_until(lambda: ready(daemon) == SIZE, "the pool is full")
    program = harness.start(daemon, PROGRAMS / "training.py", 100000, 2 * SIZE >> 20, kernels=kernels)
    harness.go(program)
    harness.wait_until(lambda: (info(program)["live_bytes"] or 0) > SIZE, "a snapshot has its memory")
    suspended(program)
    assert ready(daemon) == 0
    resumed(program)
    harness.wait_until(lambda: ready(daemon) == SIZE, "the pool is full again")


def test_a_host_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes what others do not need, and says once that this is less than it is to have."""
    room = [host_memory.RESERVE + 3 * STEP - 1]

    def made(size: int, folder: Path | None) -> tuple[Fd, str]:
        room[0] -= size
        return make(size, folder)

    make = host_pool.make_piece
    monkeypatch.setattr(host_pool, "PERIOD", 0.01)
    monkeypatch.setattr(host_pool, "available_memory", lambda: room[0])
    monkeypatch.setattr(host_pool, "make_piece", made)
    reported: list[str] = []
    monkeypatch.setattr(host_pool.logger, "warning", lambda text, **fields: reported.append(fields["why"]))

    async def main() -> None:
        pool = HostPool(4 * STEP, STEP, lambda: 0)
        keeping = asyncio.create_task(pool.keep())
        while not reported:
            await asyncio.sleep(0)
        assert pool.ready == 2 * STEP
        assert len(pool.take(STEP + 1)) == 2
        room[0] += 10 * STEP
        while pool.ready < 4 * STEP:
            await asyncio.sleep(0)
        assert reported == ["the host has no more memory available"]
        keeping.cancel()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_it_has_huge_pages() -> None:
    """Without a setting of the machine. A kernel that has none says why, and small ones are there."""
    piece, small = host_pool.make_piece(PIECE)
    assert os.fstat(piece.fileno()).st_blocks * 512 == PIECE
    if small:
        pytest.skip(f"this kernel makes none: {small}")
    reserved = host_pool.map_memory(None, 2 * PIECE, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    start = -(-reserved // PIECE) * PIECE
    host_pool.map_memory(start, PIECE, mmap.PROT_READ, mmap.MAP_SHARED | host_pool.MAP_FIXED, piece.fileno())
    ctypes.string_at(start, PIECE)
    mapped = Path("/proc/self/smaps").read_text().partition(f"{start:x}-")[2]
    found = re.search(r"^ShmemPmdMapped: +(\d+) kB$", mapped, re.MULTILINE)
    assert found is not None
    assert int(found[1]) << 10 == PIECE
    LIBC.munmap(ctypes.c_void_p(reserved), ctypes.c_size_t(2 * PIECE))


def test_small_pages_where_there_are_no_huge_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(fd: int, size: int) -> None:
        raise OSError(errno.EINVAL, "refused")

    monkeypatch.setattr(host_pool, "make_huge", refused)
    monkeypatch.setattr(host_pool, "PERIOD", 0.01)
    reported: list[str] = []
    monkeypatch.setattr(host_pool.logger, "warning", lambda text, **fields: reported.append(text))

    async def main() -> None:
        pool = HostPool(4 * STEP, STEP, lambda: 0)
        keeping = asyncio.create_task(pool.keep())
        while pool.ready < 4 * STEP:
            await asyncio.sleep(0)
        assert all(os.fstat(piece.fileno()).st_blocks * 512 == STEP for piece in pool.take(4 * STEP))
        assert reported == ["the host pool gets no huge pages: a suspension takes longer"]
        keeping.cancel()

    asyncio.run(asyncio.wait_for(main(), 30))
