"""Content in pieces by its hash: what is stored comes back, and what is damaged is never taken for it."""

from __future__ import annotations

import os
import random
import struct
import threading
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from xmigd.checkpoints.content import HEADER, MAGIC, PIECE, Chunks
from xmigd.checkpoints.manifest import Content
from xmigd.store.objects import Damaged

SOME = random.Random(1)


@pytest.fixture
def chunks(tmp_path: Path) -> Chunks:
    return Chunks(tmp_path / "objects")


def memory(*parts: tuple[int, bytes], size: int) -> int:
    fd = os.memfd_create("content")
    os.ftruncate(fd, size)
    for at, data in parts:
        os.pwrite(fd, data, at)
    return fd


def stored(chunks: Chunks, fd: int) -> tuple[Content, int]:
    with chunks.writing() as writing:
        content = writing.store(fd)
        writing.sync()
        return content, writing.stored_bytes


def read(fd: int) -> bytes:
    return os.pread(fd, os.fstat(fd).st_size, 0)


def put(chunks: Chunks, data: bytes) -> tuple[str, Path]:
    chunks.folder.mkdir(parents=True, exist_ok=True)
    name, _ = chunks.put(data)
    return name, chunks.path(name)


def floats(count: int) -> bytes:
    return struct.pack(f"<{count}f", *(SOME.gauss(0, 0.02) for _ in range(count)))


def halves(count: int) -> bytes:
    return struct.pack(f"<{count}e", *(SOME.gauss(0, 0.02) for _ in range(count)))


NUMBERS = struct.pack("<600I", *range(600))  # which planes make short


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    size=st.sampled_from([0, 1, 4097, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 7]),
    parts=st.lists(st.tuples(st.floats(0, 1), st.binary(max_size=5000)), max_size=4),
)
def test_what_is_stored_comes_back(chunks: Chunks, size: int, parts: list[tuple[float, bytes]]) -> None:
    placed = [(int(share * size), data[: size - int(share * size)]) for share, data in parts]
    source = memory(*placed, size=size)
    content, _ = stored(chunks, source)
    target = os.memfd_create("target")
    chunks.restore(content, target)
    assert (content.bytes, read(target)) == (size, read(source))
    assert list(content.chunks) == sorted(content.chunks, key=lambda chunk: chunk.at)
    for fd in (source, target):
        os.close(fd)


def test_what_is_zero_is_left_out(chunks: Chunks) -> None:
    source = memory((5 * PIECE, b"x"), (7 * PIECE, bytes(PIECE)), size=64 * PIECE)
    content, _ = stored(chunks, source)
    assert [chunk.at for chunk in content.chunks] == [5 * PIECE]
    target = os.memfd_create("target")
    chunks.restore(content, target)
    assert os.fstat(target).st_blocks * 512 <= 2 * PIECE


def test_equal_pieces_are_kept_once(chunks: Chunks) -> None:
    data = SOME.randbytes(PIECE)
    source = memory((0, data), (PIECE, data), size=2 * PIECE)
    first, took = stored(chunks, source)
    assert took >= PIECE
    assert len({chunk.hash for chunk in first.chunks}) == 1
    for again in (chunks, Chunks(chunks.folder)):
        assert stored(again, source) == (first, 0)


@pytest.mark.parametrize(
    ("data", "encoding"),
    [
        (SOME.randbytes(200_001), 0),
        (b"a text that repeats. " * 9000, 1),
        (halves(300_000) + b"x", 2),
        (floats(200_000) + b"xyz", 4),
    ],
    ids=["random", "text", "halves", "floats"],
)
def test_each_piece_has_the_encoding_that_fits(chunks: Chunks, data: bytes, encoding: int) -> None:
    name, path = put(chunks, data)
    assert path.read_bytes()[8] == encoding
    assert chunks.get(name, len(data)) == data
    assert (path.stat().st_size < len(data)) == (encoding != 0)


@pytest.mark.parametrize("data", [SOME.randbytes(60), b"abcd" * 40, NUMBERS], ids=["raw", "zstd", "planes"])
def test_every_byte_counts(chunks: Chunks, data: bytes) -> None:
    name, path = put(chunks, data)
    whole = path.read_bytes()
    changed = [whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :] for at in range(len(whole))]
    for damaged in [*changed, *(whole[:at] for at in range(len(whole))), whole + b"\0", whole + whole]:
        path.write_bytes(damaged)
        with pytest.raises(Damaged):
            chunks.get(name, len(data))
    path.write_bytes(whole)
    assert chunks.get(name, len(data)) == data
    with pytest.raises(Damaged):
        chunks.get(name, len(data) + 1)


def test_a_bomb_is_not_unpacked(chunks: Chunks) -> None:
    name, path = put(chunks, b"abcd" * 40)
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 30))
    for payload in (bomb, zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 << 30))):
        path.write_bytes(HEADER.pack(MAGIC, 1, bytes(3), zlib.crc32(payload), 160) + payload)
        with pytest.raises(Damaged):
            chunks.get(name, 160)


def test_a_damaged_piece_is_written_again(chunks: Chunks) -> None:
    """A machine that was lost before everything was on its disk may leave such a one."""
    data = SOME.randbytes(1000)
    name, path = put(chunks, data)
    path.write_bytes(b"")
    new = Chunks(chunks.folder)
    assert new.put(data) == (name, path.stat().st_size)
    assert new.get(name, len(data)) == data


def test_only_what_nobody_needs_is_removed(chunks: Chunks) -> None:
    (kept, kept_at), (gone, gone_at) = put(chunks, b"kept"), put(chunks, b"gone")
    left = kept_at.parent / "left.part"
    left.touch()
    with chunks.writing():
        assert not chunks.remove_unneeded(lambda: {kept})
        assert gone_at.exists()
    assert chunks.remove_unneeded(lambda: {kept})
    assert (kept_at.exists(), gone_at.exists(), left.exists()) == (True, False, False)
    with pytest.raises(Damaged):
        chunks.get(gone, 4)
    assert chunks.put(b"gone")[1] > 0, "it is not taken for one that is there"


def test_several_threads_store_the_same(chunks: Chunks) -> None:
    source = memory((0, SOME.randbytes(3 * PIECE)), size=3 * PIECE)
    found: list[Content] = []
    threads = [threading.Thread(target=lambda: found.append(stored(chunks, source)[0])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(content == found[0] for content in found)
    assert {path.name for path in chunks.folder.glob("*/*")} == {chunk.hash for chunk in found[0].chunks}


def test_only_we_read_it(chunks: Chunks) -> None:
    stored(chunks, memory((0, b"secret"), size=6))
    modes = {path.stat().st_mode & 0o777 for path in chunks.folder.rglob("*") if path.is_file()}
    assert modes == {0o600}
    assert {path.stat().st_mode & 0o777 for path in [chunks.folder, *chunks.folder.iterdir()]} == {0o700}


def test_what_fails_leaves_nothing(chunks: Chunks, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_source: str, _target: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("xmigd.checkpoints.content.os.rename", full)
    with pytest.raises(OSError, match="No space"):
        stored(chunks, memory((0, b"data"), size=4))
    assert [path for path in chunks.folder.rglob("*") if path.is_file()] == []


def test_a_file_that_becomes_shorter(chunks: Chunks, monkeypatch: pytest.MonkeyPatch) -> None:
    source = memory((0, SOME.randbytes(100)), size=100)
    real: Callable[[int, int, int], bytes] = os.pread

    def shorter(fd: int, size: int, at: int) -> bytes:
        os.ftruncate(source, 50)
        return real(fd, size, at)

    monkeypatch.setattr("xmigd.checkpoints.content.os.pread", shorter)
    with pytest.raises(OSError, match="shorter"):
        stored(chunks, source)


def test_a_missing_piece(chunks: Chunks) -> None:
    content, _ = stored(chunks, memory((0, b"data"), size=4))
    chunks.path(content.chunks[0].hash).unlink()
    with pytest.raises(Damaged, match="cannot be read"):
        chunks.restore(content, os.memfd_create("target"))


# --- version 1, for ever ----------------------------------------------------------------------------------------------

FOR_EVER = Path(__file__).parent / "data"


@pytest.mark.parametrize("path", sorted(FOR_EVER.glob("*.piece")), ids=lambda path: path.stem)
def test_what_was_written_once_is_read_for_ever(path: Path, tmp_path: Path) -> None:
    _, name, size = path.stem.split("-")
    chunks = Chunks(tmp_path)
    chunks.path(name).parent.mkdir()
    chunks.path(name).write_bytes(path.read_bytes())
    assert len(chunks.get(name, int(size))) == int(size)
