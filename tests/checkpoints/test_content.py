"""Content by its hash: what is stored comes back, once for each equal piece, or is known to be damaged."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import io
import os
import random
import re
import struct
import subprocess
import threading
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.harness import ROOT, needs_root
from xmigd.checkpoints import content, planes
from xmigd.checkpoints.content import HEADER, PIECE, Chunks
from xmigd.checkpoints.manifest import Chunk, Content
from xmigd.store.objects import Damaged

RAW, ZSTD = 0, 1
GOLDEN = Path(__file__).parent / "data" / "objects"
TEXT = b"a text that is repeated, " * 30


def fixed(seed: int, size: int) -> bytes:
    """The same for ever: Python does not promise that of its random numbers."""
    blocks = (hashlib.sha256(struct.pack("<II", seed, at)).digest() for at in range(size // 32 + 1))
    return b"".join(blocks)[:size]


# Written by version 1. The content as this file computes it, by the encoding.
WRITTEN = {
    RAW: fixed(0, 301),
    ZSTD: " ".join(str(number * number) for number in range(150)).encode(),
    2: b"".join(bytes((low, 0x3C + high % 2)) for low, high in zip(fixed(1, 200), fixed(2, 200), strict=True)) + b"x",
    4: b"".join(
        bytes((first, second, 0x80 | third % 8, 0x3F))
        for first, second, third in zip(fixed(3, 100), fixed(4, 100), fixed(5, 100), strict=True)
    )
    + b"xyz",
}
ENCODINGS = tuple(WRITTEN)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def golden(encoding: int) -> bytes:
    return Chunks(GOLDEN).path(sha256(WRITTEN[encoding])).read_bytes()


@given(st.binary(max_size=300), st.sampled_from(planes.PLANES))
def test_planes(data: bytes, width: int) -> None:
    """As Python's slices make them; sizes that are no multiple included."""
    made = planes.split(bytearray(data), width)
    assert made == b"".join(data[first::width] for first in range(width)) == planes.split(data, width)
    assert planes.join(made, width) == data


def encoding_of(chunks: Chunks, name: str) -> int:
    return chunks.path(name).read_bytes()[8]


def files(chunks: Chunks) -> set[str]:
    return {path.name for path in chunks.folder.rglob("*") if path.is_file()}


def lay(chunks: Chunks, name: str, file: bytes) -> None:
    chunks.path(name).parent.mkdir(parents=True, exist_ok=True)
    chunks.path(name).write_bytes(file)


@contextlib.contextmanager
def reads(file: bytes) -> Iterator[None]:
    """Every piece is this file. Thousands of them are not written to a disk."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(content, "open", lambda path, mode, buffering=-1: io.BytesIO(file), raising=False)
        yield


@contextlib.contextmanager
def memfd(data: bytes = b"") -> Iterator[int]:
    fd = os.memfd_create("content", os.MFD_CLOEXEC)
    try:
        os.pwrite(fd, data, 0)
        yield fd
    finally:
        os.close(fd)


def whole(fd: int) -> bytes:
    return os.pread(fd, os.fstat(fd).st_size + 1, 0)


@pytest.fixture
def chunks(tmp_path: Path) -> Chunks:
    found = Chunks(tmp_path / "objects")
    with found.writing():  # makes the folder
        return found


# --- files ------------------------------------------------------------------------------------------------------------

SIZES = (0, 1, 2, 3, 5, 4097, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + 3)
PLACES = (0, 1, 4095, 4096, 70_001, PIECE - 2, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 2 * PIECE + 2)
RUNS = st.one_of(
    st.binary(min_size=1, max_size=9),
    st.sampled_from([bytes(5000), TEXT, fixed(6, 4099), struct.pack("<999f", *(1 + n / 7e3 for n in range(999)))]),
)


class TestFiles:
    @settings(max_examples=60)
    @given(st.sampled_from(SIZES), st.lists(st.tuples(st.sampled_from(PLACES), RUNS), max_size=5))
    def test_a_sparse_file_comes_back(
        self, tmp_path_factory: pytest.TempPathFactory, size: int, runs: list[tuple[int, bytes]]
    ) -> None:
        chunks = Chunks(tmp_path_factory.getbasetemp() / "sparse")
        expected = bytearray(size)
        with memfd() as source, memfd() as restored, chunks.writing() as writing:
            os.ftruncate(source, size)
            for at, data in runs:
                data = data[: max(0, size - at)]
                if data:
                    os.pwrite(source, data, at)
                    expected[at : at + len(data)] = data
            stored = writing.store(source)
            chunks.restore(stored, restored)
            assert whole(restored) == whole(source) == expected
            assert os.fstat(restored).st_blocks * 512 <= len(stored.chunks) * PIECE
        assert stored.bytes == size
        pieces = {at: bytes(expected[at : at + PIECE]) for at in range(0, size, PIECE)}
        assert [(one.at, one.bytes, one.hash) for one in stored.chunks] == [
            (at, len(piece), sha256(piece)) for at, piece in pieces.items() if any(piece)
        ]
        assert files(chunks) >= {one.hash for one in stored.chunks}

    def test_what_is_empty_or_zero_has_no_pieces(self, chunks: Chunks) -> None:
        for size in (0, 1, PIECE, 3 * PIECE + 1):
            with memfd(bytes(size)) as zeros, memfd() as hole, chunks.writing() as writing:
                os.ftruncate(hole, size)
                assert writing.store(zeros) == writing.store(hole) == Content(bytes=size, chunks=())
                assert writing.stored_bytes == 0
        assert files(chunks) == set()

    def test_a_large_hole_is_not_read(self, chunks: Chunks, monkeypatch: pytest.MonkeyPatch) -> None:
        places = []
        preadv = os.preadv

        def noted(fd: int, into: list[memoryview], at: int) -> int:
            places.append(at)
            return preadv(fd, into, at)

        monkeypatch.setattr(os, "preadv", noted)
        with memfd() as fd, chunks.writing() as writing:
            os.ftruncate(fd, 1 << 40)
            os.pwrite(fd, b"x", 1 << 39)
            stored = writing.store(fd)
        assert [one.at for one in stored.chunks] == places == [1 << 39]
        with memfd() as restored:
            chunks.restore(stored, restored)
            assert os.fstat(restored).st_size == 1 << 40
            assert os.pread(restored, 2, 1 << 39) == b"x\0"

    def test_equal_pieces_are_kept_once(self, chunks: Chunks) -> None:
        piece = fixed(7, 4096) * (PIECE // 4096)
        with memfd(piece * 6 + b"end") as fd, memfd(b"end" + bytes(PIECE - 3) + piece) as other:
            with chunks.writing() as writing:
                first = writing.store(fd)
                on_disk = sum(chunks.path(name).stat().st_size for name in files(chunks))
                assert writing.stored_bytes == on_disk
                assert writing.store(fd) == first
                assert writing.stored_bytes == on_disk
            assert len({one.hash for one in first.chunks}) == 2 == len(files(chunks))
            for daemon in (chunks, Chunks(chunks.folder)):
                with daemon.writing() as writing:
                    assert writing.store(fd) == first
                    assert writing.stored_bytes == 0
            with chunks.writing() as writing:
                assert writing.store(other).chunks[1].hash == first.chunks[0].hash
                assert len(files(chunks)) == 3

    def test_only_we_may_read_them(self, tmp_path: Path) -> None:
        chunks = Chunks(tmp_path / "above" / "objects")
        before = os.umask(0)
        try:
            with memfd(TEXT) as fd, chunks.writing() as writing:
                writing.store(fd)
                writing.sync()
        finally:
            os.umask(before)
        modes = {path.is_dir(): path.stat().st_mode & 0o777 for path in (tmp_path / "above").rglob("*")}
        assert modes == {True: 0o700, False: 0o600}
        assert (tmp_path / "above").stat().st_mode & 0o777 == 0o700

    def test_what_becomes_shorter_while_it_is_read(self, chunks: Chunks, monkeypatch: pytest.MonkeyPatch) -> None:
        self.becomes_shorter(chunks, monkeypatch, "preadv", fixed(8, PIECE) + fixed(9, PIECE))

    def test_what_becomes_shorter_before_it_is_read(self, chunks: Chunks, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where its data lies was not known yet: its end would look like a hole."""
        self.becomes_shorter(chunks, monkeypatch, "lseek", fixed(8, PIECE) + fixed(9, PIECE))

    def becomes_shorter(self, chunks: Chunks, monkeypatch: pytest.MonkeyPatch, where: str, data: bytes) -> None:
        function: Callable[..., object] = getattr(os, where)

        def shortened(fd: int, *arguments: object) -> object:
            os.ftruncate(fd, PIECE)
            return function(fd, *arguments)

        with memfd(data) as fd, chunks.writing() as writing:
            with monkeypatch.context() as patched:
                patched.setattr(os, where, shortened)
                with pytest.raises(OSError, match="shorter"):
                    writing.store(fd)
            assert files(chunks) <= {sha256(data[:PIECE])}
            os.pwrite(fd, data, 0)
            assert len(writing.store(fd).chunks) == 2

    def test_one_that_cannot_be_read(self, chunks: Chunks, monkeypatch: pytest.MonkeyPatch) -> None:
        """An error of the disk is not a hole."""

        def lseek(fd: int, at: int, how: int) -> int:
            raise OSError(5, "Input/output error")

        with memfd(TEXT) as fd, chunks.writing() as writing:
            monkeypatch.setattr(os, "lseek", lseek)
            with pytest.raises(OSError, match="Input/output"):
                writing.store(fd)

    def test_a_full_disk_leaves_nothing(self, chunks: Chunks, monkeypatch: pytest.MonkeyPatch) -> None:
        def rename(*_: object) -> None:
            raise OSError(28, "No space left on device")

        with memfd(TEXT) as fd, chunks.writing() as writing:
            with monkeypatch.context() as patched:
                patched.setattr(os, "rename", rename)
                with pytest.raises(OSError, match="No space"):
                    writing.store(fd)
            assert files(chunks) == set()
            assert writing.stored_bytes == 0
            writing.store(fd)
            assert files(chunks) == {sha256(TEXT)}


class TestRestoring:
    def test_a_missing_piece(self, chunks: Chunks) -> None:
        with memfd(fixed(10, PIECE) + TEXT) as fd, chunks.writing() as writing:
            stored = writing.store(fd)
        chunks.path(sha256(TEXT)).unlink()
        with memfd() as restored, pytest.raises(Damaged, match="cannot be read"):
            chunks.restore(stored, restored)

    def test_after_a_damaged_piece_not_everything_is_read(
        self, chunks: Chunks, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        name, _ = chunks.put(TEXT)
        stored = Content(
            bytes=1 << 30, chunks=tuple(Chunk(at=at << 10, bytes=len(TEXT), hash=name) for at in range(5000))
        )
        chunks.path(name).unlink()
        got = []
        path = chunks.path

        def noted(name: str) -> Path:
            got.append(name)
            return path(name)

        monkeypatch.setattr(chunks, "path", noted)
        with memfd() as restored, pytest.raises(Damaged):
            chunks.restore(stored, restored)
        assert 0 < len(got) < 5000

    @pytest.mark.parametrize("places", [(0, 749), (750, 0), (0, 0), (0, 751), (1501,), (2250,)])
    def test_pieces_that_overlap_or_lie_outside(self, chunks: Chunks, places: tuple[int, ...]) -> None:
        """A manifest may come from anywhere."""
        name, _ = chunks.put(TEXT)
        stored = Content(bytes=1500, chunks=tuple(Chunk(at=at, bytes=len(TEXT), hash=name) for at in places))
        with memfd() as restored:
            with pytest.raises(Damaged, match="place"):
                chunks.restore(stored, restored)
            assert whole(restored) == b""


# --- pieces -----------------------------------------------------------------------------------------------------------


def normal(kind: str, count: int) -> bytes:
    numbers = random.Random(1)
    values = [numbers.gauss(0, 0.02) for _ in range(count)]
    if kind == "bfloat16":
        return b"".join([struct.pack("<f", value)[2:] for value in values])
    return struct.pack(f"<{count}{kind}", *values)


class TestEncodings:
    @pytest.mark.parametrize(
        ("encoding", "make"),
        [
            (RAW, lambda: random.Random(1).randbytes(PIECE)),
            (RAW, lambda: b"x"),
            (RAW, lambda: TEXT * 100 + random.Random(1).randbytes(PIECE - 100 * len(TEXT))),
            (ZSTD, lambda: TEXT * (PIECE // len(TEXT))),
            (ZSTD, lambda: b"x" + bytes(PIECE - 1)),
            (ZSTD, lambda: random.Random(1).randbytes(997) * (PIECE // 997)),
            (4, lambda: normal("f", 1 << 17)),
            (2, lambda: normal("bfloat16", 1 << 17)),
            (2, lambda: normal("e", 1 << 17)),
        ],
        ids=["random", "a byte", "text, then random", "text", "zeros", "repeated", "float32", "bfloat16", "float16"],
    )
    def test_what_fits_is_chosen(self, chunks: Chunks, encoding: int, make: Callable[[], bytes]) -> None:
        data = make()
        name, stored = chunks.put(data)
        assert stored == chunks.path(name).stat().st_size
        assert (name, encoding_of(chunks, name)) == (sha256(data), encoding)
        assert (stored == HEADER.size + len(data)) if encoding == RAW else (stored < 0.9 * len(data))
        assert chunks.get(name, len(data)) == data

    @pytest.mark.parametrize("encoding", [2, 4])
    @pytest.mark.parametrize("more", range(4))
    def test_planes_of_sizes_that_are_no_multiple(self, chunks: Chunks, encoding: int, more: int) -> None:
        data = (WRITTEN[encoding] * 3)[: 400 + more]
        name, _ = chunks.put(data)
        assert encoding_of(chunks, name) == encoding
        assert chunks.get(name, len(data)) == data

    def test_an_empty_piece(self, chunks: Chunks) -> None:
        name, _ = chunks.put(b"")
        assert chunks.get(name, 0) == b""


@pytest.mark.parametrize("encoding", ENCODINGS)
class TestWrittenByVersion1:
    """Whoever changes what is written changes none of these files, and adds others."""

    def test_it_is_read(self, encoding: int) -> None:
        data = WRITTEN[encoding]
        assert encoding_of(Chunks(GOLDEN), sha256(data)) == encoding
        assert Chunks(GOLDEN).get(sha256(data), len(data)) == data

    def test_it_is_what_docs_formats_md_describes(self, encoding: int) -> None:
        code, _ = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "formats.md").read_text(), re.DOTALL)
        names: dict[str, Callable[..., bytes]] = {}
        exec(code, names)
        data = WRITTEN[encoding]
        assert names["read_piece"](str(GOLDEN), sha256(data), len(data)) == data


class TestDamage:
    @pytest.mark.parametrize("encoding", ENCODINGS)
    def test_every_byte_counts(self, chunks: Chunks, encoding: int) -> None:
        data, file = WRITTEN[encoding], golden(encoding)
        damaged = [file[:at] + bytes([file[at] ^ 0xFF]) + file[at + 1 :] for at in range(len(file))]
        damaged += [file[:length] for length in range(len(file))]
        damaged += [file + more for more in (b"\0", b"x", file, bytes(100_000))]
        self.all_are_noticed(chunks, data, damaged)

    @pytest.mark.parametrize("encoding", ENCODINGS)
    def test_every_bit_counts(self, chunks: Chunks, encoding: int) -> None:
        """Also those that mean nothing to a reader of zstd."""
        data, file = WRITTEN[encoding], golden(encoding)
        flipped = [
            file[: bit // 8] + bytes([file[bit // 8] ^ (1 << bit % 8)]) + file[bit // 8 + 1 :]
            for bit in range(8 * len(file))
        ]
        self.all_are_noticed(chunks, data, flipped)

    def all_are_noticed(self, chunks: Chunks, data: bytes, damaged: list[bytes]) -> None:
        for number, one in enumerate(damaged):
            with reads(one):
                try:
                    chunks.get(sha256(data), len(data))
                except Damaged:
                    continue
                pytest.fail(f"number {number} is accepted")

    def test_headers_that_are_not_true(self, chunks: Chunks) -> None:
        def file(
            encoding: int, stated: int, payload: bytes, *, magic: bytes = b"XMPIECE1", zero: bytes = bytes(3)
        ) -> bytes:
            return HEADER.pack(magic, encoding, zero, zlib.crc32(payload), stated) + payload

        packed = zstandard.compress(TEXT)
        streamed = zstandard.ZstdCompressor(write_content_size=False).compress(TEXT)
        with reads(file(ZSTD, len(TEXT), packed)):
            assert chunks.get(sha256(TEXT), len(TEXT)) == TEXT
        self.all_are_noticed(
            chunks, TEXT,
            [
                file(ZSTD, len(TEXT) + 1, packed), file(ZSTD, len(TEXT) - 1, packed), file(ZSTD, 1 << 63, packed),
                file(ZSTD, 0, packed), file(RAW, len(TEXT) + 1, TEXT + b"x"),
                *(file(encoding, len(TEXT), packed) for encoding in range(256) if encoding != ZSTD),
                file(ZSTD, len(TEXT), packed, magic=b"XMPIECE2"),
                *(file(ZSTD, len(TEXT), packed, zero=bytes(at) + b"\1" + bytes(2 - at)) for at in range(3)),
                file(ZSTD, len(TEXT), packed + zstandard.compress(b"")), file(ZSTD, len(TEXT), streamed),
                file(ZSTD, len(TEXT), TEXT), file(ZSTD, len(TEXT), b""), b"",
            ],
        )  # fmt: skip
        # A payload is shorter than what it encodes.
        contents = [fixed(11, 100) + bytes(zeros) for zeros in range(100)]
        frames = [(data, zstandard.compress(data)) for data in contents]
        as_long = [(data, frame) for data, frame in frames if len(frame) in (len(data), len(data) + 1)]
        assert as_long
        for data, frame in as_long:
            self.all_are_noticed(chunks, data, [file(ZSTD, len(data), frame)])

    def test_another_size_is_requested(self, chunks: Chunks) -> None:
        name, _ = chunks.put(TEXT)
        for size in (0, 1, len(TEXT) - 1, len(TEXT) + 1, 1 << 30):
            with pytest.raises(Damaged):
                chunks.get(name, size)

    @pytest.mark.parametrize("states", ["the truth", "the header's size", "nothing", "more than there is memory"])
    @pytest.mark.parametrize("encoding", [ZSTD, 2, 4])
    def test_what_becomes_far_larger_takes_no_memory(self, chunks: Chunks, encoding: int, states: str) -> None:
        size, bomb = 100_000, bytes(64 << 20)
        frame = zstandard.ZstdCompressor(write_content_size=states != "nothing").compress(bomb)
        end = zstandard.frame_header_size(frame)
        if states == "the header's size":
            frame = frame[: end - 4] + struct.pack("<I", size) + frame[end:]
            assert zstandard.frame_content_size(frame) == size
        elif states == "more than there is memory":
            frame = frame[:4] + bytes([frame[4] | 0xC0]) + frame[5 : end - 4] + struct.pack("<Q", 1 << 62) + frame[end:]
            assert zstandard.frame_content_size(frame) == 1 << 62
        assert len(frame) < size
        del bomb
        lay(chunks, "ab" * 32, HEADER.pack(b"XMPIECE1", encoding, bytes(3), zlib.crc32(frame), size) + frame)
        tracemalloc.start()
        try:
            with pytest.raises(Damaged):
                chunks.get("ab" * 32, size)
            assert tracemalloc.get_traced_memory()[1] < 2 << 20
        finally:
            tracemalloc.stop()

    def test_another_pieces_content(self, chunks: Chunks) -> None:
        one, other = chunks.put(TEXT)[0], chunks.put(TEXT[::-1])[0]
        os.replace(chunks.path(other), chunks.path(one))
        with pytest.raises(Damaged):
            chunks.get(one, len(TEXT))

    @pytest.mark.parametrize("damaged", [b"", b"x", None], ids=["empty", "short", "its last byte"])
    def test_the_next_daemon_writes_it_again(self, chunks: Chunks, damaged: bytes | None) -> None:
        name, stored = chunks.put(TEXT)
        good = chunks.path(name).read_bytes()
        lay(chunks, name, good[:-1] + bytes([good[-1] ^ 1]) if damaged is None else damaged)
        with memfd(TEXT) as fd, Chunks(chunks.folder).writing() as writing:
            writing.store(fd)
            assert writing.stored_bytes == stored == chunks.path(name).stat().st_size
        assert chunks.get(name, len(TEXT)) == TEXT
        assert files(chunks) == {name}

    @pytest.mark.parametrize("gone", [True, False])
    def test_what_was_found_damaged_is_written_again(self, chunks: Chunks, gone: bool) -> None:
        name, stored = chunks.put(TEXT)
        if gone:
            chunks.path(name).unlink()
        else:
            chunks.path(name).write_bytes(b"x")
        with pytest.raises(Damaged):
            chunks.get(name, len(TEXT))
        assert chunks.put(TEXT) == (name, stored)
        assert chunks.get(name, len(TEXT)) == TEXT


# --- together ---------------------------------------------------------------------------------------------------------


class TestRemoval:
    def test_what_is_not_needed(self, chunks: Chunks) -> None:
        needed, other = chunks.put(TEXT)[0], chunks.put(TEXT[::-1])[0]
        (chunks.path(needed).parent / "tmpabc.part").write_bytes(b"left behind by a daemon that died")
        (chunks.folder / "tmpdef.part").write_bytes(b"")
        assert chunks.remove_unneeded(lambda: {needed})
        assert files(chunks) == {needed}
        assert chunks.get(needed, len(TEXT)) == TEXT
        assert chunks.put(TEXT[::-1]) == (other, chunks.path(other).stat().st_size)

    def test_of_nothing(self, tmp_path: Path) -> None:
        assert Chunks(tmp_path / "objects").remove_unneeded(set)

    def test_not_while_somebody_writes(self, chunks: Chunks) -> None:
        def needed() -> set[str]:
            raise AssertionError("it is of no use yet")

        name, _ = chunks.put(TEXT)
        with chunks.writing():
            with chunks.writing():
                assert not chunks.remove_unneeded(needed)
            assert not chunks.remove_unneeded(needed)
        with contextlib.suppress(KeyError), chunks.writing():
            raise KeyError
        assert files(chunks) == {name}
        assert chunks.remove_unneeded(set)
        assert files(chunks) == set()

    def test_nobody_begins_to_write_meanwhile(self, chunks: Chunks) -> None:
        name, stored = chunks.put(TEXT)
        found: list[object] = []

        def writes() -> None:
            with chunks.writing() as writing, memfd(TEXT) as fd:
                found.append(chunks.path(name).exists())
                writing.store(fd)
                found.append(writing.stored_bytes)

        thread = threading.Thread(target=writes)

        def needed() -> set[str]:
            thread.start()
            return set()

        assert chunks.remove_unneeded(needed)
        thread.join()
        assert found == [False, stored]
        assert files(chunks) == {name}

    def test_nothing_if_it_is_not_known_what_is_needed(self, chunks: Chunks) -> None:
        def needed() -> set[str]:
            raise Damaged("a manifest")

        name, _ = chunks.put(TEXT)
        with pytest.raises(Damaged):
            chunks.remove_unneeded(needed)
        assert files(chunks) == {name}
        with chunks.writing():
            pass


class TestThreads:
    @pytest.mark.parametrize("damaged", [False, True])
    def test_the_same_content_at_once(self, chunks: Chunks, damaged: bool) -> None:
        threads, rounds = 6, 20
        contents = [fixed(number, 200) * 50 for number in range(rounds)]
        barrier = threading.Barrier(threads)
        found: list[list[tuple[str, int]]] = [[] for _ in range(threads)]
        if damaged:
            for data in contents:
                lay(chunks, sha256(data), b"x")

        def put(results: list[tuple[str, int]]) -> None:
            for data in contents:
                barrier.wait()
                results.append(chunks.put(data))

        running = [threading.Thread(target=put, args=(results,)) for results in found]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        for number, data in enumerate(contents):
            results = [results[number] for results in found]
            size = chunks.path(sha256(data)).stat().st_size
            assert sorted(results) == [(sha256(data), 0)] * (threads - 1) + [(sha256(data), size)]
            assert chunks.get(sha256(data), len(data)) == data
        assert files(chunks) == {sha256(data) for data in contents}

    def test_two_checkpoints_at_once(self, chunks: Chunks) -> None:
        data = b"".join(fixed(number, 4096) * (PIECE // 4096) for number in range(4))
        stored: list[tuple[Content, int]] = []

        def store() -> None:
            with memfd(data) as fd, chunks.writing() as writing:
                stored.append((writing.store(fd), writing.stored_bytes))

        running = [threading.Thread(target=store) for _ in range(3)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        assert len({content for content, _ in stored}) == 1
        assert sum(size for _, size in stored) == sum(chunks.path(name).stat().st_size for name in files(chunks))


def test_sync(chunks: Chunks) -> None:
    with chunks.writing() as writing:
        chunks.put(TEXT)
        writing.sync()
        chunks.folder.rename(chunks.folder.with_name("elsewhere"))
        with pytest.raises(OSError, match="No such file"):
            writing.sync()
        chunks.folder.mkdir()
        with pytest.raises(OSError, match="another one"):
            writing.sync()


def test_what_a_failing_disk_may_not_have_is_written_again(chunks: Chunks, monkeypatch: pytest.MonkeyPatch) -> None:
    """It can be read from memory, so its hash proves nothing. All who wrote meanwhile fail."""
    kept, lost = b"kept" * 100, b"lost" * 100
    with chunks.writing() as writing:
        name, _ = chunks.put(kept)
        writing.sync()
    with chunks.writing() as beside, chunks.writing() as failing:
        gone, _ = chunks.put(lost)
        with monkeypatch.context() as patched:
            patched.setattr(content, "_LIBC", FailingDisk())
            with pytest.raises(OSError, match="Input/output error"):
                failing.sync()
        assert beside.has({name})
        assert not beside.has({gone})
        with pytest.raises(OSError, match="has failed"):
            beside.sync()
    before = chunks.path(gone).stat().st_ino
    with chunks.writing() as again:
        assert chunks.put(kept)[1] == 0
        assert chunks.put(lost)[1] > 0
        again.sync()
        assert again.has({name, gone})
    assert chunks.path(gone).stat().st_ino != before


@needs_root
def test_what_an_earlier_daemon_left_on_a_failing_disk_is_written_again(tmp_path: Path) -> None:
    """A disk that does not take what is written, and does later. It can be read until then, from memory."""
    pieces = [random.Random(number).randbytes(PIECE) for number in range(4)]
    with full_disk(tmp_path) as disk:
        earlier, later = Chunks(disk.folder), Chunks(disk.folder)
        for piece in pieces:
            (disk.folder / hashlib.sha256(piece).hexdigest()[:2]).mkdir(parents=True, exist_ok=True)
        disk.fill()
        with earlier.writing() as writing:
            names = [earlier.put(piece)[0] for piece in pieces]
            with pytest.raises(OSError, match=r"space|Input/output"):
                writing.sync()
        assert [later.on_disk(name, PIECE) for name in names] == pieces
        disk.empty()
        with later.writing() as writing:
            assert [later.put(piece)[0] for piece in pieces] == names
            writing.sync()
        disk.mount_again()
        assert [Chunks(disk.folder).on_disk(name, PIECE) for name in names] == pieces


class FullDisk:
    """A file system in a file that has no room for what is written to it."""

    def __init__(self, below: Path, folder: Path) -> None:
        self.below, self.image, self.mounted = below, below / "image", folder
        self.folder = folder / "objects"

    def mount(self) -> None:
        run("mount", "-o", "loop,noinit_itable", self.image, self.mounted)

    def mount_again(self) -> None:
        run("umount", self.mounted)
        self.mount()

    def fill(self) -> None:
        """Not what the file system itself rewrites: it would notice."""
        run("sync", "-f", self.folder)
        run("fstrim", self.mounted)
        run("mount", "-o", f"remount,size={os.stat(self.image).st_blocks * 512}", self.below)

    def empty(self) -> None:
        run("mount", "-o", "remount,size=128m", self.below)


@contextlib.contextmanager
def full_disk(place: Path) -> Iterator[FullDisk]:
    below, folder = place / "below", place / "disk"
    below.mkdir()
    folder.mkdir()
    try:
        run("mount", "-t", "tmpfs", "-o", "size=128m", "tmpfs", below)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"nothing can be mounted here: {error.stderr}")
    disk = FullDisk(below, folder)
    try:
        with disk.image.open("wb") as file:
            file.write(b"\xff" * (32 << 20))
        run("mkfs.ext4", "-q", "-J", "size=4", "-E", "nodiscard,lazy_itable_init=1,lazy_journal_init=1", disk.image)
        try:
            disk.mount()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no file can be mounted here: {error.stderr}")
        try:
            yield disk
        finally:
            run("umount", folder)
    finally:
        run("umount", "--lazy", below)


def run(*command: str | Path) -> None:
    subprocess.run(command, capture_output=True, text=True, check=True)


class FailingDisk:
    def syncfs(self, folder: int) -> int:
        ctypes.set_errno(errno.EIO)
        return -1
