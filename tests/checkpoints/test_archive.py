"""An exported checkpoint: whole it is read, and anything else is rejected with what is wrong and where."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoints.samples import BY_ENCODING, manifest_of, memory_file, named, small_checkpoint, stored
from tests.harness import ROOT
from xmigd.checkpoints import archive
from xmigd.checkpoints.archive import HEADER_BYTES, SECTION, TRAILER, Archive, key_of, pieces_of, write
from xmigd.checkpoints.archive import _with_checksum as with_checksum
from xmigd.checkpoints.content import HEADER, Chunks
from xmigd.checkpoints.content import encode as parts_of
from xmigd.checkpoints.manifest import Content, Manifest
from xmigd.errors import Conflict, Invalid
from xmigd.store.objects import Damaged

KEY = bytes(range(32))
DATA = Path(__file__).parent / "data"


def encode(content: bytes) -> bytes:
    return b"".join(parts_of(content))


@pytest.fixture
def chunks(tmp_path: Path) -> Chunks:
    return Chunks(tmp_path / "objects")


@pytest.fixture(params=[None, KEY], ids=["plain", "encrypted"])
def key(request: pytest.FixtureRequest) -> bytes | None:
    found: bytes | None = request.param
    return found


@pytest.fixture
def small(tmp_path: Path, chunks: Chunks, key: bytes | None) -> bytes:
    """An exported checkpoint with a piece of each encoding."""
    write(small_checkpoint(chunks), chunks, tmp_path / "small", key=key)
    return (tmp_path / "small").read_bytes()


@pytest.fixture
def limited_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody may read more at a time than the small files here have: what is read is allocated first."""
    read = os.pread

    def pread(fd: int, size: int, at: int) -> bytes:
        assert size < 1 << 16
        return read(fd, size, at)

    monkeypatch.setattr(os, "pread", pread)


def read_all(path: Path | int, key: bytes | None) -> Manifest:
    """Of a file, or a descriptor."""
    with Archive.open(Path(f"/proc/self/fd/{path}") if isinstance(path, int) else path, key=key) as found:
        found.verify(threads=1)
        return found.manifest


def check(path: Path, content: bytes, key: bytes | None) -> Manifest:
    path.write_bytes(content)
    return read_all(path, key)


def rejection(path: Path | int, key: bytes | None) -> tuple[str, int]:
    """The message, and the offset that it names."""
    with pytest.raises(Damaged) as caught:
        read_all(path, key)
    message = caught.value.message.removeprefix(str(path))  # its name has words of the test
    (offset,) = re.findall(r"at offset (\d+)$", message)
    return message, int(offset)


def rejected(path: Path, content: bytes, key: bytes | None) -> tuple[str, int]:
    path.write_bytes(content)
    return rejection(path, key)


class TestRoundTrip:
    def test_all_of_it_comes_back(self, tmp_path: Path, chunks: Chunks, key: bytes | None) -> None:
        manifest, path = small_checkpoint(chunks), tmp_path / "file"
        assert write(manifest, chunks, path, key=key) == path.stat().st_size
        with Archive.open(path, key=key) as found:
            assert found.manifest == manifest
            assert found.encrypted == (key is not None)
            assert found.content_bytes == sum(pieces_of(manifest).values())
            found.verify()
            for content in BY_ENCODING.values():
                assert found.read(named(content)) == content
            with pytest.raises(KeyError):
                found.read("0" * 64)

    def test_an_import_stores_what_the_manifest_names(
        self, tmp_path: Path, chunks: Chunks, key: bytes | None
    ) -> None:  # fmt: skip
        manifest, path = small_checkpoint(chunks), tmp_path / "file"
        write(manifest, chunks, path, key=key)
        other, done = Chunks(tmp_path / "other"), list[int]()
        with Archive.open(path, key=key) as found, other.writing() as writing:
            assert found.import_into(writing, progress=done.append) == manifest
            writing.sync()
        assert done[-1] == sum(pieces_of(manifest).values())
        for name, size in pieces_of(manifest).items():
            assert other.encoded(name, size) == chunks.encoded(name, size)
        assert {path.name for path in other.folder.rglob("*") if path.is_file()} == set(pieces_of(manifest))

    @given(st.lists(st.binary(min_size=1, max_size=300).filter(lambda b: any(b)), max_size=5), st.booleans())
    @settings(max_examples=40)
    def test_any_content_comes_back(
        self, tmp_path_factory: pytest.TempPathFactory, contents: list[bytes], encrypted: bool
    ) -> None:
        folder, key = tmp_path_factory.mktemp("node"), KEY if encrypted else None
        chunks = Chunks(folder / "objects")
        with chunks.writing() as writing:
            found = [stored(writing, content) for content in contents]
            manifest = manifest_of(found, stored(writing, b"snapshot"))
        write(manifest, chunks, folder / "file", key=key, threads=1)
        with Archive.open(folder / "file", key=key) as exported:
            exported.verify(threads=1)
            assert exported.manifest == manifest
            assert [exported.read(named(content)) for content in contents] == contents

    def test_a_checkpoint_without_content(self, tmp_path: Path, chunks: Chunks, key: bytes | None) -> None:
        with chunks.writing() as writing:
            manifest = manifest_of([], stored(writing, b""))
        write(manifest, chunks, tmp_path / "file", key=key)
        assert check(tmp_path / "file", (tmp_path / "file").read_bytes(), key) == manifest

    def test_the_file_is_private_and_appears_when_it_is_complete(self, tmp_path: Path, chunks: Chunks) -> None:
        path = tmp_path / "out" / "file"
        path.parent.mkdir()
        manifest = small_checkpoint(chunks)
        path.write_bytes(b"an earlier one")
        seen: list[bytes] = []
        write(manifest, chunks, path, progress=lambda _: seen.append(path.read_bytes()))
        assert set(seen) == {b"an earlier one"}
        assert path.stat().st_mode & 0o777 == 0o600
        assert [*path.parent.iterdir()] == [path]

    def test_a_damaged_piece_is_not_exported(self, tmp_path: Path, chunks: Chunks) -> None:
        path = tmp_path / "out" / "file"
        path.parent.mkdir()
        manifest = small_checkpoint(chunks)
        piece = chunks.path(named(BY_ENCODING[0]))
        piece.write_bytes(piece.read_bytes()[:-1] + b"?")
        with pytest.raises(Damaged, match=piece.name[:12]):
            write(manifest, chunks, path)
        assert [*path.parent.iterdir()] == []

    def test_pieces_stay_while_they_are_exported(self, tmp_path: Path, chunks: Chunks) -> None:
        removed: list[bool] = []
        manifest = small_checkpoint(chunks)
        write(manifest, chunks, tmp_path / "file", progress=lambda _: removed.append(chunks.remove_unneeded(set)))
        assert set(removed) == {False}


class TestDamage:
    @pytest.fixture
    def file(self, small: bytes) -> Iterator[int]:
        """In memory: it is changed and read thousands of times."""
        fd = memory_file(small)
        yield fd
        os.close(fd)

    def test_every_changed_byte_is_found_where_it_is(self, small: bytes, file: int, key: bytes | None) -> None:
        # The parts that have a checksum of their own; the last is that of all of it.
        parts = [0, archive.PREFIX.size, HEADER_BYTES]
        while parts[-1] < len(small) - TRAILER.size:
            parts += [parts[-1] + SECTION.size, parts[-1] + SECTION.size + SECTION.unpack_from(small, parts[-1])[2]]
        parts.append(len(small) - 32)
        read_all(file, key)
        for at in range(len(small)):
            os.pwrite(file, bytes([small[at] ^ 1 << at % 8]), at)
            message, offset = rejection(file, key)
            assert offset == max(part for part in parts if part <= at), (at, message)
            os.pwrite(file, small[at : at + 1], at)
        read_all(file, key)

    def test_every_truncation_is_found(self, small: bytes, file: int, key: bytes | None) -> None:
        for length in reversed(range(len(small))):
            os.ftruncate(file, length)
            assert rejection(file, key)[1] <= length

    def test_something_appended_is_found(self, tmp_path: Path, small: bytes, key: bytes | None) -> None:
        assert "trailer" in rejected(tmp_path / "file", small + b"\0", key)[0]
        assert "had" in rejected(tmp_path / "file", small + small[-TRAILER.size :], key)[0]

    def test_an_import_finds_it_too_and_names_nothing(self, tmp_path: Path, small: bytes, key: bytes | None) -> None:
        other = Chunks(tmp_path / "other")
        for at in (len(small) - 1, len(small) // 2):
            changed = bytearray(small)
            changed[at] ^= 1
            (tmp_path / "file").write_bytes(changed)
            with (
                pytest.raises(Damaged), other.writing() as writing,
                Archive.open(tmp_path / "file", key=key) as found,
            ):  # fmt: skip
                found.import_into(writing)
        assert other.remove_unneeded(set)
        assert not any(path.is_file() for path in other.folder.rglob("*"))

    def test_a_file_that_shrinks_after_it_was_opened(self, tmp_path: Path, small: bytes, key: bytes | None) -> None:
        path = tmp_path / "file"
        path.write_bytes(small)
        with Archive.open(path, key=key) as found:
            os.truncate(path, len(small) - 200)
            with pytest.raises(Damaged, match="truncated, at offset"):
                found.verify()

    @pytest.mark.parametrize("content", [b"", b"x", b"SQLite format 3\0" + bytes(500), b"xMIG checkpoint\0"])
    def test_other_files_are_none(self, tmp_path: Path, content: bytes) -> None:
        rejected(tmp_path / "file", content, None)

    def test_a_pipe_is_none(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(Damaged, match="regular file"):
            Archive.open(tmp_path / "pipe")


class TestVersions:
    def changed(self, small: bytes, writer: int, reader: int) -> bytes:
        """With the right checksums."""
        prefix = bytearray(small[: archive.PREFIX.size - 4])
        prefix[16:18] = bytes([writer, reader])
        content = with_checksum(bytes(prefix)) + small[archive.PREFIX.size : -32]
        return content + hashlib.sha256(content).digest()

    @pytest.mark.parametrize("rest", [slice(0, None), slice(0, archive.PREFIX.size)])
    def test_a_later_one_is_refused(self, tmp_path: Path, small: bytes, rest: slice) -> None:
        path = tmp_path / "file"
        path.write_bytes(self.changed(small, 3, 2)[rest])  # only the first part is as it is here
        with pytest.raises(Conflict, match=r"version 3 .* reader of version 2.*one of version 1") as caught:
            Archive.open(path, key=KEY)
        assert caught.value.code == "other_version"

    def test_a_later_one_that_this_can_read_is_read(self, tmp_path: Path, chunks: Chunks) -> None:
        manifest = small_checkpoint(chunks)
        write(manifest, chunks, tmp_path / "small")
        content = self.changed((tmp_path / "small").read_bytes(), 2, 1)
        assert check(tmp_path / "file", content, None) == manifest

    @pytest.mark.parametrize("versions", [(0, 0), (1, 0)])
    def test_versions_that_nobody_wrote(self, tmp_path: Path, small: bytes, versions: tuple[int, int]) -> None:
        assert rejected(tmp_path / "file", self.changed(small, *versions), KEY)[1] == 16


class TestKeys:
    @pytest.fixture
    def key(self) -> bytes:
        return KEY

    def test_another_key_is_refused(self, tmp_path: Path, small: bytes) -> None:
        with pytest.raises(Invalid, match="another key") as caught:
            check(tmp_path / "file", small, bytes(32))
        assert caught.value.code == "bad_key"

    def test_no_key_is_refused(self, tmp_path: Path, small: bytes) -> None:
        with pytest.raises(Invalid, match="is encrypted"):
            check(tmp_path / "file", small, None)

    def test_a_plain_file_does_not_take_the_place_of_an_encrypted_one(self, tmp_path: Path, chunks: Chunks) -> None:
        write(small_checkpoint(chunks), chunks, tmp_path / "file")
        with pytest.raises(Invalid, match="not encrypted"):
            Archive.open(tmp_path / "file", key=KEY)

    def test_it_is_what_docs_formats_md_describes(self, tmp_path: Path, small: bytes, chunks: Chunks) -> None:
        _, code = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "formats.md").read_text(), re.DOTALL)
        names: dict[str, Callable[..., tuple[bytes, dict[str, bytes]]]] = {}
        exec(code, names)
        (tmp_path / "file").write_bytes(small)
        manifest, pieces = names["read_export"](str(tmp_path / "file"), KEY)
        expected = small_checkpoint(chunks)
        assert manifest == expected.model_dump_json().encode()
        assert pieces == {name: chunks.encoded(name, size) for name, size in pieces_of(expected).items()}
        with pytest.raises(AssertionError, match="another key"):
            names["read_export"](str(tmp_path / "file"), bytes(32))

    def test_nothing_is_in_clear(self, small: bytes, chunks: Chunks) -> None:
        manifest = small_checkpoint(chunks)
        for name in pieces_of(manifest):
            assert bytes.fromhex(name) not in small
            assert name.encode() not in small
        for word in (b"trains", b"node-1", b"train.py", b"XMPIECE", b"the same words", BY_ENCODING[0][:8]):
            assert word not in small

    def test_two_exports_have_nothing_in_common(self, tmp_path: Path, small: bytes, chunks: Chunks) -> None:
        write(small_checkpoint(chunks), chunks, tmp_path / "again", key=KEY)
        others = sections_of((tmp_path / "again").read_bytes())
        for (*_, nonce, payload), (*_, other_nonce, other) in zip(sections_of(small), others, strict=True):
            assert nonce != other_nonce
            assert len(payload) == len(other)
            assert all(payload[at : at + 8] != other[at : at + 8] for at in range(0, len(other) - 8, 8))

    def test_a_section_is_accepted_at_its_place_only(self, tmp_path: Path, small: bytes, chunks: Chunks) -> None:
        """Somebody without the key changes what he can, with right checksums."""
        write(small_checkpoint(chunks), chunks, tmp_path / "again", key=KEY)
        sections, others = sections_of(small), sections_of((tmp_path / "again").read_bytes())
        total = sum(pieces_of(small_checkpoint(chunks)).values())

        def made(sections: Sequence[tuple[bytes, int, bytes, bytes]]) -> bytes:
            return joined(small[:HEADER_BYTES], sections, content_bytes=total)

        check(tmp_path / "file", made(sections), KEY)
        for number in range(len(sections)):
            of_another_file = [*sections[:number], others[number], *sections[number + 1 :]]
            assert "without the key" in rejected(tmp_path / "file", made(of_another_file), KEY)[0]
            renumbered = (sections[number][0], number + 1, *sections[number][2:])
            rejected(tmp_path / "file", made([*sections[:number], renumbered, *sections[number + 1 :]]), KEY)
        rejected(tmp_path / "file", made([sections[0], sections[2], sections[1], *sections[3:]]), KEY)
        rejected(tmp_path / "file", made([sections[0], *sections[2:]]), KEY)

    @pytest.mark.parametrize("content", [KEY, KEY.hex().encode(), KEY.hex().upper().encode() + b"\n"])
    def test_a_key_is_raw_or_hexadecimal(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "key").write_bytes(content)
        assert key_of(tmp_path / "key") == KEY

    @pytest.mark.parametrize("content", [b"", KEY[1:], KEY + b"\n", KEY.hex().encode()[1:], b"g" * 64, KEY * 5])
    def test_anything_else_is_none(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "key").write_bytes(content)
        with pytest.raises(Invalid, match="is not a key"):
            key_of(tmp_path / "key")


def sections_of(content: bytes) -> list[tuple[bytes, int, bytes, bytes]]:
    """Kind, number, nonce and bytes of each."""
    found, at = [], HEADER_BYTES
    while at < len(content) - TRAILER.size:
        kind, number, size, nonce, _, _ = SECTION.unpack_from(content, at)
        found.append((kind, number, nonce, content[at + SECTION.size : at + SECTION.size + size]))
        at += SECTION.size + size
    return found


def joined(
    header: bytes, sections: Sequence[tuple[bytes, int, bytes, bytes]], *, content_bytes: int = 0,
    sizes: dict[int, int] | None = None, trailer: Callable[[list[Any]], None] | None = None,
) -> bytes:  # fmt: skip
    """A file of these sections, with right checksums. `sizes`: what sections state in place of their size."""
    out, index_at = io.BytesIO(), 0
    out.write(header)
    for place, (kind, number, nonce, payload) in enumerate(sections):
        index_at = out.tell()
        size = (sizes or {}).get(place, len(payload))
        out.write(with_checksum(SECTION.pack(kind, number, size, nonce, zlib.crc32(payload), 0)[:-4]))
        out.write(payload)
    fields = [archive.TRAILER_MAGIC, index_at, out.tell() + TRAILER.size, content_bytes, len(sections), 0, b""]
    if trailer is not None:
        trailer(fields)
    out.write(with_checksum(TRAILER.pack(*fields)[: archive.CHECKED]))
    return out.getvalue() + hashlib.sha256(out.getvalue()).digest()


PLAIN_HEADER = with_checksum(archive.PREFIX.pack(archive.MAGIC, 1, 1, 0, 0, 0)[:-4]) + with_checksum(bytes(48))
CONTENT = b"the content of a piece " * 40
EMPTY = Content(bytes=0, chunks=())


class TestHostileFiles:
    """Files with right checksums, whose author wants more than to be read."""

    def forged(
        self, pieces: Sequence[tuple[bytes, bytes, int]], *, changes: Callable[[dict[str, Any]], None] | None = None,
        move: int = 0, listed: Sequence[int] | None = None, named_as: int | None = None, **others: Any,
    ) -> bytes:  # fmt: skip
        """`pieces`: content, the piece's bytes, the size that manifest and index state. `listed`: which of them the
        index has. `named_as`: the size in the manifest only."""
        document = json.loads(manifest_of([], EMPTY).model_dump_json())
        document["programs"][0]["memory"] = [
            {"id": 0, "kind": "shadow", "ordinal": 0, "message": "", "content": {"bytes": 1 << 40, "chunks": [
                {"at": place << 31, "bytes": size if named_as is None else named_as, "hash": named(content)}
                for place, (content, _, size) in enumerate(pieces)
            ]}}
        ]  # fmt: skip
        if changes is not None:
            changes(document)
        sections = [(archive.MANIFEST, 0, bytes(12), json.dumps(document).encode())]
        index, at = [], HEADER_BYTES + SECTION.size + len(sections[0][3])
        for number, (content, piece, size) in enumerate(pieces, 1):
            index.append(archive.ENTRY.pack(bytes.fromhex(named(content)), at + move, len(piece), size))
            sections.append((archive.PIECE, number, bytes(12), piece))
            at += SECTION.size + len(piece)
        chosen = range(len(pieces)) if listed is None else listed
        sections.append((archive.INDEX, len(pieces) + 1, bytes(12), b"".join(index[n] for n in chosen)))
        others.setdefault("content_bytes", sum(size for _, _, size in pieces))
        return joined(PLAIN_HEADER, sections, **others)

    def good(self, content: bytes = CONTENT) -> tuple[bytes, bytes, int]:
        return content, encode(content), len(content)

    def test_what_is_forged_here_is_read_if_nothing_is_wrong(self, tmp_path: Path) -> None:
        check(tmp_path / "file", self.forged([self.good(), self.good(b"x")]), None)

    @pytest.mark.parametrize("size", [(1 << 64) - 1, 1 << 63, 1 << 40, 129 << 20])
    @pytest.mark.parametrize("section", [0, 1, 2])
    def test_sizes_beyond_the_limits(self, tmp_path: Path, size: int, section: int, limited_reads: None) -> None:
        message, _ = rejected(tmp_path / "file", self.forged([self.good()], sizes={section: size}), None)
        assert str(size) in message

    def test_sizes_beyond_the_file(self, tmp_path: Path, limited_reads: None) -> None:
        message, offset = rejected(tmp_path / "file", self.forged([self.good()], sizes={0: 60 << 20}), None)
        assert ("ends behind the end" in message, offset) == (True, HEADER_BYTES)

    @pytest.mark.parametrize("size", [(128 << 20) + 1, 1 << 40])
    def test_a_large_file_may_not_have_a_larger_manifest(
        self, tmp_path: Path, size: int, limited_reads: None
    ) -> None:  # fmt: skip
        end = HEADER_BYTES + SECTION.size + size
        index_at = end - SECTION.size
        fields = (archive.TRAILER_MAGIC, index_at, end + TRAILER.size, 0, 2, 0, b"")
        with (tmp_path / "file").open("wb") as file:
            file.write(PLAIN_HEADER + with_checksum(SECTION.pack(archive.MANIFEST, 0, size, bytes(12), 0, 0)[:-4]))
            file.seek(end)
            file.write(with_checksum(TRAILER.pack(*fields)[: archive.CHECKED]) + bytes(32))
        message, offset = rejection(tmp_path / "file", None)
        assert ("more than" in message, offset) == (True, HEADER_BYTES)

    def test_a_section_that_no_index_has(self, tmp_path: Path) -> None:
        document = manifest_of([], EMPTY).model_dump_json().encode()
        sections = [
            (archive.MANIFEST, 0, bytes(12), document),
            (archive.PIECE, 1, bytes(12), b"what nobody would look at"),
            (archive.INDEX, 1, bytes(12), b""),
        ]

        def change(fields: list[Any]) -> None:
            fields[4] = 2

        message, offset = rejected(tmp_path / "file", joined(PLAIN_HEADER, sections, trailer=change), None)
        expected = HEADER_BYTES + SECTION.size + len(document)
        assert ("between the pieces and the index" in message, offset) == (True, expected)

    def test_something_behind_the_index(self, tmp_path: Path) -> None:
        document = manifest_of([], EMPTY).model_dump_json().encode()
        sections = [
            (archive.MANIFEST, 0, bytes(12), document),
            (archive.INDEX, 1, bytes(12), b""),
            (archive.PIECE, 2, bytes(12), b"what nobody would look at"),
        ]
        index_at = HEADER_BYTES + SECTION.size + len(document)

        def change(fields: list[Any]) -> None:
            fields[1], fields[4] = index_at, 2

        message, offset = rejected(tmp_path / "file", joined(PLAIN_HEADER, sections, trailer=change), None)
        assert ("between index and trailer" in message, offset) == (True, index_at + SECTION.size)

    @pytest.mark.parametrize("number", [0, 1, 2])
    def test_sections_with_another_number(self, tmp_path: Path, number: int) -> None:
        whole = self.forged([self.good()])
        sections = sections_of(whole)
        kind, found, nonce, payload = sections[number]
        sections[number] = (kind, found + 1, nonce, payload)
        content = joined(PLAIN_HEADER, sections, content_bytes=len(CONTENT))
        assert "has number" in rejected(tmp_path / "file", content, None)[0]

    def test_a_hash_with_two_sizes(self, tmp_path: Path) -> None:
        def change(document: dict[str, Any]) -> None:
            chunks = document["programs"][0]["memory"][0]["content"]["chunks"]
            chunks.insert(0, {"at": 0, "bytes": 1, "hash": chunks[0]["hash"]})
            chunks[1]["at"] = 1

        message, offset = rejected(tmp_path / "file", self.forged([self.good()], changes=change), None)
        assert (f"has 1 and {len(CONTENT)} bytes" in message, offset) == (True, HEADER_BYTES + SECTION.size)

    @pytest.mark.parametrize("at", [1 << 40, 1])
    def test_pieces_outside_of_their_place(self, tmp_path: Path, at: int) -> None:
        def change(document: dict[str, Any]) -> None:
            chunks = document["programs"][0]["memory"][0]["content"]["chunks"]
            chunks.append(chunks[0] | {"at": at})

        message, offset = rejected(tmp_path / "file", self.forged([self.good()], changes=change), None)
        assert ("not in its place" in message, offset) == (True, HEADER_BYTES + SECTION.size)

    @pytest.mark.parametrize("sections", [0, 1, 2, 4, (1 << 32) - 1])
    def test_another_number_of_sections(self, tmp_path: Path, sections: int, limited_reads: None) -> None:
        def change(fields: list[Any]) -> None:
            fields[4] = sections

        rejected(tmp_path / "file", self.forged([self.good()], trailer=change), None)

    @pytest.mark.parametrize("at", [0, HEADER_BYTES, (1 << 64) - 1, 1 << 40])
    def test_an_index_elsewhere(self, tmp_path: Path, at: int, limited_reads: None) -> None:
        def change(fields: list[Any]) -> None:
            fields[1] = at

        rejected(tmp_path / "file", self.forged([self.good()], trailer=change), None)

    @pytest.mark.parametrize("stated", [1 << 20, 1 << 30, 1 << 40, (1 << 63) - 1])
    def test_a_piece_that_becomes_larger_than_it_states(self, tmp_path: Path, stated: int) -> None:
        block = (1024 << 3 | 0b011).to_bytes(3, "little") + b"x"
        frame = b"\x28\xb5\x2f\xfd\xe0" + stated.to_bytes(8, "little") + block
        header = HEADER.pack(b"XMPIECE1", 1, bytes(3), zlib.crc32(frame), 1024)
        message, _ = rejected(tmp_path / "file", self.forged([(b"x" * 1024, header + frame, 1024)]), None)
        assert "not what was kept under this hash" in message

    def test_a_piece_that_decompresses_to_more(self, tmp_path: Path) -> None:
        bomb = zstandard.ZstdCompressor().compress(bytes(1 << 24))
        header = HEADER.pack(b"XMPIECE1", 1, bytes(3), zlib.crc32(bomb), 1024)
        rejected(tmp_path / "file", self.forged([(bytes(1024), header + bomb, 1024)]), None)

    @pytest.mark.parametrize("size", [(1 << 30) + 1, 0])
    def test_a_piece_of_a_size_that_none_has(self, tmp_path: Path, size: int) -> None:
        message, _ = rejected(tmp_path / "file", self.forged([(CONTENT, encode(CONTENT), size)]), None)
        assert "manifest is not valid" in message

    def test_a_piece_with_another_content(self, tmp_path: Path) -> None:
        other = CONTENT[::-1]
        message, offset = rejected(tmp_path / "file", self.forged([(other, encode(CONTENT), len(other))]), None)
        assert "not what was kept under this hash" in message
        assert offset > HEADER_BYTES

    def test_sizes_that_differ(self, tmp_path: Path) -> None:
        rejected(tmp_path / "file", self.forged([self.good()], named_as=len(CONTENT) - 1), None)
        message, _ = rejected(tmp_path / "file", self.forged([self.good()], content_bytes=1), None)
        assert "sum of the contents" in message

    def test_a_piece_that_is_not_where_it_has_to_be(self, tmp_path: Path) -> None:
        for move in (1, -1, SECTION.size):
            rejected(tmp_path / "file", self.forged([self.good()], move=move), None)

    @pytest.mark.parametrize("listed", [[], [0], [1], [1, 0], [0, 0], [0, 1, 1]])
    def test_an_index_with_other_pieces(self, tmp_path: Path, listed: list[int]) -> None:
        rejected(tmp_path / "file", self.forged([self.good(), self.good(b"x")], listed=listed), None)

    def test_a_piece_twice(self, tmp_path: Path) -> None:
        message, _ = rejected(tmp_path / "file", self.forged([self.good(), self.good()]), None)
        assert "twice" in message

    def test_pieces_that_the_manifest_does_not_name_or_that_are_missing(self, tmp_path: Path) -> None:
        def forget(document: dict[str, Any]) -> None:
            document["programs"][0]["memory"][0]["content"]["chunks"].pop()

        def add(document: dict[str, Any]) -> None:
            chunks = document["programs"][0]["memory"][0]["content"]["chunks"]
            chunks.append({"at": 1 << 35, "bytes": 1, "hash": "0" * 64})

        for changes in (forget, add):
            message, _ = rejected(tmp_path / "file", self.forged([self.good()], changes=changes), None)
            assert "other pieces than the manifest" in message

    @pytest.mark.parametrize("name", ["../core.img", "/etc/shadow", "a/b", "", ".", "..", "core.img\n", "a\0b"])
    def test_images_with_names_of_other_files(self, tmp_path: Path, name: str) -> None:
        def change(document: dict[str, Any]) -> None:
            document["programs"][0]["images"] = [{"name": name, "content": {"bytes": 0, "chunks": []}}]

        message, _ = rejected(tmp_path / "file", self.forged([], changes=change), None)
        assert "programs.0.images.0.name" in message

    def test_messages_are_harmless(self, tmp_path: Path) -> None:
        message, _ = rejected(
            tmp_path / "file", self.forged([], changes=lambda found: found.update({"\x1b[31m" * 500: 1})), None
        )
        assert message.isprintable()
        assert len(message) < 1000

    @pytest.mark.parametrize("document", [b"", b"{}", b"[" * 100_000, b"\xff\xfe", b'{"format": 2}', b"null"])
    def test_documents_that_are_no_manifest(self, tmp_path: Path, document: bytes) -> None:
        sections = [(archive.MANIFEST, 0, bytes(12), document), (archive.INDEX, 1, bytes(12), b"")]
        message, offset = rejected(tmp_path / "file", joined(PLAIN_HEADER, sections), None)
        assert ("manifest is not valid" in message, offset) == (True, HEADER_BYTES + SECTION.size)

    @pytest.mark.parametrize(
        "header",
        [
            PLAIN_HEADER[: archive.PREFIX.size] + with_checksum(b"salt" + bytes(44)),
            with_checksum(archive.PREFIX.pack(archive.MAGIC, 1, 1, 2, 0, 0)[:-4]) + PLAIN_HEADER[archive.PREFIX.size :],
            with_checksum(archive.PREFIX.pack(archive.MAGIC, 1, 1, 0, 1, 0)[:-4]) + PLAIN_HEADER[archive.PREFIX.size :],
        ],
        ids=["a salt, not encrypted", "another encryption", "a byte that is zero"],
    )
    def test_headers_with_what_none_has(self, tmp_path: Path, header: bytes) -> None:
        sections = sections_of(self.forged([]))
        check(tmp_path / "file", joined(PLAIN_HEADER, sections), None)
        assert rejected(tmp_path / "file", joined(header, sections), None)[1] < HEADER_BYTES

    def test_a_nonce_in_a_plain_file(self, tmp_path: Path) -> None:
        document = manifest_of([], EMPTY).model_dump_json().encode()
        sections = [(archive.MANIFEST, 0, b"n" * 12, document), (archive.INDEX, 1, bytes(12), b"")]
        assert "nonce" in rejected(tmp_path / "file", joined(PLAIN_HEADER, sections), None)[0]

    @given(st.binary(max_size=400), st.integers(0, 3))
    @settings(max_examples=100)
    def test_anything_is_rejected_or_read(
        self, tmp_path_factory: pytest.TempPathFactory, noise: bytes, where: int
    ) -> None:  # fmt: skip
        sections = [
            (archive.MANIFEST, 0, bytes(12), manifest_of([], EMPTY).model_dump_json().encode()),
            (archive.INDEX, 1, bytes(12), b""),
        ]
        if where < 2:
            sections[where] = (*sections[where][:3], noise)
        elif where == 2:
            sections.insert(1, (archive.PIECE, 1, bytes(12), noise))
        path = tmp_path_factory.mktemp("hostile") / "file"
        if where == 3 or (where == 1 and not noise):
            check(path, joined(PLAIN_HEADER, sections), None)
        else:
            rejected(path, joined(PLAIN_HEADER, sections), None)


class TestPiecesOfOthers:
    def test_one_is_taken_as_it_is_if_it_has_its_hash(self, chunks: Chunks) -> None:
        piece = encode(CONTENT)
        with chunks.writing() as writing:
            for wrong in (piece[:-1], piece + b"x", encode(CONTENT[::-1])):
                with pytest.raises(Damaged):
                    writing.take(named(CONTENT), len(CONTENT), wrong)
            assert not any(path.is_file() for path in chunks.folder.rglob("*"))
            assert writing.take(named(CONTENT), len(CONTENT), piece) == len(piece)
            assert writing.take(named(CONTENT), len(CONTENT), piece) == 0
        assert chunks.encoded(named(CONTENT), len(CONTENT)) == piece

    def test_one_that_is_damaged_here_is_written_again(self, chunks: Chunks) -> None:
        piece, name = encode(CONTENT), named(CONTENT)
        with chunks.writing() as writing:
            writing.take(name, len(CONTENT), piece)
            chunks.path(name).write_bytes(piece[:-1])
            with pytest.raises(Damaged):
                chunks.encoded(name, len(CONTENT))
            assert writing.take(name, len(CONTENT), piece) == len(piece)
        assert chunks.get(name, len(CONTENT)) == CONTENT


class TestInThreads:
    def test_few_are_begun_ahead(self) -> None:
        begun: list[int] = []

        def items() -> Iterator[int]:
            for number in range(100):
                begun.append(number)
                yield number

        results = archive._in_threads(lambda number: number * number, items(), 2)
        assert next(results) == 0
        assert len(begun) == 4
        assert list(results) == [number * number for number in range(1, 100)]

    def test_an_error_ends_it(self) -> None:
        begun: list[int] = []

        def work(number: int) -> None:
            begun.append(number)
            raise OSError(number, "failed")

        with pytest.raises(OSError, match="failed"):
            list(archive._in_threads(work, range(100), 2))
        assert len(begun) <= 4


class TestVersion1:
    """Files that version 1 wrote stay readable."""

    @pytest.mark.parametrize(("name", "key"), [("version1.xmig", None), ("version1-encrypted.xmig", "version1.key")])
    def test_they_are_read(self, tmp_path: Path, name: str, key: str | None) -> None:
        chunks = Chunks(tmp_path / "objects")
        with Archive.open(DATA / name, key=key_of(DATA / key) if key else None) as found, chunks.writing() as writing:
            manifest = found.import_into(writing)
        assert manifest == Manifest.model_validate_json((DATA / "version1.json").read_text())
        for content, expected in zip(
            [*(memory.content for memory in manifest.programs[0].memory), manifest.programs[0].snapshots[0]],
            BY_ENCODING.values(), strict=True,
        ):  # fmt: skip
            fd = memory_file(b"")
            chunks.restore(content, fd)
            assert os.pread(fd, content.bytes + 1, 0) == expected
            os.close(fd)
        assert {chunks.encoded(*piece)[8] for piece in pieces_of(manifest).items()} >= {0, 1, 2, 4}
