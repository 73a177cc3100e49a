"""What goes to another node is in host memory, there and here."""

from __future__ import annotations

import hashlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.checkpoints.test_slabs import FIRST, OTHER, OWNER, SHADOW, chunks_of, name_of, piece, program_of, sealed
from tests.harness import wait_until
from xmigd.checkpoints import transit as transits
from xmigd.checkpoints.content import PIECE, Chunks, Source, encode
from xmigd.checkpoints.live import restore_memory
from xmigd.checkpoints.manifest import Chunk, Content
from xmigd.checkpoints.transit import SLAB, Transit, in_transit
from xmigd.ipc.fds import Fd
from xmigd.memory.host_pool import make_file
from xmigd.store.objects import Damaged


def sent(content: bytes) -> bytes:
    """As the other node sends it."""
    return b"".join(encode(content))


def arrive(writing: Transit, *seeds: int) -> Content:
    for seed in seeds:
        writing.take(name_of(seed), PIECE, sent(piece(seed)))
    chunks = (Chunk(at=number * PIECE, bytes=PIECE, hash=name_of(seed)) for number, seed in enumerate(seeds))
    return Content(bytes=len(seeds) * PIECE, chunks=tuple(chunks))


def on_disk(chunks: Chunks) -> list[str]:
    return sorted(path.name for path in chunks.folder.rglob("*") if path.is_file())


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_what_servers_have_copied_is_read_where_it_is(tmp_path: Path) -> None:
    chunks, memory = Chunks(tmp_path / "objects"), make_file(None)
    os.pwrite(memory.fileno(), piece(1) + piece(2), 0)
    with in_transit(chunks, FIRST, OWNER) as writing:
        fd, slab = writing.retain(memory, OWNER)
        (content,) = writing.store_all([Source(fd.fileno(), slab=slab)])
        memory.close()
        assert [chunk.hash for chunk in content.chunks] == [name_of(1), name_of(2)]
        assert writing.has([name_of(1), name_of(2), ""])
        assert not writing.has([name_of(3)])
        writing.sync()
        assert b"".join(writing.encoded(name_of(2), PIECE, bytearray(PIECE))) == sent(piece(2))
    assert on_disk(chunks) == []


def test_what_a_server_changes_afterwards_is_not_sent(tmp_path: Path) -> None:
    chunks, memory = Chunks(tmp_path / "objects"), make_file(None)
    os.pwrite(memory.fileno(), piece(1), 0)
    with in_transit(chunks, FIRST, OWNER) as writing:
        fd, slab = writing.retain(memory, OWNER)
        tuple(writing.store_all([Source(fd.fileno(), slab=slab)]))
        os.pwrite(memory.fileno(), b"gone", 5)
        with pytest.raises(Damaged):
            b"".join(writing.encoded(name_of(1), PIECE, bytearray(PIECE)))
        os.ftruncate(memory.fileno(), 0)
        with pytest.raises(Damaged):
            b"".join(writing.encoded(name_of(1), PIECE, bytearray(PIECE)))


def test_what_comes_is_what_the_next_server_gets(tmp_path: Path) -> None:
    """More than one slab of it, with the chunks in another order than they came in, and one of them twice."""
    chunks = Chunks(tmp_path / "objects")
    seeds = list(range(1, 2 + SLAB // PIECE))
    with in_transit(chunks, FIRST, OWNER) as writing:
        content = arrive(writing, *seeds)
        slots = [(0x7000_0000_0000 + number * PIECE, SHADOW + number * PIECE) for number in reversed(range(len(seeds)))]
        program = program_of([content], slots, writing)
        assert not writing.lacks(name_of(1))
        assert writing.lacks(name_of(99))
        handles, files = restore_memory(chunks, FIRST, program, lambda _: None, threading.Event())
        assert len(sealed(handles)) == 2
        assert on_disk(chunks) == []
    # What the server was given is there, although the move is over.
    found = chunks_of(handles, files[0])
    assert found == {address: piece(seeds[(slot - SHADOW) // PIECE]) for address, slot in slots}
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(sealed(handles)[0].fd.fileno(), b"gone", 0)


def test_nobody_else_gets_it(tmp_path: Path) -> None:
    chunks = Chunks(tmp_path / "objects")
    with in_transit(chunks, FIRST, OWNER) as writing:
        arrive(writing, 1)
        assert chunks.slabs_of("b" * 32, OWNER) == []
        assert chunks.slabs_of(FIRST, OTHER) == []
        assert [slab.owner for slab, _ in chunks.slabs_of(FIRST, OWNER)] == [OWNER]
    assert chunks.slabs_of(FIRST, OWNER) == []


def test_without_memory_it_goes_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = Chunks(tmp_path / "objects")
    with in_transit(chunks, FIRST, OWNER) as writing:
        in_memory = arrive(writing, *range(SLAB // PIECE))
        monkeypatch.setattr(transits, "available_memory", lambda: 0)
        more = arrive(writing, 1001, 1002)
        assert on_disk(chunks) == sorted([name_of(1001), name_of(1002)])
        assert writing.has([name_of(1), name_of(1001)])
        assert not writing.lacks(name_of(1001))
        assert b"".join(writing.encoded(name_of(1001), PIECE, bytearray(PIECE))) == sent(piece(1001))
        output = [make_file(None), make_file(None)]
        for content, fd in zip((in_memory, more), output, strict=True):
            chunks.restore(content, fd.fileno())
        assert os.pread(output[0].fileno(), PIECE, 0) == piece(0)
        assert os.pread(output[1].fileno(), PIECE, PIECE) == piece(1002)


def test_what_is_damaged_on_its_way_is_refused(tmp_path: Path) -> None:
    chunks = Chunks(tmp_path / "objects")
    with in_transit(chunks, FIRST, OWNER) as writing:
        with pytest.raises(Damaged):
            writing.take(name_of(1), PIECE, sent(piece(2)))
        assert writing.lacks(name_of(1))
        assert writing.lacks(name_of(2))


def test_many_come_at_once(tmp_path: Path) -> None:
    """Small ones, too, and some twice."""
    chunks = Chunks(tmp_path / "objects")
    contents = [piece(seed) if seed % 3 else piece(seed)[: 1000 + seed] for seed in range(2 * SLAB // PIECE)]
    with in_transit(chunks, FIRST, OWNER) as writing, ThreadPoolExecutor(8) as pool:
        names = [hashlib.sha256(content).hexdigest() for content in contents]
        coming = list(zip(names, contents, strict=True)) * 2
        for done in [pool.submit(writing.take, name, len(content), sent(content)) for name, content in coming]:
            done.result()
        for name, content in zip(names, contents, strict=True):
            assert writing.read(name, len(content), bytearray(PIECE)) == content


def test_what_comes_too_late_leaves_nothing(tmp_path: Path) -> None:
    chunks, before = Chunks(tmp_path / "objects"), descriptors()
    with in_transit(chunks, FIRST, OWNER) as writing:
        arrive(writing, 1)
    arrive(writing, 2, 3)
    assert writing.read(name_of(2), PIECE, bytearray(PIECE)) is None
    assert writing.read(name_of(1), PIECE, bytearray(PIECE)) is None
    assert chunks.transits == {}
    assert on_disk(chunks) == []
    wait_until(lambda: descriptors() <= before, "all memory is given back")  # an earlier test's, too


def test_a_retained_file_may_lose_its_name(tmp_path: Path) -> None:
    """CRIU's folder is removed after each round."""
    chunks, path = Chunks(tmp_path / "objects"), tmp_path / "pages-1.img"
    path.write_bytes(piece(1) + b"and more")
    with in_transit(chunks, FIRST, OWNER) as writing:
        for _ in range(2):  # another process has the same
            fd, slab = writing.retain(Fd(os.open(path, os.O_RDONLY)), None)
            (content,) = writing.store_all([Source(fd.fileno(), slab=slab)])
            fd.close()
        path.unlink()
        last = content.chunks[1]
        assert b"".join(writing.encoded(last.hash, last.bytes, bytearray(PIECE))) == sent(b"and more")
        assert chunks.slabs_of(FIRST, OWNER) == []
        memory = make_file(None)
        os.pwrite(memory.fileno(), piece(1) + piece(2), 0)
        copied, slab = writing.retain(memory, OWNER)
        tuple(writing.store_all([Source(copied.fileno(), slab=slab)]))
        before = descriptors()
        writing.sent()  # the next round has files of its own
        assert writing.has([name_of(1), name_of(2)])
        assert not writing.has([last.hash])
        wait_until(lambda: descriptors() < before, "nobody has the file any more")


def test_what_was_replaced_takes_no_memory(tmp_path: Path) -> None:
    """A part of a slab, of which a server may read the rest meanwhile."""
    chunks = Chunks(tmp_path / "objects")
    with in_transit(chunks, FIRST, OWNER) as writing:
        arrive(writing, *range(1, 9))
        ((before, fd),) = writing.slabs_of(OWNER)
        held = os.fstat(fd.fileno()).st_blocks
        writing.retain_only({name_of(1), name_of(2), name_of(8)})
        assert os.fstat(fd.fileno()).st_blocks * 512 <= held * 512 - 5 * PIECE
        assert writing.lacks(name_of(3))
        assert not writing.has([name_of(3)])
        assert writing.read(name_of(8), PIECE, bytearray(PIECE)) == piece(8)
        assert os.fstat(fd.fileno()).st_mode & 0o777 == 0o600, "its server cannot open it for writing"
        ((after, _),) = writing.slabs_of(OWNER)
        assert (len(before.places), len(after.places)) == (8, 3)
        arrive(writing, 3)
        assert writing.read(name_of(3), PIECE, bytearray(PIECE)) == piece(3)
